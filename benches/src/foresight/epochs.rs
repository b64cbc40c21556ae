//! One set that is read repeatedly: the default policy against Belady.

use forebay_prefetch::eviction::DEFAULT;
use forebay_prefetch::simulate::{Trace, belady};

use super::{of, ratios};

const CONTENTS: u64 = 10_000;

pub fn rows() {
    println!("\nOne set of {CONTENTS} files, read repeatedly: the miss ratio of {DEFAULT} above that of Belady.\n");
    println!("| order | epochs | cache | Belady | {DEFAULT} | above |\n|---|---|---|---|---|---|");
    let mut random = 1;
    for epochs in [3, 10] {
        for order in ["the same", "another each time"] {
            let mut keys: Vec<u64> = (0..CONTENTS).collect();
            let mut requests = Vec::new();
            for _ in 0..epochs {
                if order != "the same" {
                    shuffle(&mut keys, &mut random);
                }
                requests.extend(keys.iter().map(|&key| (key, 1)));
            }
            let Ok(trace) = Trace::new(requests) else { continue };
            for percent in [25, 50, 75] {
                let capacity = CONTENTS * percent / 100;
                let (belady, [ours, _]) = (ratios(belady(&trace, capacity))[0], of(DEFAULT, &trace, capacity));
                let above = 100.0 * (ours - belady);
                println!("| {order} | {epochs} | {percent} % | {belady:.4} | {ours:.4} | {above:+.2} % |");
            }
        }
    }
}

fn shuffle(keys: &mut [u64], random: &mut u64) {
    for last in (1..keys.len()).rev() {
        keys.swap(last, super::cost::next(random) as usize % (last + 1));
    }
}
