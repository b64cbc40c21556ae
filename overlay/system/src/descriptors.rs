//! How the descriptors that this process may have are divided: files of programs get what is left when the daemon has its
//! own.

use std::sync::OnceLock;

/// Descriptors that are kept for what is not a file of a program: the catalog's tables, spare content files, the pool,
/// rings, clients. Where few are allowed, half of them.
const KEPT: u64 = 512;
/// Fewer of them are told at the mount.
const FEW: u64 = 4096;

/// How many this process may have.
pub fn allowed() -> u64 {
    rustix::process::getrlimit(rustix::process::Resource::Nofile).current.unwrap_or(u64::MAX)
}

pub fn kept_of(allowed: u64) -> u64 {
    KEPT.min(allowed / 2)
}

/// Descriptors that are kept, by the limit as it was when first asked for.
pub fn kept() -> u64 {
    static KEPT_HERE: OnceLock<u64> = OnceLock::new();
    *KEPT_HERE.get_or_init(|| kept_of(allowed()))
}

/// Files of the catalog that are open at the same time.
pub fn for_catalog() -> i32 {
    i32::try_from(kept() / 2).unwrap_or(i32::MAX)
}

/// Content files that may be open when nobody uses them: three quarters of what is left to programs.
pub fn for_contents() -> usize {
    let contents = allowed().saturating_sub(kept());
    usize::try_from(contents / 4 * 3).unwrap_or(usize::MAX)
}

/// Spare content files.
pub fn for_spares() -> usize {
    usize::try_from(kept() / 4).unwrap_or(usize::MAX)
}

/// Steps of the flush at the same time, each with some descriptors, where so many are wanted.
pub fn for_flush(wanted: usize) -> usize {
    wanted.min(usize::try_from(kept() / 32).unwrap_or(usize::MAX)).max(1)
}

/// What a low limit costs, for whoever mounts; `None`: it is high enough. `share`: that of one user.
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
