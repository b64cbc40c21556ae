//! The arguments of a cache node.

use std::net::SocketAddr;
use std::num::NonZeroU32;
use std::path::PathBuf;
use std::time::Duration;

use bytesize::ByteSize;
use clap::{Args, ValueEnum};
use forebay_daemon::config::ThrottleConfig;

use crate::values;

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum AccessLogFormat {
    /// As Apache and nginx write it.
    Combined,
    /// One object on each line.
    Json,
}

#[derive(Debug, Args)]
pub struct ServeArgs {
    /// The pool, as for `mount`; with --reverse-proxy, a web server.
    pub url: String,
    /// Keep the responses of a web server as it allows (RFC 9111), instead of serving the files of a pool.
    #[arg(long, conflicts_with_all = ["policy", "immutable", "listings", "peers", "throttle"])]
    pub reverse_proxy: bool,
    /// Forward requests that change something, too, with up to 8 MiB of content. Otherwise they are refused.
    #[arg(long, requires = "reverse_proxy")]
    pub forward_changes: bool,
    /// How long a response that is not fresh is used if the web server fails.
    #[arg(long, value_name = "DURATION", default_value = "0s", value_parser = values::duration, requires = "reverse_proxy")]
    pub stale_if_error: Duration,
    /// How long it is believed that there is no such page, if the web server says no time for that.
    #[arg(long, value_name = "DURATION", default_value = "0s", value_parser = values::duration, requires = "reverse_proxy")]
    pub negative_ttl: Duration,
    /// How long a response is fresh that says nothing about it, not even when it was changed. Only for a web server whose
    /// pages are the same for all clients.
    #[arg(long, value_name = "DURATION", default_value = "0s", value_parser = values::duration, requires = "reverse_proxy")]
    pub default_ttl: Duration,
    /// A directory on local NVMe that holds cached content; repeat it for more devices.
    #[arg(long, value_name = "DIR", required = true)]
    pub fast: Vec<PathBuf>,
    /// An address and port to listen on; repeat it for more. Without it, only this machine is served. Sockets that
    /// systemd passes are used instead.
    #[arg(long, value_name = "ADDR:PORT", default_value = "127.0.0.1:8080")]
    pub listen: Vec<SocketAddr>,
    /// The node's name: other commands take its paths below /forebay/NAME.
    #[arg(long, value_name = "NAME", default_value = "node", value_parser = values::name)]
    pub name: String,
    /// The most that the fast pool may hold, such as 500G.
    #[arg(long, value_name = "SIZE")]
    pub limit: Option<ByteSize>,
    /// A file that says how paths are read and kept (TOML).
    #[arg(long, value_name = "FILE")]
    pub policy: Option<PathBuf>,
    /// Declare that the pool never changes: what was fetched once is never asked about again.
    #[arg(long)]
    pub immutable: bool,
    /// The user whose rights clients have: a name or a number.
    #[arg(long, value_name = "USER", default_value = "nobody")]
    pub user: String,
    /// Tokens and the key of signed URLs (TOML). Without it, everyone may read what the user may read.
    #[arg(long, value_name = "FILE")]
    pub access: Option<PathBuf>,
    /// A certificate chain (PEM): serve HTTPS.
    #[arg(long, value_name = "FILE", requires = "tls_key")]
    pub tls_cert: Option<PathBuf>,
    /// The key of the certificate (PEM).
    #[arg(long, value_name = "FILE", requires = "tls_cert")]
    pub tls_key: Option<PathBuf>,
    /// List directories, as HTML and JSON.
    #[arg(long)]
    pub listings: bool,
    /// The most requests of one client in a second.
    #[arg(long, value_name = "N")]
    pub rate: Option<NonZeroU32>,
    /// The most connections at the same time; further ones wait.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    pub connections: Option<u32>,
    /// How long a file is still served after its time is over, while the pool is asked about it.
    #[arg(long, value_name = "DURATION", default_value = "0s", value_parser = values::duration)]
    pub stale_while_revalidate: Duration,
    /// Log requests into a file; - is standard output. SIGHUP opens it again, and reads --access and the certificate
    /// again.
    #[arg(long, value_name = "FILE")]
    pub access_log: Option<PathBuf>,
    /// The format of the log.
    #[arg(long, value_enum, default_value_t = AccessLogFormat::Combined, requires = "access_log")]
    pub access_log_format: AccessLogFormat,
    /// Serve metrics for Prometheus, and a page for a browser: a port of the loopback device, or ADDRESS:PORT for
    /// another one.
    #[arg(long, value_name = "ADDRESS", value_parser = forebay_daemon::metrics::parse_address)]
    pub metrics: Option<SocketAddr>,
    /// Read content from other nodes before the pool, and give it to them: a file that names them (docs/CLUSTER.md).
    #[arg(long, value_name = "FILE")]
    pub peers: Option<PathBuf>,
    /// The most memory that all buffers may use together.
    #[arg(long, value_name = "SIZE")]
    pub memory: Option<ByteSize>,
    /// Limit rate and latency of the pool, such as 100MB/s,2ms, for demonstrations and tests.
    #[arg(long, value_name = "RATE,LATENCY", value_parser = values::pace)]
    pub throttle: Option<ThrottleConfig>,
}

#[derive(Debug, Args)]
pub struct SignUrlArgs {
    /// The URL of a file at a cache node. Its query is signed, too.
    pub url: String,
    /// The access file of the node, with its signing-key.
    #[arg(long, value_name = "FILE")]
    pub access: PathBuf,
    /// How long the URL may be used.
    #[arg(long, value_name = "DURATION", default_value = "1h", value_parser = values::duration)]
    pub valid: Duration,
}
