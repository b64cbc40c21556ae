//! The natural order of names: numbers count as numbers.

use crate::signature::digits::each_run;

/// Returns a key whose byte order is the natural order of names. The name itself is appended to tell equal numbers of
/// different width apart, so that no two names have the same key.
pub(super) fn key(name: &str) -> Vec<u8> {
    let mut key = Vec::with_capacity(2 * name.len() + 16);
    let mut kept = 0;
    each_run(name, |run| {
        key.extend_from_slice(&name.as_bytes()[kept..run.start]);
        // Relative to a letter in another name, a number sorts as its first digit does.
        key.push(b'0');
        key.extend_from_slice(&run.value.to_be_bytes());
        kept = run.end;
    });
    key.extend_from_slice(&name.as_bytes()[kept..]);
    key.push(0);
    key.extend_from_slice(name.as_bytes());
    key
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sorted(mut names: Vec<&str>) -> Vec<&str> {
        names.sort_by_key(|name| key(name));
        names
    }

    #[test]
    fn numbers_count_as_numbers_whatever_their_width() {
        assert_eq!(
            sorted(vec!["part-10", "part-9", "part-100", "part-1"]),
            ["part-1", "part-9", "part-10", "part-100"]
        );
        assert_eq!(sorted(vec!["a2b10.h5", "a2b9.h5", "a1b99.h5"]), ["a1b99.h5", "a2b9.h5", "a2b10.h5"]);
        assert_eq!(sorted(vec!["b", "a10", "a", "a9"]), ["a", "a9", "a10", "b"]);
    }

    #[test]
    fn equal_numbers_have_an_order_too() {
        assert_eq!(sorted(vec!["x02", "x2", "x002", "x1"]), ["x1", "x002", "x02", "x2"]);
        assert_ne!(key("x02"), key("x2"));
    }
}
