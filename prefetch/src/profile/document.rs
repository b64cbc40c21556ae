//! The readable form of a profile, so that a site can ship profiles with its programs.

use serde::{Deserialize, Serialize};

use super::{FILES_MAX, PATH_BYTES_MAX, Parts, Profile, RUNS_MAX, RememberedFile, RememberedRun};
use crate::signature::{Invocation, PARAMETERS_MAX, Parameter, ParameterPlace, Parameters, Unit};

/// The version of the document that this program writes and reads.
const VERSION: u32 = 1;

/// A profile as JSON or TOML.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct ProfileDocument {
    pub version: u32,
    /// An invocation with the signature; the import uses it, and ignores `signature`.
    pub example: Invocation,
    /// For readers only: the signature of the example.
    #[serde(default)]
    pub signature: String,
    /// The newest first, at most 8.
    #[serde(default)]
    pub runs: Vec<RunDocument>,
    #[serde(default)]
    pub files: Vec<FileDocument>,
}

/// One run.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct RunDocument {
    /// Seconds since 1970.
    pub ended_unix: u64,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub parameters: Vec<ParameterDocument>,
}

/// One number or date in the arguments of a run.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct ParameterDocument {
    /// The n-th word after the program, from 1; absent for the array index.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub argument: Option<u16>,
    /// The index of the number in the argument, from 0.
    #[serde(default)]
    pub number: u16,
    pub unit: Unit,
    /// In units since 1970; months since the year 0.
    pub value: i64,
    /// Number of digits as written.
    #[serde(default)]
    pub width: u8,
}

/// One file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct FileDocument {
    /// Relative to the mount.
    pub path: String,
    pub size_bytes: u64,
    /// In the order of first uses, from 1.
    pub rank: u32,
    /// A letter for each run, the newest first: `x` used it, `-` did not.
    pub runs: String,
    /// Bytes of a part; absent if the whole file was used.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub part_bytes: Option<u64>,
    /// Numbers of parts and ranges of them, from 0 to 255: `0-3,7`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub parts: Option<String>,
}

/// The reason why a document is no profile. `field` is the place, such as `files[3].path`.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{field}: {what}")]
pub struct DocumentError {
    pub field: String,
    pub what: String,
}

fn wrong(field: impl Into<String>, what: impl Into<String>) -> DocumentError {
    DocumentError { field: field.into(), what: what.into() }
}

impl From<&Profile> for ProfileDocument {
    fn from(profile: &Profile) -> Self {
        let runs = profile.runs.iter().map(|run| RunDocument {
            ended_unix: run.ended_unix,
            parameters: run.parameters.iter().map(ParameterDocument::from).collect(),
        });
        let letters = |used: u8| (0..profile.runs.len()).map(move |run| if used >> run & 1 == 1 { 'x' } else { '-' });
        let files = profile.files.iter().map(|file| FileDocument {
            path: file.path.to_string(),
            size_bytes: file.size_bytes,
            rank: file.rank,
            runs: letters(file.used).collect(),
            part_bytes: file.parts.as_ref().map(|parts| parts.part_bytes),
            parts: file.parts.as_ref().map(|parts| ranges(&parts.bits)),
        });
        Self {
            version: VERSION,
            example: profile.example.clone(),
            signature: profile.signature().as_str().to_owned(),
            runs: runs.collect(),
            files: files.collect(),
        }
    }
}

impl TryFrom<ProfileDocument> for Profile {
    type Error = DocumentError;

    fn try_from(document: ProfileDocument) -> Result<Self, DocumentError> {
        if document.version != VERSION {
            return Err(wrong("version", format!("is {}, and this program reads {VERSION}", document.version)));
        }
        if document.runs.len() > RUNS_MAX {
            return Err(wrong("runs", format!("are {}, and at most {RUNS_MAX} are remembered", document.runs.len())));
        }
        if document.files.len() > FILES_MAX {
            return Err(wrong(
                "files",
                format!("are {}, and at most {FILES_MAX} are remembered", document.files.len()),
            ));
        }
        let mut profile = Self::new(&document.example);
        for (at, run) in document.runs.iter().enumerate() {
            if run.parameters.len() > PARAMETERS_MAX {
                return Err(wrong(format!("runs[{at}].parameters"), format!("are more than {PARAMETERS_MAX}")));
            }
            let parameters = Parameters::from_vec(run.parameters.iter().map(Parameter::from).collect());
            profile.runs.push(RememberedRun { ended_unix: run.ended_unix, parameters });
        }
        let runs = profile.runs.len();
        let read = |(at, file): (usize, FileDocument)| file.read(runs, &format!("files[{at}]"));
        profile.files = document.files.into_iter().enumerate().map(read).collect::<Result<_, _>>()?;
        profile.files.sort_by(|a, b| a.path.cmp(&b.path));
        if let Some(twice) = profile.files.windows(2).find(|pair| pair[0].path == pair[1].path) {
            return Err(wrong("files", format!("{} is there twice", twice[0].path)));
        }
        Ok(profile)
    }
}

impl FileDocument {
    fn read(self, runs: usize, at: &str) -> Result<RememberedFile, DocumentError> {
        if self.path.is_empty() || self.path.len() > PATH_BYTES_MAX {
            return Err(wrong(format!("{at}.path"), format!("must have 1 to {PATH_BYTES_MAX} bytes")));
        }
        if self.path.starts_with('/') || self.path.split('/').any(|name| name == "..") {
            return Err(wrong(format!("{at}.path"), format!("{} is not below the mount", self.path)));
        }
        let mut used = 0_u8;
        for (run, letter) in self.runs.chars().enumerate() {
            match letter {
                'x' if run < runs => used |= 1 << run,
                '-' if run < runs => {}
                'x' | '-' => return Err(wrong(format!("{at}.runs"), format!("has more letters than {runs} runs"))),
                _ => return Err(wrong(format!("{at}.runs"), format!("{letter:?} is neither x nor -"))),
            }
        }
        if used == 0 {
            return Err(wrong(format!("{at}.runs"), "no run used it"));
        }
        let parts = match (self.part_bytes, self.parts) {
            (None, None) => None,
            (Some(0), _) => return Err(wrong(format!("{at}.part_bytes"), "must be at least 1")),
            (Some(part_bytes), Some(text)) => {
                let bits = bits(&text).ok_or_else(|| {
                    wrong(format!("{at}.parts"), format!("{text:?} is no list such as 0-3,7 of numbers up to 255"))
                })?;
                Some(Box::new(Parts { part_bytes, bits }))
            }
            _ => return Err(wrong(format!("{at}.parts"), "parts and part_bytes go together")),
        };
        Ok(RememberedFile { path: self.path.into(), size_bytes: self.size_bytes, rank: self.rank, used, parts })
    }
}

impl From<&Parameter> for ParameterDocument {
    fn from(parameter: &Parameter) -> Self {
        let argument = match parameter.place {
            ParameterPlace::ArrayIndex => None,
            ParameterPlace::Argument(number) => Some(number),
        };
        let Parameter { number, unit, value, width, .. } = *parameter;
        Self { argument, number, unit, value, width }
    }
}

impl From<&ParameterDocument> for Parameter {
    fn from(document: &ParameterDocument) -> Self {
        let place = document.argument.map_or(ParameterPlace::ArrayIndex, ParameterPlace::Argument);
        let ParameterDocument { number, unit, value, width, .. } = *document;
        Self { place, number, unit, value, width }
    }
}

fn ranges(bits: &[u64; 4]) -> String {
    let set = |part: usize| part < 256 && bits[part / 64] >> (part % 64) & 1 == 1;
    let mut out = Vec::new();
    let mut part = 0;
    while part < 256 {
        let first = part;
        while set(part) {
            part += 1;
        }
        match part - first {
            0 => part += 1,
            1 => out.push(first.to_string()),
            _ => out.push(format!("{first}-{}", part - 1)),
        }
    }
    out.join(",")
}

fn bits(text: &str) -> Option<[u64; 4]> {
    let mut bits = [0; 4];
    for range in text.split(',').filter(|range| !range.is_empty()) {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        let (first, last): (u8, u8) = (first.trim().parse().ok()?, last.trim().parse().ok()?);
        (first..=last).for_each(|part| bits[usize::from(part / 64)] |= 1 << (part % 64));
    }
    Some(bits)
}
