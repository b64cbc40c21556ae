//! Values of directives: sizes, durations and paths.

use std::path::{Component, Path};

use super::words::nearest;

/// The longest text of a script that an error repeats, in characters.
const SHOWN: usize = 60;
/// The longest path of Linux, in bytes.
const PATH_BYTES: usize = 4095;
/// The longest lease: 10 years.
const LEASE_SECS_MAX: u64 = 10 * 366 * 86_400;

/// The names of the scratch directory in a script.
const VARIABLES: [&str; 3] = ["DW_JOB_STRIPED", "DW_JOB_PRIVATE", "FOREBAY_JOB_DIR"];

/// What the name of a persistent directory follows, in the variables of tasks.
pub const PERSISTENT_VARIABLES: [&str; 3] = ["FOREBAY_PERSISTENT_", "DW_PERSISTENT_STRIPED_", "DW_PERSISTENT_PRIVATE_"];
/// The most bytes of the name of a profile, and of a persistent directory.
const NAME_BYTES: usize = 64;

/// A path below the scratch directory.
pub struct ScratchPath(pub String);

/// Returns a text of a script as an error shows it.
pub fn shown(text: &str) -> String {
    let mut short: String = text.chars().take(SHOWN).map(|c| if c.is_control() { '?' } else { c }).collect();
    if text.chars().nth(SHOWN).is_some() {
        short.push('…');
    }
    short
}

/// # Errors
/// The value is none of these.
pub fn one_of(name: &str, text: &str, known: &[&str]) -> Result<(), String> {
    if known.contains(&text) {
        return Ok(());
    }
    let meant = nearest(text, known).map_or_else(|| known.join(" or "), str::to_owned);
    Err(format!("{name}={} is not there: {name}={meant}", shown(text)))
}

/// Reads a size as Slurm does: `G` and `GiB` are 2^30 bytes, `GB` is 10^9.
///
/// # Errors
/// It is no size, or zero.
pub fn size_bytes(name: &str, text: &str) -> Result<u64, String> {
    let wrong = || format!("{name}={} is no size, such as 100GiB", shown(text));
    let digits = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let (number, unit) = text.split_at(digits);
    let number: u64 = number.parse().map_err(|_| wrong())?;
    let unit = unit.to_ascii_lowercase();
    let power = match unit.chars().next() {
        None => 0,
        Some(first) => 1 + "kmgtp".find(first).ok_or_else(wrong)? as u32,
    };
    let base: u64 = match unit.get(1..).unwrap_or_default() {
        "" | "ib" => 1024,
        "b" => 1000,
        _ => return Err(wrong()),
    };
    let bytes = base.checked_pow(power).and_then(|factor| number.checked_mul(factor)).ok_or_else(wrong)?;
    // The record of a mount, and Slurm's JSON, hold it as a signed number.
    if bytes == 0 || bytes > i64::MAX as u64 { Err(wrong()) } else { Ok(bytes) }
}

/// # Errors
/// It is no duration, or longer than any lease.
pub fn duration_secs(text: &str) -> Result<u64, String> {
    let wrong = || format!("lease={} is no duration, such as 12h", shown(text));
    let secs = humantime::parse_duration(text).map_err(|_| wrong())?.as_secs();
    if secs == 0 || secs > LEASE_SECS_MAX { Err(wrong()) } else { Ok(secs) }
}

/// # Errors
/// It is no name: letters, digits and `-_.`, with a letter first.
pub fn profile_name(text: &str) -> Result<String, String> {
    let plain = |b: u8| b.is_ascii_alphanumeric() || b"-_.".contains(&b);
    match text.starts_with(|c: char| c.is_ascii_alphabetic()) && text.bytes().all(plain) && text.len() <= NAME_BYTES {
        true => Ok(text.to_owned()),
        false => Err(format!(
            "profile={} is no name: it begins with a letter, and has letters, digits and -_. only, {NAME_BYTES} at most",
            shown(text)
        )),
    }
}

/// # Errors
/// It cannot be a part of the name of a variable.
pub fn persistent_name(text: &str) -> Result<String, String> {
    let plain = |b: u8| b.is_ascii_alphanumeric() || b == b'_';
    match !text.is_empty() && text.bytes().all(plain) && text.len() <= NAME_BYTES {
        true => Ok(text.to_owned()),
        false => Err(format!(
            "name={} is no name: tasks get it in a variable, so it has letters, digits and _ only, {NAME_BYTES} at most",
            shown(text)
        )),
    }
}

/// Returns whether a path begins with a variable.
pub fn is_scratch(path: &str) -> bool {
    path.starts_with('$')
}

/// Returns an absolute path, which has no `..` and no variable.
///
/// # Errors
/// It is none.
pub fn absolute(path: &str) -> Result<String, String> {
    let path_shown = shown(path);
    match () {
        () if path.contains('$') => Err(format!("{path_shown}: a variable is known only as $DW_JOB_STRIPED")),
        () if !path.starts_with('/') => Err(format!("{path_shown} is no absolute path")),
        () if path.len() > PATH_BYTES => Err(format!("{path_shown} is longer than {PATH_BYTES} bytes")),
        () if path.contains(char::is_control) => Err(format!("{path_shown} has a control character")),
        () if climbs(path) => Err(format!("{path_shown} has a `..`")),
        () => Ok(path.to_owned()),
    }
}

fn climbs(path: &str) -> bool {
    Path::new(path).components().any(|component| component == Component::ParentDir)
}

/// Returns what follows the variable of the scratch directory.
///
/// # Errors
/// The path does not begin with it, or leaves the directory.
pub fn scratch_path(path: &str) -> Result<ScratchPath, String> {
    let path_shown = shown(path);
    let Some(variable) = path.strip_prefix('$') else {
        return Err(format!("{path_shown} does not begin with $DW_JOB_STRIPED, the scratch directory of the job"));
    };
    let (name, rest) = match variable.strip_prefix('{') {
        Some(braced) => braced.split_once('}').ok_or_else(|| format!("{path_shown} lacks a `}}`"))?,
        None => variable.split_at(variable.find('/').unwrap_or(variable.len())),
    };
    if PERSISTENT_VARIABLES.iter().any(|prefix| name.starts_with(prefix)) {
        return Err(format!(
            "{path_shown}: directives move files only to and from the scratch directory of the job: copy files of a \
             persistent directory in the script"
        ));
    }
    if !VARIABLES.contains(&name) {
        let meant = nearest(name, &VARIABLES).unwrap_or(VARIABLES[0]);
        return Err(format!("{path_shown}: there is no variable `{}`: did you mean ${meant}?", shown(name)));
    }
    match () {
        () if !rest.is_empty() && !rest.starts_with('/') => Err(format!("{path_shown} lacks a `/`")),
        () if rest.len() > PATH_BYTES => Err(format!("{path_shown} is longer than {PATH_BYTES} bytes")),
        () if rest.contains(char::is_control) => Err(format!("{path_shown} has a control character")),
        () if climbs(rest) => Err(format!("{path_shown} has a `..`")),
        () => Ok(ScratchPath(rest.trim_matches('/').to_owned())),
    }
}
