// The server of the suite listens on all interfaces. Loaded before it, this makes it listen on loopback alone.
const net = require('net')
const listen = net.Server.prototype.listen
net.Server.prototype.listen = function (port, ...rest) {
  return listen.call(this, port, '127.0.0.1', ...rest)
}
