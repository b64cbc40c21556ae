//! Words without what changes from run to run, and the similarity of two signatures.

use std::borrow::Cow;

use super::command::is_interpreter;
use super::digits::masked;

/// The longest word that is kept: the rest of a longer one, such as the text of a program, is replaced by its checksum.
const WORD_BYTES_MAX: usize = 80;

/// Weights of the similarity, with the sum 1: what a job reads depends more on the arguments than on the user.
const SIMILAR_PROGRAM: f64 = 0.4;
const SIMILAR_USER: f64 = 0.15;
const SIMILAR_ACCOUNT: f64 = 0.05;
const SIMILAR_ARGUMENTS: f64 = 0.4;

/// Returns a word without blanks, so that the words of a signature can be separated.
pub(super) fn name(word: &str) -> String {
    let plain = |c: char| if c.is_whitespace() || c.is_control() { '_' } else { c };
    let word: String = if word.is_empty() { "''".into() } else { word.chars().map(plain).collect() };
    bounded(word, WORD_BYTES_MAX)
}

/// Returns an argument with its numbers masked, including fractions and signs: `--rate=1e-3` becomes `--rate=#`.
pub(super) fn argument(word: &str) -> String {
    let (option, value) = match word.split_once('=') {
        Some((option, value)) if option.starts_with('-') => (Some(option), value),
        _ => (None, word),
    };
    let value: Cow<'_, str> = if is_number(value) { "#".into() } else { masked(value).into() };
    match option {
        Some(option) => name(&format!("{option}={value}")),
        None => name(&value),
    }
}

fn is_number(text: &str) -> bool {
    text.bytes().any(|b| b.is_ascii_digit()) && text.parse::<f64>().is_ok()
}

/// Returns at most `limit` bytes: the rest is replaced by its checksum.
pub(super) fn bounded(mut text: String, limit: usize) -> String {
    if text.len() <= limit {
        return text;
    }
    let mut end = limit - 9;
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    let rest = crc32c::crc32c(&text.as_bytes()[end..]);
    text.truncate(end);
    text.push_str(&format!("~{rest:08x}"));
    text
}

/// See `Signature::similarity`. Two runs of an interpreter are the same program only with the same script.
pub(super) fn similarity(one: &str, other: &str) -> f64 {
    let (one, other): (Vec<_>, Vec<_>) = (one.split(' ').collect(), other.split(' ').collect());
    let ([user, account, program, rest @ ..], [user2, account2, program2, rest2 @ ..]) = (&one[..], &other[..]) else {
        return 0.0;
    };
    let scripted = is_interpreter(program);
    if program != program2 || (scripted && rest.first() != rest2.first()) {
        return 0.0;
    }
    let part = |same: bool, share: f64| if same { share } else { 0.0 };
    SIMILAR_PROGRAM
        + part(user == user2, SIMILAR_USER)
        + part(account == account2, SIMILAR_ACCOUNT)
        + SIMILAR_ARGUMENTS * overlap(rest, rest2)
}

/// Returns the share of common words in two lists: 1 if both are empty.
fn overlap(one: &[&str], other: &[&str]) -> f64 {
    if one.is_empty() && other.is_empty() {
        return 1.0;
    }
    let mut left: Vec<&str> = other.to_vec();
    let mut common = 0;
    for word in one {
        if let Some(at) = left.iter().position(|w| w == word) {
            left.swap_remove(at);
            common += 1;
        }
    }
    f64::from(common) / (one.len() + other.len()) as f64 * 2.0
}
