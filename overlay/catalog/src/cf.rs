//! The column families: what each of them maps to what.

/// `Ino` → `InodeRecord`.
pub const INODES: &str = "inodes";
/// `Ino` of the directory + name → `NameRecord`.
pub const NAMES: &str = "names";
/// `ContentId` → the head of a `ContentRecord`.
pub const RESIDENCY: &str = "residency";
/// `ContentId` + number of a group of chunks → their checksums.
pub const CHUNKS: &str = "chunks";
/// Intents: `i` + `Ino` or `n` + `Ino` of the directory + name → `IntentRecord`.
pub const INTENTS: &str = "intents";
/// User + lane + time + key of the intent → `Wait`.
pub const QUEUE: &str = "queue";
/// `Ino` → `Leases`.
pub const LEASES: &str = "leases";
/// `c` + `ContentId` → `Spilled`; `l` + name of a part that is leaving → nothing.
pub const SPILLED: &str = "spilled";
/// `ContentId` → `Lost`.
pub const LOST: &str = "lost";
/// Identity of a pool object that has several names → `Ino`.
pub const OBJECTS: &str = "objects";
/// `h` + number → the head of a job; `f` + number → the files that it used; `l` + number + inode: a file that it uses
/// and that is removed after it.
pub const JOBS: &str = "jobs";
/// `h` + signature → the head of a profile; `p` + signature → the profile.
pub const PROFILES: &str = "profiles";
/// Name → `AllocationRecord`.
pub const ALLOCATIONS: &str = "allocations";
/// Single facts, by name.
pub const META: &str = "meta";
pub const ALL: [&str; 14] = [
    INODES,
    NAMES,
    RESIDENCY,
    CHUNKS,
    SPILLED,
    LOST,
    INTENTS,
    QUEUE,
    LEASES,
    OBJECTS,
    JOBS,
    PROFILES,
    ALLOCATIONS,
    META,
];
