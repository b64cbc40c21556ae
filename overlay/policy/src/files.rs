//! The text of a policy: one file or several, in order. A daemon keeps the text, so that it starts again with the same
//! policy.

use serde::{Deserialize, Serialize};

use forebay_backends::Result;

use crate::document::{PolicyFields, PolicySource};

/// Files that a policy may have, with all that they include.
pub const FILES_MAX: usize = 256;

/// One file of a policy.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PolicyFile {
    /// How messages call it.
    pub name: String,
    pub text: String,
}

/// All files of a policy. What an earlier file says is changed by a later one.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(from = "StoredPolicy")]
pub struct PolicyFiles(pub Vec<PolicyFile>);

/// Policies that were stored by earlier versions are one text.
#[derive(Deserialize)]
#[serde(untagged)]
enum StoredPolicy {
    Text(String),
    Files(Vec<PolicyFile>),
}

impl From<StoredPolicy> for PolicyFiles {
    fn from(stored: StoredPolicy) -> Self {
        match stored {
            StoredPolicy::Text(text) => text.into(),
            StoredPolicy::Files(files) => Self(files),
        }
    }
}

impl From<String> for PolicyFiles {
    fn from(text: String) -> Self {
        Self(vec![PolicyFile { name: "policy".into(), text }])
    }
}

impl From<&str> for PolicyFiles {
    fn from(text: &str) -> Self {
        text.to_owned().into()
    }
}

/// Returns what a file includes: `include = "site.d/*.toml"`, or a list. The included files come before the file.
///
/// # Errors
/// `InvalidInput` if the file is not TOML, or `include` is neither text nor a list of texts.
pub fn includes(name: &str, text: &str) -> Result<Vec<String>> {
    let (source, document) = PolicySource::parse(name, text)?;
    let all: Vec<&str> = document.as_table().iter().map(|(key, _)| key).collect();
    let fields = PolicyFields::of(&source, "the file", document.as_table(), &all)?;
    Ok(fields.texts("include")?.unwrap_or_default().into_iter().map(str::to_owned).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_earlier_versions_stored_is_read() {
        let stored: PolicyFiles = serde_json::from_str("\"[default]\\n\"").unwrap();
        assert_eq!(stored, PolicyFiles::from("[default]\n"));
        let text = serde_json::to_string(&stored).unwrap();
        assert_eq!(serde_json::from_str::<PolicyFiles>(&text).unwrap(), stored);
    }

    #[test]
    fn includes_are_one_name_or_several() {
        assert_eq!(includes("f", "include = \"a/*.toml\"\n[default]\n").unwrap(), ["a/*.toml"]);
        assert_eq!(includes("f", "include = [\"a\", \"b\"]").unwrap(), ["a", "b"]);
        assert!(includes("f", "[default]").unwrap().is_empty());
        assert!(includes("f", "include = 3").unwrap_err().to_string().contains("f:1:11"));
    }
}
