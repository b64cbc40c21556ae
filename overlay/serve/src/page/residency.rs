//! The tree of what is resident, counted when a page asks for it.

use std::sync::Arc;
use std::time::{Duration, Instant};

use forebay_api::paths;
use forebay_backends::PoolPath;
use forebay_engine::{Overlay, ResidentTree};
use http::{Response, StatusCode};
use tokio::sync::Mutex;

use super::{failed, json};
use crate::ReplyBody;

/// A count is used for so long, and for so many times as long as it took: counts take a fixed share of one core at
/// most.
const FRESH: Duration = Duration::from_secs(2);
const FRESH_FACTOR: u32 = 30;

/// Answers what is resident below a directory.
pub struct Residency {
    overlay: Overlay,
    /// Held during a count, so that one is made for all who ask.
    last: Mutex<Option<(Instant, Arc<ResidentTree>)>>,
}

impl Residency {
    pub fn new(overlay: Overlay) -> Self {
        Self { overlay, last: Mutex::default() }
    }

    /// Answers for a directory. `path` is relative to the mount, with other bytes than UTF-8 as `\xNN`.
    pub async fn answer(&self, path: &str) -> Response<ReplyBody> {
        let Some(path) = paths::decode(path).and_then(PoolPath::parse) else {
            return failed(StatusCode::BAD_REQUEST, "the path is not a path below the mount");
        };
        let tree = match self.tree().await {
            Ok(tree) => tree,
            Err(error) => return failed(StatusCode::INTERNAL_SERVER_ERROR, &error.to_string()),
        };
        let (overlay, of) = (self.overlay.clone(), tree.clone());
        let found = tokio::task::spawn_blocking(move || overlay.resident_directory(&of, &path)).await;
        match found {
            Ok(Some(directory)) => {
                let took_ms = u64::try_from(tree.took.as_millis()).unwrap_or(u64::MAX);
                json(
                    &serde_json::json!({ "counted_unix": tree.counted_unix, "took_ms": took_ms, "directory": directory }),
                )
            }
            Ok(None) => failed(StatusCode::NOT_FOUND, "nothing is resident below this path"),
            Err(error) => failed(StatusCode::INTERNAL_SERVER_ERROR, &error.to_string()),
        }
    }

    async fn tree(&self) -> forebay_backends::Result<Arc<ResidentTree>> {
        let mut last = self.last.lock().await;
        if let Some((at, tree)) = &*last
            && at.elapsed() < FRESH.max(tree.took * FRESH_FACTOR)
        {
            return Ok(tree.clone());
        }
        let tree = Arc::new(self.overlay.resident_tree().await?);
        *last = Some((Instant::now(), tree.clone()));
        Ok(tree)
    }
}
