//! A count-min sketch of four-bit counters that are halved from time to time (Cormode and Muthukrishnan 2005; the aging
//! is TinyLFU's).

/// Four bits, as in the paper.
const COUNT_MAX: u8 = 15;

/// Rows: each key has one counter in each, and its estimate is the least of them.
const ROWS: u64 = 4;

/// Counters for each resident content.
const COUNTERS_EACH: usize = 8;

/// All counters are halved after this many counts for each resident content: the paper's sample.
const SAMPLE_EACH: usize = 10;

/// The most counters, of a byte each.
const COUNTERS_MAX: usize = 1 << 24;

const COUNTERS_MIN: usize = 1 << 10;

/// See the head of the file.
#[derive(Debug)]
pub(super) struct Sketch {
    /// A power of two.
    counters: Vec<u8>,
    counted: usize,
    contents: usize,
}

impl Sketch {
    pub fn new() -> Self {
        Self { counters: vec![0; COUNTERS_MIN], counted: 0, contents: 0 }
    }

    /// Makes room for this many contents, and keeps the counts: in a table of twice the length, a key has its counter
    /// at the same place, or at the same place of the second half.
    pub fn fit(&mut self, contents: usize) {
        self.contents = self.contents.max(contents);
        while self.counters.len() < (self.contents * COUNTERS_EACH).min(COUNTERS_MAX) {
            self.counters.extend_from_within(..);
        }
    }

    pub fn count(&mut self, key: u64) {
        let places: Vec<usize> = (0..ROWS).map(|row| self.place(key, row)).collect();
        let least = places.iter().map(|&place| self.counters[place]).min().unwrap_or(0);
        if least == COUNT_MAX {
            return;
        }
        for place in places {
            // Only the counters at the minimum: the higher counters also count other keys ("conservative update").
            if self.counters[place] == least {
                self.counters[place] += 1;
            }
        }
        self.counted += 1;
        if self.counted >= self.contents.max(COUNTERS_MIN / COUNTERS_EACH) * SAMPLE_EACH {
            self.counters.iter_mut().for_each(|counter| *counter /= 2);
            self.counted /= 2;
        }
    }

    pub fn estimate(&self, key: u64) -> u8 {
        (0..ROWS).map(|row| self.counters[self.place(key, row)]).min().unwrap_or(0)
    }

    fn place(&self, key: u64, row: u64) -> usize {
        // The finaliser of MurmurHash3, over the key and the row.
        let mut hash = key.wrapping_add(row.wrapping_mul(0x9E37_79B9_7F4A_7C15));
        hash = (hash ^ (hash >> 33)).wrapping_mul(0xFF51_AFD7_ED55_8CCD);
        hash = (hash ^ (hash >> 33)).wrapping_mul(0xC4CE_B9FE_1A85_EC53);
        ((hash ^ (hash >> 33)) as usize) & (self.counters.len() - 1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_are_kept_while_it_grows_and_fade() {
        let mut sketch = Sketch::new();
        (0..9).for_each(|_| sketch.count(7));
        sketch.fit(100_000);
        assert_eq!(sketch.estimate(7), 9);
        (0..SAMPLE_EACH * 100_000).for_each(|key| sketch.count(1000 + key as u64 % 200_000));
        assert!(sketch.estimate(7) < 9);
    }
}
