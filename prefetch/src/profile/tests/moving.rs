use rand::seq::SliceRandom;
use rand::{Rng, SeedableRng};

use super::*;

type Sequence = (&'static str, fn(usize) -> Job);

fn shuffled(run: usize, of: usize, take: usize) -> Vec<usize> {
    let mut all: Vec<usize> = (0..of).collect();
    all.shuffle(&mut rand_chacha::ChaCha8Rng::seed_from_u64(run as u64));
    all.truncate(take);
    all
}

const SEQUENCES: &[Sequence] = &[
    ("repeat", |_| job("x", (0..100).map(|i| format!("data/part-{i:04}.h5")))),
    ("daily, no argument", |r| job("x", (0..20).map(move |i| format!("in/{}/{i}.nc", day(r, "-"))))),
    ("daily, one file", |r| job("x", [format!("in/{}.nc", day(r, ""))])),
    ("daily, argument", |r| {
        job(&format!("x --day={}", day(r, "-")), (0..20).map(move |i| format!("in/{}/{i}.nc", day(r, "/"))))
    }),
    ("daily, directories, no argument", |r| job("x", (0..20).map(move |i| format!("in/{}/f{i}.nc", day(r, "/"))))),
    ("hive, no argument", |r| {
        let d = date(r);
        job("x", (0..20).map(move |i| format!("t/year={}/month={}/day={}/part-{i:05}.parquet", d.year, d.month, d.day)))
    }),
    ("hourly, no argument", |r| {
        job(
            "x",
            (0..5).map(move |i| {
                let h = r + 20;
                format!("in/{}{:02}_{i}.dat", day(h / 24, ""), h % 24)
            }),
        )
    }),
    ("hourly, split", |r| {
        job(
            "x",
            (0..5).map(move |i| {
                let h = r + 20;
                format!("in/{}T{:02}/{i}.dat", day(h / 24, "-"), h % 24)
            }),
        )
    }),
    ("hours of a day", |r| job("x", (0..24).map(move |h| format!("in/{}/{h:02}.dat", day(r, "-"))))),
    ("counter, padded", |r| job("x", [format!("step-{:04}.chk", 97 + r)])),
    ("counter, not padded", |r| job("x", (0..3).map(move |i| format!("step-{}/rank-{i}.chk", 8 + r)))),
    ("counter by 500", |r| job("x", [format!("ckpt/model_{}.pt", 500 * (r + 1))])),
    ("array index", |r| task("x", 7 + r as u64, [format!("part-{:04}", 7 + r), "common.db".into()])),
    ("array index, shuffled", |r| {
        let i = [3, 9, 1, 4, 8, 2, 7, 5, 6][r];
        task("x", i, [format!("part-{i:04}"), format!("ref/part-{i}.fa")])
    }),
    ("array index x 50", |r| {
        let i = [3, 9, 1, 4, 8, 2, 7, 5, 6][r] as usize;
        task("x", i as u64, (i * 50..i * 50 + 50).map(|n| format!("shard-{n:05}")))
    }),
    ("subject argument", |r| {
        let s = [11, 17, 12, 19, 15, 13, 18, 14][r];
        job(
            &format!("x sub-{s:02}"),
            (1..4).map(move |i| format!("bids/sub-{s:02}/ses-{i:02}/sub-{s:02}_ses-{i:02}_bold.nii")),
        )
    }),
    ("rolling window of 5 days", |r| job("x", (0..5).map(move |i| format!("in/{}.nc", day(r + i, "-"))))),
    ("rolling window of 30 days", |r| job("x", (0..30).map(move |i| format!("in/{}.nc", day(r + i, ""))))),
    ("day and array index", |r| {
        let (d, i) = (r / 2, [4, 9, 5, 2, 7, 3, 8, 6][r]);
        let reads = (0..4).map(move |k| format!("in/{}/tile-{i:03}/{k}.tif", day(d, "-")));
        task(&format!("x {}", day(d, "")), i, reads)
    }),
    ("day by step and array index", |r| {
        let i = [4, 9, 5, 2, 7, 3, 8, 6][r];
        task("x", i, (0..4).map(move |k| format!("in/{}/tile-{i:03}/{k}.tif", day(r, "-"))))
    }),
    ("day and index as one", |r| {
        let i = [4, 9, 5, 2, 7, 3, 8, 6][r];
        task(&format!("x {}", day(r, "-")), i, [format!("in/{}/{i:02}.tif", day(r, "-"))])
    }),
    ("year with date", |r| job("x", [format!("{}/era5_{}.nc", date(330 + r).year, day(340 + r, ""))])),
    ("constant and moving", |r| {
        let constant = (0..80).map(|i| format!("lib/module{i}.so"));
        job("x", constant.chain((0..20).map(move |i| format!("in/{}/{i}.nc", day(r, "-")))))
    }),
    ("constant and moving alike", |r| {
        let constant = (0..10).map(|i| format!("d/{i:04}.bin"));
        job("x", constant.chain([format!("d/{:04}.bin", 500 + r)]))
    }),
    ("monthly", |r| {
        let m = 10 + r;
        job("x", [format!("era5_{}{:02}.nc", 2023 + m / 12, m % 12 + 1)])
    }),
    ("monthly, first day", |r| {
        let m = 10 + r;
        job("x", [format!("era5_{}-{:02}-01.nc", 2023 + m / 12, m % 12 + 1)])
    }),
    ("half random", |r| {
        let some = shuffled(r, 100_000, 50).into_iter().map(|i| format!("obj/{i:06}.bin"));
        job("x", (0..50).map(|i| format!("obj/fixed-{i}.bin")).chain(some))
    }),
    ("half random alike", |r| {
        let some = shuffled(r, 100_000, 50).into_iter().map(|i| format!("obj/{i:06}.bin"));
        job("x", (0..50).map(|i| format!("obj/{:06}.bin", i * 7919 % 100_000)).chain(some))
    }),
    ("half random hashes", |r| {
        let mut random = rand_chacha::ChaCha8Rng::seed_from_u64(r as u64);
        let some: Vec<String> =
            (0..50).map(|_| format!("{:02x}/{:016x}", random.random::<u8>(), random.random::<u64>())).collect();
        job("x", (0..50).map(|i| format!("fixed/{i}.bin")).chain(some))
    }),
    ("jobs in turn", |r| job("x", (0..50).map(move |i| format!("set{}/f{i}", "ab".as_bytes()[r % 2] as char)))),
    ("jobs by argument", |r| {
        let which = [8, 16, 16, 8, 16, 8, 8, 16][r];
        job(&format!("x {which}"), (0..50).map(move |i| format!("set{}/f{i}", if which == 8 { "a" } else { "b" })))
    }),
    ("growing", |r| job("x", (0..20 + r).map(|i| format!("log/{i:04}.txt")))),
];

#[test]
fn print_them() {
    for (name, of) in SEQUENCES {
        let figures: Vec<String> = [1, 2, 3, 5, 7]
            .iter()
            .map(|k| {
                let (coverage, accuracy) = foresight(*k, of);
                let (c2, a2) = foresight_of(&learnt(*k, of).predict_at(&of(*k).invocation, at_day(*k)), &of(*k));
                format!("{coverage:.2}/{accuracy:.2} ({c2:.2}/{a2:.2})")
            })
            .collect();
        println!("{name:34} {}", figures.join("   "));
    }
    let _ = rand_chacha::ChaCha8Rng::seed_from_u64(1).random::<u8>();
}
