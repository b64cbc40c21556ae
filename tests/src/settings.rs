//! Settings of a test run, which environment variables give (docs/DEVELOPING.md lists them).

/// Returns the number in an environment variable.
pub fn number(name: &str) -> Option<u64> {
    let text = std::env::var(name).ok()?;
    Some(text.parse().unwrap_or_else(|_| panic!("{name}={text}: not a number")))
}

/// Whether `FOREBAY_ALL=1` asks for tests at their full size.
pub fn is_complete() -> bool {
    number("FOREBAY_ALL") == Some(1)
}

/// Returns `FOREBAY_SEED` or another seed each time, and prints it.
pub fn seed() -> u64 {
    let seed = number("FOREBAY_SEED").unwrap_or_else(|| rand::random::<u32>().into());
    println!("FOREBAY_SEED={seed}");
    seed
}
