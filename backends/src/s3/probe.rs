//! Which conditions a server honours: many servers ignore conditions without an error.

use bytes::Bytes;

use crate::store::conditions::{Conditional, Heeded};
use crate::{ErrorKind, RESERVED_PREFIX};

use super::api::{ChecksumOf, Condition};
use super::client::{Client, StoreRefusal};
use super::metadata::{Meta, Object};

/// An ETag that no content has.
const NOBODYS_ETAG: &str = "\"00000000000000000000000000000000\"";

/// The condition on a target. If the server does not honour it, the pool has checked it in advance.
#[derive(Debug, Clone, Copy)]
pub(super) enum TargetCondition<'a> {
    Anything,
    Absent,
    /// The target is still this object.
    Same(&'a Object),
}

impl<'a> TargetCondition<'a> {
    pub(super) fn heeded(self, by: Heeded) -> Condition<'a> {
        match self {
            Self::Absent if by.absent => Condition::Absent,
            Self::Same(object) if by.etag => object.condition(),
            Self::Absent => Condition::Seen(None),
            Self::Same(object) => Condition::Seen(Some(object)),
            Self::Anything => Condition::None,
        }
    }
}

pub(super) struct Probed {
    pub(super) conditional: Conditional,
    pub(super) read_only: bool,
}

/// Tries every condition on a scratch object below `root`, and removes it.
pub(super) async fn probe(client: &Client, root: &str) -> Result<Probed, StoreRefusal> {
    // Checks that the bucket exists and may be listed.
    client.list(root, false, None, 1).await.map_err(StoreRefusal::of_attach)?;
    let name = String::from_utf8_lossy(RESERVED_PREFIX);
    let key = format!("{root}{name}probe-{:016x}", rand::random::<u64>());
    let probed = conditions(client, &key).await;
    if !matches!(&probed, Err(refusal) if is_read_only(refusal)) {
        client.delete(&key, Condition::None).await?;
    }
    match probed {
        Ok(conditional) => Ok(Probed { conditional, read_only: false }),
        Err(refusal) if is_read_only(&refusal) => Ok(Probed { conditional: Conditional::default(), read_only: true }),
        Err(refusal) => Err(refusal),
    }
}

fn is_read_only(refusal: &StoreRefusal) -> bool {
    refusal.is(ErrorKind::PermissionDenied) || refusal.is(ErrorKind::Unsupported)
}

async fn conditions(client: &Client, key: &str) -> Result<Conditional, StoreRefusal> {
    let etag = client.put(key, Bytes::from_static(b"probe"), &Meta::scratch(), Condition::None).await?;
    let mut heeded = Conditional::default();
    let put = async |condition| client.put(key, Bytes::from_static(b"probe"), &Meta::scratch(), condition).await;
    heeded.put = Heeded {
        absent: was_refused(put(Condition::Absent).await)?,
        etag: was_refused(put(Condition::Etag(NOBODYS_ETAG)).await)? && was_made(put(Condition::Etag(&etag)).await)?,
    };
    let copy = async |condition| client.copy((key, &etag), key, &Meta::scratch(), condition).await;
    heeded.copy = Heeded {
        absent: was_refused(copy(Condition::Absent).await)?,
        etag: was_refused(copy(Condition::Etag(NOBODYS_ETAG)).await)? && was_made(copy(Condition::Etag(&etag)).await)?,
    };
    // A part smaller than the minimum is allowed if it is the last one.
    let upload = async |condition| {
        let meta = Meta::scratch();
        let id = client.begin_upload(key, &meta, ChecksumOf::Parts).await?;
        let made = async {
            let part = client.put_part(key, &id, 1, Bytes::from_static(b"probe")).await?;
            client.complete_upload(key, &id, &[part], &meta, condition).await
        };
        let made = made.await;
        if made.is_err() {
            // The upload may be gone already.
            drop(client.abort_upload(key, &id).await);
        }
        made
    };
    let absent = was_refused(upload(Condition::Absent).await)?;
    let other = was_refused(upload(Condition::Etag(NOBODYS_ETAG)).await)?;
    // An object that was made in spite of a condition has an ETag other than that of the first put.
    let now = client.head(key).await?.map(|object| object.etag);
    let right = match &now {
        Some(etag) => was_made(upload(Condition::Etag(etag)).await)?,
        None => false,
    };
    heeded.complete = Heeded { absent, etag: other && right };
    if let Some(object) = client.head(key).await? {
        let delete = async |condition| client.delete(key, condition).await.map(|()| String::new());
        let other = was_refused(delete(Condition::Etag(NOBODYS_ETAG)).await)?;
        heeded.delete.etag = other && was_made(delete(Condition::Etag(&object.etag)).await)?;
    }
    Ok(heeded)
}

fn was_refused(answer: Result<String, StoreRefusal>) -> Result<bool, StoreRefusal> {
    match answer {
        Ok(_) => Ok(false),
        Err(refusal) if refusal.is(ErrorKind::Conflict) => Ok(true),
        // A server that does not know a condition may report that.
        Err(refusal) if refusal.is(ErrorKind::Unsupported) || refusal.is(ErrorKind::Os(libc::EIO)) => Ok(false),
        Err(refusal) => Err(refusal),
    }
}

fn was_made(answer: Result<String, StoreRefusal>) -> Result<bool, StoreRefusal> {
    match answer {
        Ok(_) => Ok(true),
        Err(refusal)
            if [ErrorKind::Conflict, ErrorKind::Unsupported, ErrorKind::Os(libc::EIO)]
                .iter()
                .any(|kind| refusal.is(*kind)) =>
        {
            Ok(false)
        }
        Err(refusal) => Err(refusal),
    }
}
