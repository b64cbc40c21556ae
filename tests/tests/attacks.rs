//! Attacks by an ordinary user of a shared mount on another user, on root or on the node. Each test plays one attack,
//! with two real users if it takes two.

#[path = "attacks/fast_directory.rs"]
mod fast_directory;
#[path = "attacks/privileges.rs"]
mod privileges;
#[path = "attacks/races.rs"]
mod races;
#[path = "attacks/rights.rs"]
mod rights;
#[path = "attacks/shares.rs"]
mod shares;
#[path = "attacks/swapped.rs"]
mod swapped;
