//! Two ordinary users of one machine, for tests of the harm that one can do to the other.

use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use crate::process::{Answer, run};

/// The time limit of a user's command.
const COMMAND: Duration = Duration::from_secs(60);

/// A user and a group of the same number, with no privileges and no other groups.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct User(pub u32);

/// The attacker.
pub const U1: User = User(4001);
/// The victim.
pub const U2: User = User(4002);

impl User {
    /// Returns a command that runs as this user in `dir`.
    pub fn command(self, program: &str, dir: &Path) -> Command {
        let mut command = Command::new(program);
        // `uid` without `groups` also clears the supplementary groups if the parent is root.
        command.current_dir(dir).uid(self.0).gid(self.0);
        command
    }

    /// Runs a shell script as this user in `dir`, and returns how it ended.
    #[track_caller]
    pub fn sh(self, dir: &Path, script: &str) -> Answer {
        run(self.command("bash", dir).args(["-c", script]), COMMAND)
    }
}
