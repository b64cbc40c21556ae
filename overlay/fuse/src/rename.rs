//! `renameat2`, with all its flags.

use forebay_backends::{Error, ErrorKind, FileKind, RenameMode, Result, Side};
use forebay_engine::{Caller, Ino, Lookup, Overlay};
use fuser::RenameFlags;

use super::resend;

type Name = (Ino, Vec<u8>);

pub async fn rename(
    overlay: &Overlay,
    from: Name,
    to: Name,
    flags: RenameFlags,
    caller: Caller,
    repeated: bool,
) -> Result<()> {
    let whiteout = flags.contains(RenameFlags::RENAME_WHITEOUT).then_some(caller);
    let mode = match flags - RenameFlags::RENAME_WHITEOUT {
        RenameFlags::RENAME_NOREPLACE => RenameMode::NoReplace,
        RenameFlags::RENAME_EXCHANGE if whiteout.is_none() => RenameMode::Exchange,
        flags if flags.is_empty() => RenameMode::Replace,
        _ => return Err(Error::new(ErrorKind::InvalidInput, Side::Application, format!("rename with flags {flags}"))),
    };
    if repeated && whiteout.is_some() && is_whiteout(overlay, &from).await? {
        // The first attempt left this whiteout. A second rename would move it over the file that was moved.
        return Ok(());
    }
    let repeated = repeated && mode != RenameMode::Exchange;
    let moved = match whiteout {
        None => overlay.rename(from.0, &from.1, to.0, &to.1, mode).await,
        Some(caller) => overlay.rename_leaving_whiteout(from.0, &from.1, to.0, &to.1, mode, caller).await,
    };
    resend::moved(overlay, to.0, &to.1, repeated, moved).await
}

async fn is_whiteout(overlay: &Overlay, (parent, name): &Name) -> Result<bool> {
    let Lookup::Found(entry) = overlay.lookup(*parent, name).await? else { return Ok(false) };
    overlay.forget(entry.attr.ino, 1);
    Ok(entry.attr.kind == FileKind::CharDevice && entry.attr.rdev == 0)
}
