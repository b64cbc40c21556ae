//! A client that is bound to one processor, as batch systems bind the tasks of a job.

use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

use crate::Result;

/// The calling thread is bound to one processor while this lives.
pub struct Bound(CpuSet);

impl Bound {
    pub fn to_one() -> Result<Self> {
        let before = sched_getaffinity(None)?;
        let cpu = (0..CpuSet::MAX_CPU).rev().find(|&cpu| before.is_set(cpu)).ok_or("no processor to run on")?;
        let mut one = CpuSet::new();
        one.set(cpu);
        sched_setaffinity(None, &one)?;
        Ok(Self(before))
    }

    /// Binds the calling thread if `wanted`.
    pub fn when(wanted: bool) -> Result<Option<Self>> {
        wanted.then(Self::to_one).transpose()
    }
}

impl Drop for Bound {
    fn drop(&mut self) {
        let _ = sched_setaffinity(None, &self.0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_is_bound_for_a_while() {
        let before = sched_getaffinity(None).unwrap();
        let bound = Bound::to_one().unwrap();
        assert_eq!(sched_getaffinity(None).unwrap().count(), 1);
        drop(bound);
        assert_eq!(sched_getaffinity(None).unwrap(), before);
    }
}
