//! LRU on the same uses: how much it would have missed lately, and whether to follow it.

/// Misses are compared over this many uses for each resident content, and over at least `WINDOW_MIN`.
const WINDOW_EACH: usize = 4;
const WINDOW_MIN: usize = 1000;

/// LRU is followed if it would have missed fewer requests by this share of them, or fewer bytes by twice this share. It
/// is followed until its advantage is below half of that.
const BEHIND: f64 = 0.005;

/// No decision is made with less data than the window divided by this.
const KNOWN_ONE_IN: f64 = 20.0;

/// Fading sums of requests and misses.
#[derive(Debug, Clone, Copy, Default)]
struct Faded {
    asked: f64,
    missed: f64,
    rival_missed: f64,
}

impl Faded {
    fn note(&mut self, amount: f64, hit: bool, rival_hit: bool, keep: f64) {
        let missed = |hit: bool| if hit { 0.0 } else { amount };
        self.asked = self.asked * keep + amount;
        self.missed = self.missed * keep + missed(hit);
        self.rival_missed = self.rival_missed * keep + missed(rival_hit);
    }

    /// Returns the share by which LRU is better; below 0: worse.
    fn behind(&self) -> f64 {
        (self.missed - self.rival_missed) / self.asked.max(1.0)
    }
}

/// See the head of the file.
#[derive(Debug, Default)]
pub(super) struct Rival {
    requests: Faded,
    bytes: Faded,
    followed: bool,
    objects: f64,
}

impl Rival {
    pub fn new() -> Self {
        Self { objects: 1.0, ..Self::default() }
    }

    /// Notes a use: whether it was a hit in this policy and in LRU, in a cache of this many contents.
    pub fn note(&mut self, bytes: u64, hit: bool, rival_hit: bool, residents: usize) {
        let window = (residents * WINDOW_EACH).max(WINDOW_MIN) as f64;
        let keep = 1.0 - 1.0 / window;
        self.requests.note(1.0, hit, rival_hit, keep);
        self.bytes.note(bytes as f64, hit, rival_hit, keep);
        // For bytes, the advantage counts half: they have another remedy, `objects`, which is tried first.
        let behind = self.requests.behind().max(self.bytes.behind() / 2.0);
        if self.requests.asked * KNOWN_ONE_IN > window && behind > BEHIND {
            self.followed = true;
        } else if behind < BEHIND / 2.0 {
            self.followed = false;
        }
        // `objects` moves from one end to the other within a quarter of the window.
        let step = 4.0 / window;
        let step = if self.bytes.behind() > 0.0 { -step } else { step };
        self.objects = (self.objects + step).clamp(0.0, 1.0);
    }

    /// Returns whether to evict in the order of LRU.
    pub fn is_followed(&self) -> bool {
        self.followed
    }

    /// Returns how much missed requests count relative to missed bytes: 1 for as much, and down to 0 while LRU misses
    /// fewer bytes.
    pub fn objects(&self) -> f64 {
        self.objects
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lru_is_followed_while_it_is_better() {
        let mut rival = Rival::new();
        (0..500).for_each(|_| rival.note(1, false, true, 10));
        assert!(rival.is_followed());
        (0..20_000).for_each(|_| rival.note(1, true, true, 10));
        assert!(!rival.is_followed());
    }

    #[test]
    fn requests_count_less_while_lru_misses_fewer_bytes() {
        let mut rival = Rival::new();
        (0..500).for_each(|at| rival.note(if at % 2 == 0 { 101 } else { 100 }, at % 2 == 1, at % 2 == 0, 10));
        assert!(rival.objects() < 0.5 && !rival.is_followed());
    }
}
