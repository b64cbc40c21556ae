//! HTTP: the connections of clients, and what is served to them.
//!
//! | module | does |
//! |---|---|
//! | `listener` | accepts connections, with TLS or without; limits; ends in good order |
//! | `transport` | a connection that sends mapped content by `sendfile(2)`, and ends if its client takes nothing |
//! | `body` | the bodies of responses |

mod body;
mod listener;
mod transport;

pub use body::Body;
pub use listener::{Client, Door, Listener, ListenerLimits};
pub use transport::{Mapped, Windows};
