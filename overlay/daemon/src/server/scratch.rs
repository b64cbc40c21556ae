//! Requests about scratch directories.

use forebay_api::scratch::ScratchVerb;
use forebay_backends::Result;
use forebay_engine::{Overlay, blocking};
use tokio::net::unix::UCred;

use crate::protocol::Reply;

/// Carries out a verb for a client. Only root may create a directory for another user.
pub async fn carry_out(overlay: &Overlay, verb: ScratchVerb, client: UCred) -> Result<Reply> {
    match verb {
        ScratchVerb::Create(request) => {
            let (own, is_root) = (client.uid(), client.uid() == 0);
            let uid = request.uid.filter(|_| is_root).unwrap_or(own);
            let gid = request.gid.filter(|_| is_root).unwrap_or(client.gid());
            Ok(Reply::Scratch(vec![overlay.create_scratch(request, uid, gid).await?]))
        }
        ScratchVerb::Commit(request) => Ok(Reply::Committed(overlay.commit_scratch(request).await?)),
        ScratchVerb::Merge(request) => Ok(Reply::Committed(overlay.merge_scratch(request).await?)),
        ScratchVerb::Discard { id } => {
            let overlay = overlay.clone();
            blocking(move || overlay.discard_scratch(&id)).await?;
            Ok(Reply::Scratch(Vec::new()))
        }
        ScratchVerb::List => {
            let overlay = overlay.clone();
            Ok(Reply::Scratch(blocking(move || overlay.scratch_dirs()).await?))
        }
    }
}
