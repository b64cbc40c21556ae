//! Text for terminals.

/// Escapes control characters: a path, or the name of a process, then neither steers a terminal nor begins a line of its
/// own.
pub fn visible(text: &str) -> String {
    text.chars().flat_map(|c| if c.is_control() { c.escape_default().collect() } else { vec![c] }).collect()
}
