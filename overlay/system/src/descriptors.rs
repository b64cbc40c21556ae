//! The division of this process's descriptors: files of programs get what is left after the daemon's own share.

use std::sync::OnceLock;

/// Descriptors that are reserved for the daemon itself: the catalog's tables, spare content files, the pool, rings,
/// clients. With a low limit, half of it is reserved.
const KEPT: u64 = 512;
/// A lower limit is reported at the mount.
const FEW: u64 = 4096;

/// Returns the number of descriptors that this process may have.
pub fn allowed() -> u64 {
    rustix::process::getrlimit(rustix::process::Resource::Nofile).current.unwrap_or(u64::MAX)
}

pub fn kept_of(allowed: u64) -> u64 {
    KEPT.min(allowed / 2)
}

/// Returns the number of reserved descriptors, computed from the limit at the first call.
pub fn kept() -> u64 {
    static KEPT_HERE: OnceLock<u64> = OnceLock::new();
    *KEPT_HERE.get_or_init(|| kept_of(allowed()))
}

/// Returns the most files of the catalog that are open at the same time.
pub fn for_catalog() -> i32 {
    i32::try_from(kept() / 2).unwrap_or(i32::MAX)
}

/// Returns the most unused content files that stay open: three quarters of what is left to programs.
pub fn for_contents() -> usize {
    let contents = allowed().saturating_sub(kept());
    usize::try_from(contents / 4 * 3).unwrap_or(usize::MAX)
}

/// Returns the number of spare content files.
pub fn for_spares() -> usize {
    usize::try_from(kept() / 4).unwrap_or(usize::MAX)
}

/// Returns how many steps of the flush may run at the same time, at most `wanted`. Each needs some descriptors.
pub fn for_flush(wanted: usize) -> usize {
    wanted.min(usize::try_from(kept() / 32).unwrap_or(usize::MAX)).max(1)
}

/// Describes the cost of a low limit for the user who mounts; `None` if the limit is high enough. `share`: the share of
/// one user.
pub fn cost(share: f64) -> Option<String> {
    cost_of(allowed(), share)
}

fn cost_of(allowed: u64, share: f64) -> Option<String> {
    let files = allowed - kept_of(allowed);
    let of_one = (files as f64 * share) as u64;
    (allowed < FEW).then(|| {
        format!(
            "the daemon may have {allowed} descriptors: {files} files can be open in the mount at the same time, {of_one} of one \
             user; for more raise the limit (ulimit -n, LimitNOFILE=)"
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn little_is_kept_where_few_descriptors_are_allowed() {
        assert_eq!([64, 256, 1024, 4096, 1 << 20].map(kept_of), [32, 128, 512, 512, 512]);
        assert!(for_catalog() >= 16 && for_spares() >= 8);
    }

    #[test]
    fn the_cost_of_a_low_limit_is_told_in_numbers() {
        let told = cost_of(256, 0.75).unwrap();
        assert!(told.contains("256 descriptors: 128 files") && told.contains("96 of one"), "{told}");
        assert_eq!(cost_of(1 << 20, 0.75), None);
    }
}
