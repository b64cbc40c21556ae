//! Set-id bits and file capabilities, which a change of content or owner clears.
//!
//! With FUSE_HANDLE_KILLPRIV_V2 the kernel leaves this to the daemon, and does not request `security.capability` before
//! every write. The rules: `chown` clears both. A write or truncation clears capabilities, and the set-id bits too
//! unless the caller has CAP_FSETID. For a write, the kernel says whether to clear the bits. For a truncation, fuser
//! does not pass that flag on, so root stands for a caller with the capability.
//!
//! Passthrough writes clear nothing. So a writer gets no passthrough to a file that has something to clear.

use forebay_backends::{ErrorKind, FileKind, Result};
use forebay_engine::{Attr, Caller, Change, Ino, Overlay};

const CAPABILITIES: &[u8] = b"security.capability";
const ROOT: Caller = Caller { uid: 0, gid: 0, pid: 0 };

/// Returns the mode of a file after a write, without set-id bits; `None` if it does not change.
fn cleared(attr: &Attr) -> Option<u32> {
    if attr.kind == FileKind::File { without_set_id(attr) } else { None }
}

/// Returns the mode without set-id bits; `None` if it does not change. Set-group-id without group execution is no
/// privilege: it once marked mandatory locking. On directories the bits have another meaning.
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

/// Returns whether a write may have to clear privileges of the file.
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

/// Removes the capabilities of a file.
pub async fn clear_capabilities(overlay: &Overlay, ino: Ino) -> Result<()> {
    if has_capabilities(overlay, ino).await? {
        overlay.remove_xattr(ino, CAPABILITIES, ROOT).await?;
    }
    Ok(())
}

/// Clears the set-id bits of a file. Returns whether it had any.
pub async fn clear_bits(overlay: &Overlay, ino: Ino) -> Result<bool> {
    let (attr, _) = overlay.getattr(ino).await?;
    let Some(mode) = cleared(&attr) else { return Ok(false) };
    overlay.setattr(ino, &Change { mode: Some(mode), ..Change::default() }, ROOT).await?;
    Ok(true)
}

/// Completes `change`: adds the mode without set-id bits to it, and removes the capabilities of the file.
pub async fn complete(overlay: &Overlay, ino: Ino, change: &mut Change, caller: Caller) -> Result<()> {
    let new_owner = change.uid.is_some() || change.gid.is_some();
    let truncated = change.size.is_some();
    let by_mode = change.mode.is_some_and(|mode| mode & 0o111 != 0) && caller.uid != 0;
    if !new_owner && !truncated && !by_mode {
        return Ok(());
    }
    let (attr, _) = overlay.getattr(ino).await?;
    // A write does not check for capabilities of a file that is not executable. So they are removed when the owner
    // makes the file executable.
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
