//! The files of one job.

use http::{Response, StatusCode};

use super::{MountSource, failed, json};
use crate::ReplyBody;

/// Files that are sent: those that the job used first.
const FILES_MAX: usize = 1000;

/// Answers which files a job used.
pub async fn job(source: &dyn MountSource, id: String) -> Response<ReplyBody> {
    match source.job_files(id).await {
        Ok(Some(mut files)) => {
            files.sort_by_key(|file| file.first_use_rank);
            files.truncate(FILES_MAX);
            json(&serde_json::json!({ "files": files }))
        }
        Ok(None) => failed(StatusCode::NOT_FOUND, "there is no such job"),
        Err(error) => failed(StatusCode::INTERNAL_SERVER_ERROR, &error.to_string()),
    }
}
