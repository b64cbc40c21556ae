//! Reads TOML with the place of every value, so that an error names file, line and column, and the word that was
//! probably meant.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use forebay_backends::{Error, ErrorKind, Result, Side};
use toml_edit::{Document, Item, TableLike, Value};

/// A word is suggested if it is at least so similar to the unknown one (Jaro-Winkler, between 0 and 1).
const SIMILAR: f64 = 0.75;

/// The longest duration. Sums and multiples of it fit into the clocks and counters that the daemon adds it to.
const LONGEST: Duration = Duration::from_secs(100 * 365 * 86_400);

/// Where something stands in a policy.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Place {
    pub file: Arc<str>,
    /// From 1 on.
    pub line: usize,
    /// In characters, from 1 on.
    pub column: usize,
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}:{}", self.file, self.line, self.column)
    }
}

/// One file, as it was read.
#[derive(Debug)]
pub(crate) struct PolicySource<'a> {
    pub name: Arc<str>,
    pub text: &'a str,
}

impl<'a> PolicySource<'a> {
    /// Parses the syntax.
    pub fn parse(name: &str, text: &'a str) -> Result<(Self, Document<&'a str>)> {
        let source = Self { name: name.into(), text };
        let document = Document::parse(text).map_err(|e| source.error(e.span(), e.message().trim()))?;
        Ok((source, document))
    }

    pub fn place(&self, span: Option<Range<usize>>) -> Place {
        let at = span.map_or(0, |span| span.start).min(self.text.len());
        let before = self.text.get(..at).unwrap_or_default();
        let line_start = before.rfind('\n').map_or(0, |newline| newline + 1);
        Place {
            file: self.name.clone(),
            line: before.matches('\n').count() + 1,
            column: before[line_start..].chars().count() + 1,
        }
    }

    pub fn error(&self, span: Option<Range<usize>>, what: impl fmt::Display) -> Error {
        invalid(format!("{}: {what}", self.place(span)))
    }
}

/// The values of one table.
pub(crate) struct PolicyFields<'a> {
    pub source: &'a PolicySource<'a>,
    /// How messages call the table: `[space]`.
    pub what: String,
    table: &'a dyn TableLike,
}

impl<'a> PolicyFields<'a> {
    /// Takes a table, of which all keys must be known.
    pub fn of(
        source: &'a PolicySource<'a>,
        what: impl Into<String>,
        table: &'a dyn TableLike,
        known: &[&str],
    ) -> Result<Self> {
        let fields = Self { source, what: what.into(), table };
        for (key, item) in table.iter() {
            if !known.contains(&key) {
                let span = table.get_key_value(key).and_then(|(key, _)| key.span()).or_else(|| item.span());
                let what = &fields.what;
                return Err(source.error(span, format!("{what} has no `{key}`{}", meant(key, known))));
            }
        }
        Ok(fields)
    }

    /// Takes the table of a section of the document, if there is one.
    pub fn section(
        source: &'a PolicySource<'a>,
        document: &'a dyn TableLike,
        name: &str,
        known: &[&str],
    ) -> Result<Option<Self>> {
        let Some(item) = document.get(name) else { return Ok(None) };
        match item.as_table_like() {
            Some(table) => Self::of(source, format!("[{name}]"), table, known).map(Some),
            None => Err(source.error(item.span(), format!("`{name}` must be a table: [{name}]"))),
        }
    }

    pub fn item(&self, key: &str) -> Option<&'a Item> {
        self.table.get(key)
    }

    pub fn place(&self, key: &str) -> Place {
        self.source.place(self.item(key).and_then(Item::span))
    }

    pub fn error(&self, key: &str, what: impl fmt::Display) -> Error {
        self.source.error(self.item(key).and_then(Item::span), what)
    }

    fn is_not(&self, key: &str, what: &str) -> Error {
        let value = self.item(key).map(|item| item.to_string().trim().to_owned()).unwrap_or_default();
        let value = value.lines().next().unwrap_or_default();
        self.error(key, format!("{key} = {value}: {what}"))
    }

    pub fn text(&self, key: &str) -> Result<Option<&'a str>> {
        self.of_kind(key, "must be text in quotes", Item::as_str)
    }

    pub fn boolean(&self, key: &str) -> Result<Option<bool>> {
        self.of_kind(key, "must be true or false", Item::as_bool)
    }

    pub fn number(&self, key: &str) -> Result<Option<f64>> {
        let number = |item: &Item| item.as_float().or_else(|| item.as_integer().map(|number| number as f64));
        self.of_kind(key, "must be a number", number)
    }

    fn of_kind<T>(&self, key: &str, must: &str, get: impl Fn(&'a Item) -> Option<T>) -> Result<Option<T>> {
        self.item(key).map(|item| get(item).ok_or_else(|| self.is_not(key, must))).transpose()
    }

    /// Returns one text, or a list of texts. A list may not be empty.
    pub fn texts(&self, key: &str) -> Result<Option<Vec<&'a str>>> {
        let Some(item) = self.item(key) else { return Ok(None) };
        let texts = match item.as_value() {
            Some(Value::String(text)) => Some(vec![text.value().as_str()]),
            Some(Value::Array(list)) => list.iter().map(Value::as_str).collect::<Option<Vec<_>>>(),
            _ => None,
        };
        match texts {
            Some(texts) if texts.is_empty() => Err(self.is_not(key, "the list is empty")),
            Some(texts) => Ok(Some(texts)),
            None => Err(self.is_not(key, "must be text in quotes, or a list of such texts")),
        }
    }

    /// Returns a value that is read from text. `read` says what is wrong with it.
    pub fn read<T>(&self, key: &str, read: impl FnOnce(&str) -> std::result::Result<T, String>) -> Result<Option<T>> {
        let Some(text) = self.text(key)? else { return Ok(None) };
        read(text).map(Some).map_err(|why| self.error(key, format!("{key} = \"{text}\": {why}")))
    }

    /// Returns a share, which is above 0 and at most 1.
    pub fn share(&self, key: &str) -> Result<Option<f64>> {
        match self.number(key)? {
            Some(share) if !(0.0 < share && share <= 1.0) => {
                Err(self.error(key, format!("{key} = {share}: must be above 0 and at most 1")))
            }
            share => Ok(share),
        }
    }
}

/// Returns the end of a message: the word that was meant, or all that are known.
pub(crate) fn meant(word: &str, known: &[&str]) -> String {
    let similar = known.iter().map(|other| (strsim::jaro_winkler(word, other), other));
    match similar.max_by(|a, b| a.0.total_cmp(&b.0)) {
        Some((how, other)) if how >= SIMILAR => format!("; did you mean `{other}`?"),
        _ => format!("; it has {}", known.join(", ")),
    }
}

pub(crate) fn duration(text: &str) -> std::result::Result<Duration, String> {
    match humantime::parse_duration(text) {
        Ok(duration) if duration > LONGEST => Err("a duration is at most 36500d".into()),
        Ok(duration) => Ok(duration),
        Err(e) => Err(format!("{e}; it must be a duration such as 30s")),
    }
}

pub(crate) fn size(text: &str) -> std::result::Result<u64, String> {
    let size: std::result::Result<bytesize::ByteSize, _> = text.parse();
    size.map(|size| size.as_u64()).map_err(|e| format!("{e}; it must be a size such as 4MiB"))
}

pub(crate) fn invalid(context: impl fmt::Display) -> Error {
    Error::new(ErrorKind::InvalidInput, Side::Application, context.to_string())
}
