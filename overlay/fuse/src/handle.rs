//! The facts that a FUSE file handle contains.
//!
//! A handle must mean the same to a later process that takes the mount over. So it is no index of a table: it contains
//! the facts themselves. Reads and writes find their file by the inode.

use forebay_engine::UserSlot;
use fuser::FileHandle;

/// How the kernel does the I/O of one open.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    /// Through the page cache of the FUSE inode; the daemon gets requests for page-cache misses.
    Cached = 1,
    /// Passthrough to the content file; the daemon gets no requests.
    Passthrough = 2,
    /// Each read and write is a request to the daemon.
    Direct = 3,
    /// Each read and write is a request to the daemon, and mappings are of the content file that other opens have in
    /// passthrough. Beside those, the kernel allows no other mode.
    Beside = 4,
}

/// The handle of an open file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Handle {
    /// Identifies the process that issued the handle: a random number for each attach.
    pub epoch: u32,
    pub mode: Mode,
    /// Opened for writing.
    pub writable: bool,
    /// At the time of the open the file had set-id bits or capabilities, which writes must clear.
    pub privileged: bool,
    /// The user for whom the open is counted.
    pub user: UserSlot,
}

const MODE_MASK: u64 = 0b111;
const WRITABLE: u64 = 1 << 3;
const PRIVILEGED: u64 = 1 << 4;
/// The bits above hold the user.
const USER_SHIFT: u32 = 8;
const USER_MASK: u64 = 0xff_ffff;
const EPOCH_SHIFT: u32 = 32;

impl Handle {
    pub fn encode(self) -> FileHandle {
        let mut raw = u64::from(self.epoch) << EPOCH_SHIFT | self.mode as u64;
        raw |= (u64::from(self.user.0) & USER_MASK) << USER_SHIFT;
        if self.writable {
            raw |= WRITABLE;
        }
        if self.privileged {
            raw |= PRIVILEGED;
        }
        FileHandle(raw)
    }

    /// Returns `None` for handle 0, which the kernel uses for files that it opened without a request.
    pub fn decode(handle: FileHandle) -> Option<Self> {
        let raw = handle.0;
        let mode = match raw & MODE_MASK {
            1 => Mode::Cached,
            2 => Mode::Passthrough,
            3 => Mode::Direct,
            4 => Mode::Beside,
            _ => return None,
        };
        let epoch = (raw >> EPOCH_SHIFT) as u32;
        let user = UserSlot((raw >> USER_SHIFT & USER_MASK) as u32);
        Some(Self { epoch, mode, writable: raw & WRITABLE != 0, privileged: raw & PRIVILEGED != 0, user })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_handle_survives_the_round_trip_through_the_kernel() {
        for mode in [Mode::Cached, Mode::Passthrough, Mode::Direct, Mode::Beside] {
            for bits in 0..4 {
                let user = UserSlot(0xff_fffe + bits % 2);
                let (writable, privileged) = (bits & 1 != 0, bits & 2 != 0);
                let handle = Handle { epoch: 0xdead_beef, mode, writable, privileged, user };
                assert_eq!(Handle::decode(handle.encode()), Some(handle));
            }
        }
        assert_eq!(Handle::decode(FileHandle(0)), None);
    }
}
