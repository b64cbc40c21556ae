//! What a view may be laid over for a user.
//!
//! A view that all on the node see is read-only for all of them, and hides what changes below it. So it takes the owner of
//! its path, who could close the path to the others as well.

use forebay_backends::{Error, ErrorKind, FileKind, Result, Side};

use crate::permission::UserGroups;
use crate::{Inner, Ino};

impl Inner {
    /// Checks that a view may be laid for a user. `for_job`: only the processes of a job will see it.
    ///
    /// # Errors
    /// `PermissionDenied` if the user may not read what it shows; `NotPermitted` if another user owns it.
    pub(super) async fn check_view_for(
        &self,
        user: &UserGroups,
        (ino, kind): (Ino, FileKind),
        for_job: bool,
    ) -> Result<()> {
        self.check_readable(ino, kind, user).await?;
        let owner = self.node(ino)?.state.lock().record.uid;
        if for_job || user.uid == 0 || user.uid == owner {
            return Ok(());
        }
        let what = format!(
            "{}: it belongs to user {owner}, and a view of it would be read-only for all on this node: only its owner and \
             root may lay one",
            self.display(ino)
        );
        Err(Error::new(ErrorKind::NotPermitted, Side::Application, what))
    }
}
