//! The metrics address of a mount: metrics and the page, over HTTP.

use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener};
use std::sync::Arc;
use std::thread;

use forebay_api::jobs::{JobFile, JobSummary, Sample};
use forebay_api::operator::Status;
use forebay_api::peers::PeersStatus;
use forebay_backends::decorators::{MetricsSnapshot, SlowCall};
use forebay_engine::Overlay;
use forebay_fuse::RequestLatencies;
use forebay_jobs::Jobs;
use forebay_serve::metrics::{self, EngineMetrics, OperationCounts, OperationMetrics, PeerMetrics, ResponseMetrics};
use forebay_serve::page::MountSource;
use forebay_serve::{Dashboard, ResponseCounters};
use futures::FutureExt;
use futures::future::BoxFuture;
use tokio_util::sync::{CancellationToken, DropGuard};

use super::addresses::AddressUse;
use super::limits;
use super::server::{Facts, complete};

/// Parses `PORT`, for the loopback device, or `ADDRESS:PORT`.
///
/// # Errors
/// The reason why it is not a metrics address.
pub fn parse_address(text: &str) -> Result<SocketAddr, String> {
    /// The daemon gives up the right to listen on lower ports.
    const PORT_MIN: u16 = 1024;
    let text = text.trim();
    let address = match text.parse::<u16>() {
        Ok(port) => SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), port),
        Err(_) => {
            text.parse().map_err(|_| format!("`{text}` is not a port or ADDRESS:PORT, such as 9464 or [::1]:9464"))?
        }
    };
    match address.port() {
        PORT_MIN.. => Ok(address),
        port => Err(format!("port {port}: choose one from {PORT_MIN} on, such as 9464")),
    }
}

/// Where the numbers of a mount are served.
pub const ADDRESS: AddressUse = AddressUse {
    name: "metrics",
    serves: "metrics and the page are served",
    if_taken: "choose another port: --metrics PORT",
    if_foreign: "--metrics PORT for the loopback device; `ip address` shows the addresses",
};

/// What the page shows beside what the engine knows.
struct PageSource {
    jobs: Jobs,
    requests: Arc<RequestLatencies>,
    facts: Arc<Facts>,
}

/// Serves the metrics address until it is dropped. It has a thread of its own, as the control socket has.
pub struct MetricsServer(#[expect(dead_code, reason = "its drop tells the thread to end")] DropGuard);

/// The parts of a mount whose numbers are served.
pub struct MountParts {
    pub overlay: Overlay,
    pub jobs: Jobs,
    pub requests: Arc<RequestLatencies>,
    /// Those of a cache node.
    pub responses: Option<Arc<ResponseCounters>>,
    pub facts: Arc<Facts>,
}

impl MetricsServer {
    /// Begins to serve. `socket`: that of [`AddressUse::bind`]; `None`: the mount was taken over, so it is served in any case, and
    /// the address as soon as it is free. Must be called on the engine's tokio runtime.
    ///
    /// # Errors
    /// No thread could be started.
    pub fn start(address: SocketAddr, socket: Option<TcpListener>, parts: MountParts) -> io::Result<Self> {
        let MountParts { overlay, jobs, requests, responses, facts } = parts;
        let counted = overlay.clone();
        tokio::spawn(async move { counted.keep_census().await }.boxed());
        let mut registry = metrics::registry();
        registry.register_collector(Box::new(EngineMetrics::new(overlay.clone(), facts.pool_calls.clone())));
        let counts = requests.clone();
        registry.register_collector(Box::new(OperationMetrics::new(move || operations(&counts))));
        registry.register_collector(Box::new(ResponseMetrics(responses)));
        let known = facts.clone();
        registry.register_collector(Box::new(PeerMetrics::new(move || peers(&known))));
        let stop = CancellationToken::new();
        let source = Arc::new(PageSource { jobs, requests, facts });
        let dashboard = Dashboard::new(registry, overlay, source, address, stop.clone());
        let runtime = tokio::runtime::Builder::new_current_thread()
            .max_blocking_threads(limits::METRICS_BLOCKING)
            .enable_all()
            .build()?;
        let guard = stop.clone().drop_guard();
        thread::Builder::new().name("forebay-metrics".into()).spawn(move || {
            let connections = limits::METRICS_CONNECTIONS;
            runtime.block_on(ADDRESS.serve((address, socket), connections, Arc::new(dashboard), stop).boxed_local());
            runtime.shutdown_background();
        })?;
        Ok(Self(guard))
    }
}

fn operations(requests: &RequestLatencies) -> OperationCounts {
    OperationCounts { latencies: requests.snapshot(), waiting: requests.waiting() }
}

fn peers(facts: &Facts) -> Option<PeersStatus> {
    facts.peers.get().map(|peers| peers.status())
}

impl MountSource for PageSource {
    fn complete(&self, status: Status) -> Status {
        complete(status, &self.facts)
    }

    fn pool_calls(&self) -> MetricsSnapshot {
        self.facts.pool_calls.snapshot()
    }

    fn slow_calls(&self) -> Vec<SlowCall> {
        self.facts.pool_calls.slow_calls()
    }

    fn operations(&self) -> OperationCounts {
        operations(&self.requests)
    }

    fn peers(&self) -> Option<PeersStatus> {
        peers(&self.facts)
    }

    fn sample(&self) -> BoxFuture<'_, forebay_backends::Result<Sample>> {
        self.jobs.sample_jobs(limits::PAGE_TICK).boxed()
    }

    fn jobs(&self) -> BoxFuture<'_, forebay_backends::Result<Vec<JobSummary>>> {
        self.jobs.jobs().boxed()
    }

    fn job_files(&self, id: String) -> BoxFuture<'_, forebay_backends::Result<Option<Vec<JobFile>>>> {
        self.jobs.job(id).map(|job| Ok(job?.map(|(_, files)| files))).boxed()
    }
}

#[cfg(test)]
mod tests {
    use super::super::FailureKind;
    use super::*;

    #[test]
    fn a_port_alone_is_one_of_the_loopback_device() {
        assert_eq!(parse_address("9464").unwrap().to_string(), "127.0.0.1:9464");
        assert_eq!(parse_address(" 0.0.0.0:9464").unwrap().to_string(), "0.0.0.0:9464");
        assert_eq!(parse_address("[::1]:9464").unwrap().to_string(), "[::1]:9464");
        for bad in ["", "0", "80", "99999", "host:9464", "127.0.0.1", "127.0.0.1:0"] {
            assert!(parse_address(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn an_address_that_is_taken_or_foreign_is_refused_with_the_remedy() {
        let taken = TcpListener::bind("127.0.0.1:0").unwrap();
        let failure = ADDRESS.bind(taken.local_addr().unwrap()).unwrap_err();
        assert!(failure.kind == FailureKind::Busy && failure.what.contains("another program"), "{failure}");
        // Of the block for documentation.
        let failure = ADDRESS.bind("192.0.2.1:9464".parse().unwrap()).unwrap_err();
        assert!(failure.kind == FailureKind::Usage && failure.remedy.is_some(), "{failure}");
    }
}
