//! The known word that a wrong one probably stands for.

use super::value::shown;

/// The longest word that is compared, in characters.
const COMPARED: usize = 64;

/// Returns the text of an error about a word that is not known.
pub fn unknown(kind: &str, word: &str, known: &[&str]) -> String {
    let meant = nearest(word, known).map_or_else(String::new, |meant| format!(": did you mean `{meant}`?"));
    let list = if meant.is_empty() { format!(": one of {}", known.join(", ")) } else { meant };
    format!("there is no {kind} `{}`{list}", shown(word))
}

/// Returns the known word with the fewest differences, if it has few enough.
pub fn nearest<'a>(word: &str, known: &[&'a str]) -> Option<&'a str> {
    let (distance, meant) = known.iter().map(|known| (distance(word, known), *known)).min()?;
    let most = meant.len().div_ceil(3);
    (distance <= most).then_some(meant)
}

/// Returns how many characters have to be inserted, removed or replaced.
fn distance(word: &str, known: &str) -> usize {
    let known: Vec<char> = known.chars().collect();
    let mut row: Vec<usize> = (0..=known.len()).collect();
    for (at, c) in word.chars().take(COMPARED).flat_map(char::to_lowercase).enumerate() {
        let mut diagonal = std::mem::replace(&mut row[0], at + 1);
        for (column, k) in known.iter().flat_map(|k| k.to_lowercase()).enumerate().take(known.len()) {
            let replaced = diagonal + usize::from(c != k);
            diagonal = row[column + 1];
            row[column + 1] = replaced.min(diagonal + 1).min(row[column] + 1);
        }
    }
    row[known.len()]
}
