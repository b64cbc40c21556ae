//! The numbers in a text: those of its digit sequences that count as numbers.

/// The most digits of a number: they fit an `i64`, with room for additions.
const DIGITS_MAX: usize = 17;

/// The shortest word of hexadecimal digits that may count as a hash.
const HASH_LENGTH_MIN: usize = 8;

/// Changes between letters and digits that make such a word a hash: `20240117` and `decade2024` have fewer. For a word
/// of twice the length, one change is enough.
const HASH_CHANGES_MIN: usize = 2;

/// One sequence of digits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct DigitRun {
    /// The byte range in the text.
    pub start: usize,
    pub end: usize,
    pub value: i64,
}

impl DigitRun {
    pub fn width(&self) -> usize {
        self.end - self.start
    }
}

/// The kind of a sequence of letters and digits.
enum Word {
    Hash,
    Plain,
}

/// Calls `number` for every number in the text, in order. Hashes and too long numbers count as text.
pub(crate) fn each_run(text: &str, mut number: impl FnMut(DigitRun)) {
    each_word(text, |word, start, end| {
        if matches!(word, Word::Plain) {
            runs_of_word(text, start, end, &mut number);
        }
    });
}

/// Returns whether a word of the text is a hash.
pub(crate) fn has_hash(text: &str) -> bool {
    let mut found = false;
    each_word(text, |word, _, _| found |= matches!(word, Word::Hash));
    found
}

/// Returns the text with `#` for every number and `~` for every hash.
pub(crate) fn masked(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut kept = 0;
    let mut cut = |start: usize, end: usize, mark: char| {
        out.push_str(&text[kept..start]);
        out.push(mark);
        kept = end;
    };
    each_word(text, |word, start, end| match word {
        Word::Hash => cut(start, end, '~'),
        Word::Plain => digits(text, start, end, |start, end| cut(start, end, '#')),
    });
    out.push_str(&text[kept..]);
    out
}

fn each_word(text: &str, mut found: impl FnMut(Word, usize, usize)) {
    let bytes = text.as_bytes();
    let mut at = 0;
    while at < bytes.len() {
        if !bytes[at].is_ascii_alphanumeric() {
            at += 1;
            continue;
        }
        let start = at;
        let (mut hex, mut digits, mut changes) = (true, 0, 0);
        while at < bytes.len() && bytes[at].is_ascii_alphanumeric() {
            let digit = bytes[at].is_ascii_digit();
            hex &= bytes[at].is_ascii_hexdigit();
            digits += usize::from(digit);
            changes += usize::from(at > start && digit != bytes[at - 1].is_ascii_digit());
            at += 1;
        }
        let length = at - start;
        let mixed = changes >= HASH_CHANGES_MIN || (changes > 0 && length >= 2 * HASH_LENGTH_MIN);
        if digits > 0 {
            found(if hex && length >= HASH_LENGTH_MIN && mixed { Word::Hash } else { Word::Plain }, start, at);
        }
    }
}

fn digits(text: &str, start: usize, end: usize, mut found: impl FnMut(usize, usize)) {
    let bytes = text.as_bytes();
    let mut at = start;
    while at < end {
        let first = at;
        while at < end && bytes[at].is_ascii_digit() {
            at += 1;
        }
        if at > first {
            found(first, at);
        }
        at += 1;
    }
}

fn runs_of_word(text: &str, start: usize, end: usize, number: &mut impl FnMut(DigitRun)) {
    digits(text, start, end, |start, end| {
        if end - start <= DIGITS_MAX {
            let value = text.as_bytes()[start..end].iter().fold(0, |sum, digit| sum * 10 + i64::from(digit - b'0'));
            number(DigitRun { start, end, value });
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    fn values(text: &str) -> Vec<i64> {
        let mut out = Vec::new();
        each_run(text, |run| out.push(run.value));
        out
    }

    #[test]
    fn numbers_are_found_and_hashes_are_not() {
        assert_eq!(values("data/2024-01-17/part-0042.h5"), [2024, 1, 17, 42, 5]);
        assert!(values("ab/cd12ef34a9").is_empty());
        assert_eq!(values("ä7ö008"), [7, 8]);
        assert_eq!(values("decade2024"), [2024]);
        assert!(values("0123456789012345678901234567890").is_empty());
    }

    #[test]
    fn masks_say_what_was_there() {
        assert_eq!(masked("data/2024-01-17/part-0042.h5"), "data/#-#-#/part-#.h#");
        assert_eq!(masked("ab/cd12ef34a9.bin"), "ab/~.bin");
        assert_eq!(masked("none"), "none");
        assert_eq!(masked("0123456789012345678901234567890"), "#");
    }
}
