//! LRU on the same uses: how much it would have missed lately, and what follows from that.

/// Misses are compared over so many uses for each content that is here, and at least over so many.
const WINDOW_EACH: usize = 4;
const WINDOW_MIN: usize = 1000;

/// LRU is followed where it would have missed fewer requests by this share of them, or fewer bytes by twice that, until
/// it is half of it.
const BEHIND: f64 = 0.005;

/// Nothing is made of less than a window's share of one in so many.
const KNOWN_ONE_IN: f64 = 20.0;

/// What was missed and asked for, fading.
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

    /// The share by which the rival is better; below 0: worse.
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

    /// Notes a use: whether it was a hit here and for LRU, in a cache of so many contents.
    pub fn note(&mut self, bytes: u64, hit: bool, rival_hit: bool, residents: usize) {
        let window = (residents * WINDOW_EACH).max(WINDOW_MIN) as f64;
        let keep = 1.0 - 1.0 / window;
        self.requests.note(1.0, hit, rival_hit, keep);
        self.bytes.note(bytes as f64, hit, rival_hit, keep);
        // In bytes twice as much: there is another remedy, which is tried first.
        let behind = self.requests.behind().max(self.bytes.behind() / 2.0);
        if self.requests.asked * KNOWN_ONE_IN > window && behind > BEHIND {
            self.followed = true;
        } else if behind < BEHIND / 2.0 {
            self.followed = false;
        }
        // A quarter of the window from one end to the other.
        let step = 4.0 / window;
        let step = if self.bytes.behind() > 0.0 { -step } else { step };
        self.objects = (self.objects + step).clamp(0.0, 1.0);
    }

    /// Whether to do as LRU does.
    pub fn is_followed(&self) -> bool {
        self.followed
    }

    /// How much missed requests count beside missed bytes: 1 for as much, and down to 0 where LRU misses fewer bytes.
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
