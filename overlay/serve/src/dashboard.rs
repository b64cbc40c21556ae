//! What the metrics address of a mount answers.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use async_trait::async_trait;
use forebay_engine::Overlay;
use forebay_system::tcp_clients;
use http::header::{ALLOW, HOST};
use http::request::Parts;
use http::{HeaderValue, Method, Request, Response, StatusCode, Uri};
use prometheus_client::registry::Registry;
use tokio_util::sync::CancellationToken;

use crate::content::reply::text;
use crate::page::{Events, MountSource, Residency};
use crate::{Door, HttpClient, ReplyBody, RequestContent, metrics, page};

/// Serves the metrics, the page and its data.
pub struct Dashboard {
    registry: Arc<Registry>,
    source: Arc<dyn MountSource>,
    events: Events,
    residency: Residency,
    address: SocketAddr,
    stop: CancellationToken,
}

impl Dashboard {
    /// `address` is the one that clients connect to. The answers with events end with `stop`.
    pub fn new(
        registry: Registry,
        overlay: Overlay,
        source: Arc<dyn MountSource>,
        address: SocketAddr,
        stop: CancellationToken,
    ) -> Self {
        let (events, residency) = (Events::new(overlay.clone(), source.clone()), Residency::new(overlay));
        Self { registry: Arc::new(registry), source, events, residency, address, stop }
    }

    /// Whether a client may see names of files and jobs. All users of this machine can connect to a loopback address,
    /// also those who may not read the mount.
    async fn may_see_names(&self, client: SocketAddr) -> bool {
        if !self.address.ip().is_loopback() {
            return true;
        }
        let (server, own) = (self.address, rustix::process::geteuid().as_raw());
        let user = tokio::task::spawn_blocking(move || tcp_clients::user_of(client, server)).await;
        matches!(user, Ok(Ok(Some(user))) if user == 0 || user == own)
    }

    async fn get(&self, uri: &Uri, client: SocketAddr) -> Response<ReplyBody> {
        let (path, query) = (uri.path(), uri.query());
        if matches!(path, "/events" | "/resident" | "/job") && !self.may_see_names(client).await {
            let why = "it has names of files: only root and the user who mounted may read it";
            return text(StatusCode::FORBIDDEN, why);
        }
        match path {
            "/metrics" => self.scrape().await,
            "/healthz" => text(StatusCode::OK, "ok"),
            "/events" => self.events.answer(self.stop.clone()),
            "/resident" => match argument("path", query) {
                Some(path) => self.residency.answer(&path).await,
                None => text(StatusCode::BAD_REQUEST, "the query is not path=PATH"),
            },
            "/job" => match argument("id", query) {
                Some(id) => page::job(&*self.source, id).await,
                None => text(StatusCode::BAD_REQUEST, "the query is not id=JOB"),
            },
            _ => page::file(path).unwrap_or_else(|| text(StatusCode::NOT_FOUND, "there are /, /metrics and /healthz")),
        }
    }

    async fn scrape(&self) -> Response<ReplyBody> {
        let registry = self.registry.clone();
        let scraped = tokio::task::spawn_blocking(move || metrics::exposition(&registry)).await;
        match scraped {
            Ok(Ok(response)) => response,
            Ok(Err(error)) => text(StatusCode::INTERNAL_SERVER_ERROR, &format!("{error}")),
            Err(error) => text(StatusCode::INTERNAL_SERVER_ERROR, &format!("{error}")),
        }
    }
}

#[async_trait]
impl Door for Dashboard {
    async fn answer(&self, request: Request<RequestContent>, client: HttpClient) -> Response<ReplyBody> {
        let (request, content) = request.into_parts();
        if let Some(refused) = content.refused() {
            return refused;
        }
        if self.address.ip().is_loopback() && !names_this_machine(&request) {
            // A page of another site whose name stands for 127.0.0.1 would read the answers otherwise.
            return text(StatusCode::MISDIRECTED_REQUEST, "the Host of the request is not this machine");
        }
        match request.method {
            Method::GET => self.get(&request.uri, client.address).await,
            Method::HEAD => self.get(&request.uri, client.address).await.map(|_| ReplyBody::empty()),
            _ => {
                let mut response = text(StatusCode::METHOD_NOT_ALLOWED, "GET and HEAD are allowed");
                response.headers_mut().insert(ALLOW, HeaderValue::from_static("GET, HEAD"));
                response
            }
        }
    }
}

fn names_this_machine(request: &Parts) -> bool {
    let header = request.headers.get(HOST).and_then(|host| host.to_str().ok());
    match request.uri.authority().map(|authority| authority.as_str()).or(header) {
        Some(host) => is_this_machine(host),
        // HTTP/1.0: no browser.
        None => true,
    }
}

/// Whether a host, with or without a port, is an address of the loopback device, or `localhost`.
fn is_this_machine(host: &str) -> bool {
    let name = match host.strip_prefix('[') {
        Some(rest) => rest.split_once(']').map_or("", |(name, _)| name),
        None => host.rsplit_once(':').map_or(host, |(name, _)| name),
    };
    name.eq_ignore_ascii_case("localhost") || name.parse().is_ok_and(|address: IpAddr| address.is_loopback())
}

/// Returns the decoded value of a query that consists of `NAME=VALUE`.
fn argument(name: &str, query: Option<&str>) -> Option<String> {
    let value = query?.strip_prefix(name)?.strip_prefix('=')?;
    percent_encoding::percent_decode_str(value).decode_utf8().ok().map(Into::into)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_names_of_the_loopback_device_are_this_machine() {
        for host in ["localhost", "LOCALHOST:9464", "127.0.0.1:9464", "127.3.2.1", "[::1]:9464", "[::1]"] {
            assert!(is_this_machine(host), "{host}");
        }
        for host in ["", "evil.example", "localhost.evil.example:80", "10.0.0.1:9464", "[fe80::1]:80", "[::1"] {
            assert!(!is_this_machine(host), "{host}");
        }
    }

    #[test]
    fn the_argument_of_a_query_is_decoded() {
        let path = |query| argument("path", query);
        assert_eq!(path(Some("path=a%20b/c")).as_deref(), Some("a b/c"));
        assert_eq!(path(Some("path=")).as_deref(), Some(""));
        assert_eq!([path(None), path(Some("p=a")), path(Some("path")), path(Some("path=%ff"))], [const { None }; 4]);
    }
}
