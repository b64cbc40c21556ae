//! Whose connections come over the loopback device.

use std::fs::File;
use std::io::{self, BufRead, BufReader};
use std::net::{IpAddr, SocketAddr};

/// Returns the user whose process has the client's end of a connection between two addresses of this machine. `None`: no
/// such end is known.
///
/// # Errors
/// The kernel's list of connections could not be read.
pub fn user_of(client: SocketAddr, server: SocketAddr) -> io::Result<Option<u32>> {
    let list = if client.is_ipv4() { "/proc/self/net/tcp" } else { "/proc/self/net/tcp6" };
    let (client, server) = (shown(client), shown(server));
    for line in BufReader::new(File::open(list)?).lines().skip(1) {
        let line = line?;
        let mut words = line.split_ascii_whitespace().skip(1);
        if words.next() == Some(&client) && words.next() == Some(&server) {
            // Between: state, queues, timer, retransmissions.
            return Ok(words.nth(4).and_then(|user| user.parse().ok()));
        }
    }
    Ok(None)
}

/// Returns an address as the list shows it: words of 32 bits in the order of the machine, and the port.
fn shown(address: SocketAddr) -> String {
    let bytes = match address.ip() {
        IpAddr::V4(ip) => ip.octets().to_vec(),
        IpAddr::V6(ip) => ip.octets().to_vec(),
    };
    let words = bytes.as_chunks::<4>().0.iter().map(|word| format!("{:08X}", u32::from_ne_bytes(*word)));
    format!("{}:{:04X}", words.collect::<String>(), address.port())
}

#[cfg(test)]
mod tests {
    use std::net::{TcpListener, TcpStream};

    use super::*;

    #[test]
    fn a_client_has_the_user_of_its_process() {
        for address in ["127.0.0.1:0", "[::1]:0"] {
            let Ok(listener) = TcpListener::bind(address) else { continue };
            let server = listener.local_addr().unwrap();
            let client = TcpStream::connect(server).unwrap();
            let user = user_of(client.local_addr().unwrap(), server).unwrap();
            assert_eq!(user, Some(rustix::process::geteuid().as_raw()), "{address}");
        }
        let nobody = user_of("127.0.0.1:1".parse().unwrap(), "127.0.0.1:2".parse().unwrap());
        assert_eq!(nobody.unwrap(), None);
    }
}
