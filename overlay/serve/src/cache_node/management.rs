//! Purge and prefetch, for clients whose token allows it.

use forebay_api::operator::StageRequest;
use forebay_engine::summary;
use http::header::{self, HeaderValue};
use http::{Method, Request, Response, StatusCode};
use serde::Serialize;

use super::{CacheNode, NodeContent, unallowed};
use crate::access::Verdict;
use crate::body::ReplyBody;
use crate::content::{failed, parse, reply};
use crate::listener::{HttpClient, RequestContent};

/// Who owns the leases of what is prefetched.
const LEASE_OWNER: &str = "http-prefetch";
/// How long prefetched files are protected from eviction, in seconds, unless the request says otherwise.
const LEASE_SECONDS: u64 = 3600;

/// The answer to a purge or prefetch.
#[derive(Default, Serialize)]
struct Managed {
    files: u64,
    bytes: u64,
    failed: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    message: Option<String>,
}

fn json(status: StatusCode, managed: &Managed) -> Response<ReplyBody> {
    let mut response = Response::new(ReplyBody::from(serde_json::to_string(managed).unwrap_or_default() + "\n"));
    *response.status_mut() = status;
    response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
    response
}

impl CacheNode {
    /// `POST /.forebay/purge/PATH` and `POST /.forebay/prefetch/PATH`: the path, and everything below it. Only one URL of an
    /// origin is prefetched, since nothing tells what is below it.
    pub(super) async fn manage(
        &self,
        command: &str,
        request: &Request<RequestContent>,
        client: &HttpClient,
        user: &mut Option<String>,
    ) -> Response<ReplyBody> {
        let (verb, path) = command.split_at(command.find('/').unwrap_or(command.len()));
        if !matches!(verb, "purge" | "prefetch") {
            return reply::text(StatusCode::NOT_FOUND, "no such file");
        }
        if request.method() != Method::POST {
            let mut response = reply::text(StatusCode::METHOD_NOT_ALLOWED, "POST only");
            response.headers_mut().insert(header::ALLOW, HeaderValue::from_static("POST"));
            return response;
        }
        let target = if path.is_empty() { "/" } else { path };
        let path = match parse(target) {
            Ok(parsed) => parsed.path,
            Err(why) => return reply::text(StatusCode::BAD_REQUEST, why),
        };
        match self.access.load().may_manage(request.headers(), &path) {
            Verdict::Allowed { name, .. } => *user = name,
            refused => return unallowed(&refused),
        }
        let content = match &self.content {
            NodeContent::Pool(content) => content,
            NodeContent::Origin(proxy) if verb == "purge" => {
                return match proxy.purge(target).await {
                    Ok(files) => json(StatusCode::OK, &Managed { files, ..Managed::default() }),
                    Err(error) => failed(&error),
                };
            }
            NodeContent::Origin(proxy) => {
                let query = request.uri().query().map(|query| format!("?{query}")).unwrap_or_default();
                return match proxy.prefetch(&format!("{target}{query}"), request, client).await {
                    Ok(bytes) => json(StatusCode::OK, &Managed { files: 1, bytes, ..Managed::default() }),
                    Err(status) => {
                        let message = format!("the origin's response is not kept: {status}");
                        let managed = Managed { failed: 1, message: Some(message), ..Managed::default() };
                        json(StatusCode::BAD_GATEWAY, &managed)
                    }
                };
            }
        };
        if verb == "purge" {
            content.forget_all();
            let purged = self.overlay.purge(&path).await;
            // What was opened before the pool was asked.
            content.forget_all();
            return match purged {
                Ok(purged) => {
                    let managed = Managed { files: purged.files, bytes: purged.bytes, ..Managed::default() };
                    json(StatusCode::OK, &managed)
                }
                Err(error) => failed(&error),
            };
        }
        let request = StageRequest {
            paths: vec![path.to_string()],
            lease_owner: LEASE_OWNER.into(),
            lease_secs: Some(LEASE_SECONDS),
            ..StageRequest::default()
        };
        let (summary, failures) = summary(self.overlay.stage(request)).await;
        let failed = summary.failed.max(failures.len() as u64);
        let message = summary.message.or_else(|| failures.first().map(|(path, why)| format!("{path}: {why}")));
        let status = match (summary.refused, failed) {
            (Some(errno), _) if errno == rustix::io::Errno::NOENT.raw_os_error() => StatusCode::NOT_FOUND,
            (Some(errno), _) if errno == rustix::io::Errno::NOSPC.raw_os_error() => StatusCode::INSUFFICIENT_STORAGE,
            (None, 0) => StatusCode::OK,
            _ => StatusCode::BAD_GATEWAY,
        };
        json(status, &Managed { files: summary.files, bytes: summary.bytes, failed, message })
    }
}
