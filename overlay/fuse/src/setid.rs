//! Set-id bits and file capabilities, which a change of content or owner takes away.
//!
//! With FUSE_HANDLE_KILLPRIV_V2 the kernel leaves this to us, in exchange for not asking for
//! `security.capability` before every write. Its rules: `chown` clears all; a write or truncation clears
//! capabilities, and the set-id bits too unless the caller has CAP_FSETID. The kernel says so for writes; for
//! truncations fuser does not pass the bit on, and root stands for who has the capability.
//!
//! Writes through passthrough clear nothing, so a file that has anything to clear is not passed through to a
//! writer.

use forebay_backends::{ErrorKind, FileKind, Result};
use forebay_engine::{Attr, Caller, Change, Ino, Overlay};

const CAPABILITIES: &[u8] = b"security.capability";
const ROOT: Caller = Caller { uid: 0, gid: 0, pid: 0 };

/// The mode of a file that is written, without set-id bits; `None` where it stays as it is.
fn cleared(attr: &Attr) -> Option<u32> {
    if attr.kind == FileKind::File { without_set_id(attr) } else { None }
}

/// The mode without set-id bits; `None` where it stays as it is. Set-group-id without group execution is no
/// privilege: it marked mandatory locking once. On directories the bits say something else.
fn without_set_id(attr: &Attr) -> Option<u32> {
    if attr.kind == FileKind::Directory {
        return None;
    }
    let mut mode = attr.mode & !libc::S_ISUID;
    if mode & libc::S_IXGRP != 0 {
        mode &= !libc::S_ISGID;
    }
    (mode != attr.mode).then_some(mode)
}

/// True for a file that a write may have to take privileges from.
pub async fn is_privileged(overlay: &Overlay, ino: Ino) -> Result<bool> {
    let (attr, _) = overlay.getattr(ino).await?;
    Ok(cleared(&attr).is_some() || (attr.mode & 0o111 != 0 && has_capabilities(overlay, ino).await?))
}

async fn has_capabilities(overlay: &Overlay, ino: Ino) -> Result<bool> {
    match overlay.get_xattr(ino, CAPABILITIES).await {
        Ok(_) => Ok(true),
        Err(error) if matches!(error.kind(), ErrorKind::NoAttribute | ErrorKind::Unsupported) => Ok(false),
        Err(error) => Err(error),
    }
}

/// Takes the capabilities of a file away.
pub async fn clear_capabilities(overlay: &Overlay, ino: Ino) -> Result<()> {
    if has_capabilities(overlay, ino).await? {
        overlay.remove_xattr(ino, CAPABILITIES).await?;
    }
    Ok(())
}

/// Takes the set-id bits of a file away. True where it had any.
pub async fn clear_bits(overlay: &Overlay, ino: Ino) -> Result<bool> {
    let (attr, _) = overlay.getattr(ino).await?;
    let Some(mode) = cleared(&attr) else { return Ok(false) };
    overlay.setattr(ino, &Change { mode: Some(mode), ..Change::default() }, ROOT).await?;
    Ok(true)
}

/// What goes with `change`: adds the mode without set-id bits to it, and takes capabilities away.
pub async fn complete(overlay: &Overlay, ino: Ino, change: &mut Change, caller: Caller) -> Result<()> {
    let new_owner = change.uid.is_some() || change.gid.is_some();
    let truncated = change.size.is_some();
    let by_mode = change.mode.is_some_and(|mode| mode & 0o111 != 0) && caller.uid != 0;
    if !new_owner && !truncated && !by_mode {
        return Ok(());
    }
    let (attr, _) = overlay.getattr(ino).await?;
    // Writes do not ask for capabilities of a file that nobody may run: they go when its owner lets it be run.
    if by_mode && attr.kind == FileKind::File && attr.mode & 0o111 == 0 {
        clear_capabilities(overlay, ino).await?;
    }
    if change.mode.is_none() && (new_owner || caller.uid != 0) {
        change.mode = if new_owner { without_set_id(&attr) } else { cleared(&attr) };
    }
    if attr.kind == FileKind::File && attr.mode & 0o111 != 0 {
        clear_capabilities(overlay, ino).await?;
    }
    Ok(())
}
