//! Requests about views.

use forebay_api::views::ViewVerb;
use forebay_backends::Result;
use forebay_engine::{Overlay, blocking};
use forebay_system::process::Process;

use crate::protocol::Reply;

/// `client`: the process that asks, if it is known.
pub async fn carry_out(overlay: &Overlay, verb: ViewVerb, client: Option<Process>) -> Result<Reply> {
    match verb {
        ViewVerb::Begin(request) => Ok(Reply::Views(vec![overlay.begin_view(request, client).await?])),
        ViewVerb::Lay { id, allow_copy, awaits_mount } => {
            Ok(Reply::Views(vec![overlay.lay_view(&id, allow_copy, awaits_mount).await?]))
        }
        ViewVerb::Mounted { id } => {
            overlay.view_is_mounted(&id)?;
            Ok(Reply::Views(Vec::new()))
        }
        ViewVerb::List => Ok(Reply::Views(overlay.views()?)),
        ViewVerb::Compare { id } => Ok(Reply::ViewChanges(overlay.compare_view(&id).await?)),
        ViewVerb::End { id } => {
            let overlay = overlay.clone();
            blocking(move || overlay.end_view(&id)).await?;
            Ok(Reply::Views(Vec::new()))
        }
    }
}
