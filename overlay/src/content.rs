//! The fast pool: content files on local devices, and how much of them may be used.

pub mod guard;
mod held;
mod space;
mod spare;
mod store;
mod synced;
mod trash;

pub use held::is_held;
pub use space::{Reservation, SpaceBudget};
pub use spare::Spares;
pub use store::{ContentStore, Device};
pub use synced::Content;
pub use trash::Trash;

/// Bytes that a fetch brings in one piece, and that a checksum covers: aligned.
pub const CHUNK_BYTES: u64 = 1 << 20;
