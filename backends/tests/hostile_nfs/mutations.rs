//! Valid answers, garbled at random.

use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use super::common::settings::number;
use super::server::{RpcCall, RpcReply, Xdr, accepted, good};

const SEED: u64 = 1813;
const CASES: u64 = 400;
/// Words that are extreme lengths, counts or signs.
const ODD: [u32; 10] = [0, 1, 2, 7, 8, 255, 0xffff, 0x7fff_ffff, 0x8000_0000, u32::MAX];

pub struct Mutations(ChaCha8Rng);

/// The changes to each answer of a case.
#[derive(Debug, Clone)]
pub struct Mutation {
    /// The position, as a share of the answer in 65,536ths, and the new word.
    words: Vec<(u16, u32)>,
    /// The share of the answer that is kept, in 65,536ths.
    left: Option<u16>,
    /// The bytes that follow it.
    more: Vec<u8>,
    /// Nothing of the valid answer is kept except the number of the call.
    replaced: bool,
}

impl Mutations {
    pub fn seeded() -> Self {
        let seed = number("FOREBAY_SEED").unwrap_or(SEED);
        println!("FOREBAY_SEED={seed}");
        Self(ChaCha8Rng::seed_from_u64(seed))
    }

    /// The number of cases: `FOREBAY_CASES` or the default, and bounded: a case takes milliseconds.
    pub fn cases(&self) -> u64 {
        number("FOREBAY_CASES").unwrap_or(CASES).min(20_000)
    }

    pub fn draw(&mut self) -> Mutation {
        let random = &mut self.0;
        let mut words = Vec::new();
        for _ in 0..random.random_range(1..4) {
            let odd = ODD[random.random_range(0..ODD.len())];
            words.push((random.random(), if random.random_bool(0.7) { odd } else { random.random() }));
        }
        let left = random.random_bool(0.2).then(|| random.random());
        let mut more = vec![0; if random.random_bool(0.2) { random.random_range(0..2000) } else { 0 }];
        random.fill(&mut more[..]);
        Mutation { words, left, more, replaced: random.random_bool(0.1) }
    }
}

impl Mutation {
    pub fn answer(&self, request: &RpcCall) -> Option<RpcReply> {
        let number = request.number.to_be_bytes();
        let mut whole = [accepted(request.number).0, good(request).0].concat();
        if self.replaced {
            whole = number.to_vec();
        }
        for (at, word) in &self.words {
            // Never the number of the call, which has its own test.
            let at = 4 + ((usize::from(*at) * (whole.len() - 4)) >> 16) / 4 * 4;
            if let Some(place) = whole.get_mut(at..at + 4) {
                place.copy_from_slice(&word.to_be_bytes());
            }
        }
        if let Some(left) = self.left {
            whole.truncate((whole.len() * usize::from(left)) >> 16);
        }
        whole.extend(&self.more);
        Some(RpcReply::Raw(Xdr(whole).record()))
    }
}
