//! Moves session threads to the processor that their client is bound to.
//!
//! A request costs two wake-ups: that of the session thread and that of the client. If the two sleep on different
//! processors, each wake-up takes a processor out of idle, which costs several times what the request itself does (on
//! virtual machines tens of microseconds). On one processor a wake-up is a context switch. The scheduler prefers
//! separate processors, since it cannot know that never more than one of the two runs. So if a client is bound to one
//! processor, as batch systems bind the tasks of a job, the thread that serves it moves to that processor. The thread
//! does not follow a client that may run anywhere: the scheduler would move such a client away at the next wake-up.

use std::cell::RefCell;

use rustix::process::Pid;
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

/// A thread follows after this many requests in a row from clients bound to one processor. A move costs about as much
/// as it saves for one request.
const STREAK: u32 = 32;
/// After this many requests, the affinity of a client is read again.
const ASK_AGAIN: u32 = 256;

thread_local! {
    static THREAD: RefCell<ClientFollower> = RefCell::new(ClientFollower::new(sched_getaffinity(None).ok()));
}

/// Notes on a session thread that it serves a request of the thread `client` (0: not known). Returns whether the two
/// share a processor.
pub fn serve(client: u32) -> bool {
    if client == 0 {
        return false;
    }
    THREAD.with_borrow_mut(|thread| {
        let bound = |client| sched_getaffinity(Pid::from_raw(client)).ok().and_then(|set| only(&set));
        if let Some(to) = thread.serve(client as i32, bound) {
            // If this fails, the thread stays on its present processors.
            let _ = sched_setaffinity(None, &to);
        }
        thread.following.is_some()
    })
}

/// Returns the processor, if the set has exactly one.
fn only(set: &CpuSet) -> Option<usize> {
    if set.count() == 1 { (0..CpuSet::MAX_CPU).find(|&cpu| set.is_set(cpu)) } else { None }
}

/// What one session thread knows of its clients.
struct ClientFollower {
    /// The processors on which the thread may run. `None` if the machine has more processors than a `CpuSet` can name:
    /// the thread follows no client.
    home: Option<CpuSet>,
    client: i32,
    /// The processor that `client` was bound to `asked` requests ago.
    bound: Option<usize>,
    asked: u32,
    /// Requests in a row from clients that are bound to `bound`.
    streak: u32,
    following: Option<usize>,
}

impl ClientFollower {
    fn new(home: Option<CpuSet>) -> Self {
        Self { home, client: 0, bound: None, asked: 0, streak: 0, following: None }
    }

    /// Counts a request of `client`. Returns the processors for the thread, if they change.
    fn serve(&mut self, client: i32, bound: impl FnOnce(i32) -> Option<usize>) -> Option<CpuSet> {
        let home = self.home?;
        if client != self.client || self.asked >= ASK_AGAIN {
            let now = bound(client).filter(|&cpu| home.is_set(cpu));
            if now != self.bound {
                self.streak = 0;
            }
            (self.client, self.bound, self.asked) = (client, now, 0);
        }
        self.asked += 1;
        self.streak = self.streak.saturating_add(1);
        let wanted = match self.bound {
            Some(cpu) if self.streak >= STREAK || self.following == Some(cpu) => Some(cpu),
            _ => None,
        };
        if wanted == self.following {
            return None;
        }
        self.following = wanted;
        Some(wanted.map_or(home, |cpu| {
            let mut one = CpuSet::new();
            one.set(cpu);
            one
        }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn set(cpus: &[usize]) -> CpuSet {
        let mut set = CpuSet::new();
        cpus.iter().for_each(|&cpu| set.set(cpu));
        set
    }

    fn serve(thread: &mut ClientFollower, times: u32, client: i32, bound: Option<usize>) -> Vec<CpuSet> {
        (0..times).filter_map(|_| thread.serve(client, |_| bound)).collect()
    }

    #[test]
    fn a_bound_client_is_followed_after_a_while_until_an_unbound_client_comes() {
        let home = set(&[0, 1, 2]);
        let mut thread = ClientFollower::new(Some(home));
        assert_eq!(serve(&mut thread, STREAK - 1, 7, Some(1)), []);
        assert_eq!(serve(&mut thread, 1, 7, Some(1)), [set(&[1])]);
        assert_eq!(serve(&mut thread, 1000, 7, Some(1)), []);
        assert_eq!(serve(&mut thread, 5, 8, Some(1)), [], "another one bound to the same processor");
        assert_eq!(serve(&mut thread, 1, 9, None), [home]);
        assert_eq!(serve(&mut thread, STREAK - 1, 7, Some(1)), []);
    }

    #[test]
    fn clients_that_take_turns_on_several_processors_are_not_followed() {
        let mut thread = ClientFollower::new(Some(set(&[0, 1])));
        for _ in 0..1000 {
            assert_eq!(serve(&mut thread, 1, 7, Some(0)), []);
            assert_eq!(serve(&mut thread, 1, 8, Some(1)), []);
        }
    }

    #[test]
    fn a_client_that_may_run_anywhere_or_where_we_may_not_is_not_followed() {
        let mut thread = ClientFollower::new(Some(set(&[0, 1])));
        assert_eq!(serve(&mut thread, 1000, 7, None), []);
        assert_eq!(serve(&mut thread, 1000, 8, Some(5)), []);
        assert_eq!(serve(&mut ClientFollower::new(None), 1000, 8, Some(0)), []);
    }

    #[test]
    fn a_client_that_was_bound_elsewhere_meanwhile_is_found_there() {
        let mut thread = ClientFollower::new(Some(set(&[0, 1])));
        assert_eq!(serve(&mut thread, STREAK, 7, Some(0)), [set(&[0])]);
        let moves = serve(&mut thread, 2 * ASK_AGAIN, 7, Some(1));
        assert_eq!(moves, [set(&[0, 1]), set(&[1])]);
    }

    #[test]
    fn one_processor_is_told_from_several() {
        assert_eq!(only(&set(&[3])), Some(3));
        assert_eq!(only(&set(&[3, 4])), None);
    }
}
