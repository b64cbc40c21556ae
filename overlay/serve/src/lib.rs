//! HTTP: the connections of clients, and what is served to them.
//!
//! | module | does |
//! |---|---|
//! | `listener` | accepts connections, with TLS or without; limits; ends in good order |
//! | `transport` | a connection that sends mapped content by `sendfile(2)`, and ends if its client takes nothing |
//! | `content_turns` | how many requests have content in memory |
//! | `http2_activity` | whether the client of an HTTP/2 connection takes or asks something |
//! | `send_budget` | how much of its responses an HTTP/2 connection has in memory |
//! | `tls` | the certificate that clients see |
//! | `body` | the bodies of responses |
//! | `content` | the pool's files: ranges, conditions, directories, what stays open |
//! | `kept_open` | files that stay open between requests |
//! | `proxy` | the responses of a web server, kept as RFC 9111 allows |
//! | `cache_node` | content for any client: rates, health, purge and prefetch |
//! | `cache_status` | where the content of a response came from: for the client, and counted |
//! | `access` | who may read what: bearer tokens, signed URLs |
//! | `access_log` | the log of requests |
//! | `metrics` | metrics for Prometheus |
//! | `page` | a page for a browser, and its data |
//! | `dashboard` | both, at the metrics address of a mount |

mod access;
mod access_log;
mod body;
mod cache_node;
mod cache_status;
mod content;
mod content_turns;
mod dashboard;
mod http2_activity;
mod kept_open;
mod listener;
pub mod metrics;
pub mod page;
mod proxy;
mod send_budget;
mod tls;
mod transport;

pub use access::AccessRules;
pub use access_log::{AccessLog, LogFormat};
pub use body::ReplyBody;
pub use cache_node::{CacheNode, CacheNodeOptions, ServedContent};
pub use cache_status::ResponseCounters;
pub use content::{ContentOptions, RequestPath, parse};
pub use dashboard::Dashboard;
pub use listener::{Door, HttpClient, Listener, ListenerLimits, REQUEST_HEAD_BYTES, RequestContent};
pub use proxy::{FreshnessOptions, ProxyOptions, check_origin};
pub use tls::Certificate;
pub use transport::{Mapped, MappedOwner, Windows};
