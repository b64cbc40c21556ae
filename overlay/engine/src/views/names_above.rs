//! The names above views: the kernel keeps them, so changes of their rights in the pool are looked up for it.

use crate::coherence::Age;
use crate::{Inner, Ino, acl};

/// The mode, the owner, the group and the ACL of an inode.
type Rights = (u32, u32, u32, Option<Box<[u8]>>);

impl Inner {
    /// Asks the pool for the attributes above views, as the policy says, and tells the kernel which of them changed.
    pub(super) async fn look_at_pinned_names(&self) {
        let inos = self.pinned_inodes();
        for ino in inos {
            let before = self.rights_above(ino).await;
            // What is gone stays in the kernel while the view lasts.
            let _ = self.revalidate(ino, Age::Metadata).await;
            // Only then: the kernel would also forget the ACL, without which other users than the owner cannot pass.
            if self.rights_above(ino).await != before {
                self.tell_kernel_inode(ino, false);
            }
        }
    }

    async fn rights_above(&self, ino: Ino) -> Option<Rights> {
        let acl = self.xattr(ino, acl::ACCESS).await.ok()?;
        let node = self.node(ino).ok()?;
        let record = &node.state.lock().record;
        Some((record.mode, record.uid, record.gid, acl))
    }
}
