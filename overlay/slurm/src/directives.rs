//! The directives of a job script: `#DW` lines, as a request with types.
//!
//! Three spellings have one meaning: those of DataWarp (`jobdw`, `stage_in`, `stage_out`), of Rabbit (`copy_in`,
//! `copy_out`) and of Forebay (`fb`). As Slurm does, this reads only the lines before the first command, and joins a line
//! that ends with a backslash with the next directive.

use std::fmt;

use serde::{Deserialize, Serialize};

mod persistent;
mod value;
mod words;

pub use persistent::{DirectoryAccess, PersistentDir, PersistentRequest};
pub use value::PERSISTENT_VARIABLES;
use value::{ScratchPath, absolute, duration_secs, is_scratch, scratch_path, size_bytes};
use words::unknown;

/// The text that begins a directive, and `Directive=` of burst_buffer.conf without the `#`.
const MARK: &str = "#DW";
/// The most paths of one kind in a script.
pub const PATHS_MAX: usize = 256;
/// The largest script that is read.
pub const SCRIPT_BYTES_MAX: u64 = 4 << 20;

/// What a job asks of Forebay.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct StagingRequest {
    /// Files, directories and globs below mounts, which are resident before the job starts.
    #[serde(default)]
    pub stage_in: Vec<String>,
    /// Files and directories among them that are shown as views while the job runs.
    #[serde(default)]
    pub views: Vec<String>,
    /// What must be in the pool when the job has ended. Empty: what the job wrote, and what its user owns.
    #[serde(default)]
    pub stage_out: Vec<String>,
    /// The job has a scratch directory of this many bytes on each node.
    #[serde(default)]
    pub scratch_bytes: Option<u64>,
    /// What is copied into the scratch directory before the job starts.
    #[serde(default)]
    pub copy_in: Vec<ScratchCopy>,
    /// What is committed from the scratch directory when the job has ended.
    #[serde(default)]
    pub copy_out: Vec<ScratchCopy>,
    /// Whether the results of a job that failed are committed.
    #[serde(default)]
    pub when: CommitWhen,
    #[serde(default)]
    pub profile: ProfileUse,
    /// Directories on the nodes that outlive the job.
    #[serde(default)]
    pub persistent: PersistentRequest,
    /// Seconds until the leases end, whatever becomes of the job.
    #[serde(default)]
    pub lease_secs: Option<u64>,
}

impl StagingRequest {
    /// Returns whether the job must not start before something was staged.
    pub fn needs_staging(&self) -> bool {
        !self.stage_in.is_empty() || self.scratch_bytes.is_some() || self.persistent.is_needed()
    }

    /// Returns whether it depends on the end of the job what becomes of its results.
    pub fn needs_outcome(&self) -> bool {
        self.when == CommitWhen::Success && !self.copy_out.is_empty()
    }
}

/// A path outside of the scratch directory, and one in it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ScratchCopy {
    pub path: String,
    /// Below the scratch directory; empty: all of it.
    pub scratch: String,
    /// What the source has to be.
    #[serde(default)]
    pub kind: Option<SourceKind>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SourceKind {
    File,
    Directory,
}

/// Whether what earlier runs of the job read is staged as well.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ProfileUse {
    #[default]
    Auto,
    None,
    /// All jobs of the user that give this name are runs of one job.
    Named(String),
}

/// How a job has to end so that its results are committed.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum CommitWhen {
    #[default]
    Always,
    /// The job's script ended with exit code 0.
    Success,
}

/// What is wrong with a line of a job script.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DirectiveError {
    /// From 1.
    pub line: usize,
    pub what: String,
}

impl fmt::Display for DirectiveError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "line {}: {}", self.line, self.what)
    }
}

impl std::error::Error for DirectiveError {}

/// Reads the directives of a job script. Returns `None` if it has none.
///
/// # Errors
/// The first line that cannot be carried out.
pub fn parse(script: &str) -> Result<Option<StagingRequest>, DirectiveError> {
    let lines = directives(script)?;
    if lines.is_empty() {
        return Ok(None);
    }
    let mut request = StagingRequest::default();
    let mut uses_scratch = None;
    for (line, text) in &lines {
        let at = |what| DirectiveError { line: *line, what };
        let copies = request.copy_in.len() + request.copy_out.len();
        read(text, &mut request).map_err(at)?;
        if request.copy_in.len() + request.copy_out.len() > copies {
            uses_scratch.get_or_insert(*line);
        }
        if [request.stage_in.len(), request.stage_out.len(), request.copy_in.len(), request.copy_out.len()]
            .iter()
            .any(|count| *count > PATHS_MAX)
        {
            return Err(at(format!("a job has {PATHS_MAX} paths of one kind at most: name their directory")));
        }
    }
    match uses_scratch {
        Some(line) if request.scratch_bytes.is_none() => Err(DirectiveError {
            line,
            what: "the job has no scratch directory: add `#DW jobdw type=scratch pool=forebay capacity=SIZE \
                   access_mode=striped` or `#DW fb scratch=SIZE`"
                .into(),
        }),
        _ => Ok(Some(request)),
    }
}

/// Returns the directives of a script with the numbers of their lines. Continued lines are one.
fn directives(script: &str) -> Result<Vec<(usize, String)>, DirectiveError> {
    let mut found: Vec<(usize, String)> = Vec::new();
    let mut goes_on = false;
    let mut is_over = false;
    for (at, line) in script.lines().enumerate() {
        let line = line.trim_end_matches('\r');
        let text = line.strip_prefix(MARK).filter(|rest| rest.is_empty() || rest.starts_with([' ', '\t', '\\']));
        let rest = line.strip_prefix(MARK).unwrap_or_default();
        if text.is_none() && !is_over && DIRECTIVES.iter().any(|directive| rest.starts_with(directive)) {
            // To Slurm, this is a directive, as any line that begins like one.
            let what = format!("`{}`: a space is missing behind {MARK}", value::shown(line));
            return Err(DirectiveError { line: at + 1, what });
        }
        match text {
            Some(_) if is_over && !found.is_empty() => {
                let what = format!("this {MARK} line is behind the first command, where Slurm ignores it: move it up");
                return Err(DirectiveError { line: at + 1, what });
            }
            Some(text) if !is_over => {
                let (text, continued) = text.strip_suffix('\\').map_or((text, false), |text| (text, true));
                match found.last_mut().filter(|_| goes_on) {
                    Some((_, before)) => {
                        before.push_str(if before.ends_with([' ', '\t']) { text.trim_start() } else { text });
                    }
                    None => found.push((at + 1, text.to_owned())),
                }
                goes_on = continued;
            }
            _ => {
                goes_on = false;
                is_over |= !line.is_empty() && !line.starts_with('#');
            }
        }
    }
    Ok(found)
}

const DIRECTIVES: [&str; 9] = [
    "jobdw",
    "stage_in",
    "stage_out",
    "copy_in",
    "copy_out",
    "persistentdw",
    "create_persistent",
    "destroy_persistent",
    "fb",
];

fn read(text: &str, request: &mut StagingRequest) -> Result<(), String> {
    let mut words = text.split_whitespace();
    let directive = words.next().unwrap_or_default();
    let options = words
        .map(|word| word.split_once('=').ok_or_else(|| format!("`{}` is no NAME=VALUE", value::shown(word))))
        .collect::<Result<Vec<_>, _>>()?;
    match directive {
        "jobdw" => jobdw(&options, request),
        "stage_in" | "copy_in" => {
            let copy = copy(directive, &options, CopyDirection::In)?;
            request.copy_in.push(copy);
            Ok(())
        }
        "stage_out" | "copy_out" => {
            let copy = copy(directive, &options, CopyDirection::Out)?;
            request.copy_out.push(copy);
            Ok(())
        }
        "fb" => fb(&options, request),
        "persistentdw" | "create_persistent" | "destroy_persistent" => request.persistent.read(directive, &options),
        "view" => Err("`view` is an option of fb: #DW fb view=PATH".into()),
        "swap" => Err("`swap` is not there: Forebay has no swap space".into()),
        "" => Err(format!("a directive is missing behind {MARK}: one of {}", DIRECTIVES.join(", "))),
        _ => Err(unknown("directive", directive, &DIRECTIVES)),
    }
}

type WordPair<'a> = (&'a str, &'a str);

fn jobdw(options: &[WordPair<'_>], request: &mut StagingRequest) -> Result<(), String> {
    let mut capacity = None;
    for (name, text) in options {
        match *name {
            "type" if *text == "scratch" => {}
            "type" => return Err(format!("type={} is not there: type=scratch", value::shown(text))),
            "capacity" => capacity = Some(size_bytes(name, text)?),
            "access_mode" => value::one_of(name, text, &["striped", "private"])?,
            "pool" => value::one_of(name, text, &["forebay"])?,
            _ => return Err(unknown("option of jobdw", name, &["type", "capacity", "access_mode", "pool"])),
        }
    }
    let capacity = capacity.ok_or("jobdw needs capacity=SIZE, such as capacity=100GiB")?;
    scratch(capacity, request)
}

fn scratch(bytes: u64, request: &mut StagingRequest) -> Result<(), String> {
    match request.scratch_bytes.replace(bytes) {
        Some(_) => Err("a job has one scratch directory: its size was given already".into()),
        None => Ok(()),
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum CopyDirection {
    In,
    Out,
}

fn copy(directive: &str, options: &[WordPair<'_>], way: CopyDirection) -> Result<ScratchCopy, String> {
    let (mut source, mut destination, mut kind) = (None, None, None);
    for (name, text) in options {
        match *name {
            "source" => source = Some(*text),
            "destination" => destination = Some(*text),
            "type" if *text == "list" => return Err("type=list is not there: give a line for each path".into()),
            "type" => {
                value::one_of(name, text, &["file", "directory"])?;
                kind = Some(if *text == "file" { SourceKind::File } else { SourceKind::Directory });
            }
            _ => return Err(unknown(&format!("option of {directive}"), name, &["type", "source", "destination"])),
        }
    }
    let (Some(source), Some(destination)) = (source, destination) else {
        return Err(format!("{directive} needs source=PATH and destination=PATH"));
    };
    let (inside, outside, role) = match way {
        CopyDirection::In => (destination, source, "destination"),
        CopyDirection::Out => (source, destination, "source"),
    };
    let ScratchPath(scratch) = scratch_path(inside).map_err(|what| format!("{role}={what}"))?;
    if is_scratch(outside) {
        return Err(format!(
            "{directive} copies between the scratch directory and a path outside of it, not inside it"
        ));
    }
    Ok(ScratchCopy { path: absolute(outside)?, scratch, kind })
}

const OPTIONS: [&str; 7] = ["stage_in", "stage_out", "view", "scratch", "profile", "lease", "when"];

fn fb(options: &[WordPair<'_>], request: &mut StagingRequest) -> Result<(), String> {
    if options.is_empty() {
        return Err(format!("fb needs an option: one of {}", OPTIONS.map(|name| format!("{name}=")).join(", ")));
    }
    for (name, text) in options {
        match *name {
            "stage_in" => request.stage_in.push(absolute(text)?),
            "stage_out" => request.stage_out.push(absolute(text)?),
            "view" if text.contains(['*', '?', '[', '{']) => {
                return Err(format!(
                    "view={}: a view shows one file or directory: give no pattern",
                    value::shown(text)
                ));
            }
            "view" => {
                request.stage_in.push(absolute(text)?);
                request.views.push(absolute(text)?);
            }
            "scratch" => scratch(size_bytes(name, text)?, request)?,
            "profile" => {
                request.profile = match *text {
                    "auto" => ProfileUse::Auto,
                    "none" => ProfileUse::None,
                    named => ProfileUse::Named(value::profile_name(named)?),
                }
            }
            "lease" => request.lease_secs = Some(duration_secs(text)?),
            "when" => {
                value::one_of(name, text, &["always", "success"])?;
                request.when = if *text == "success" { CommitWhen::Success } else { CommitWhen::Always };
            }
            "policy" => return Err("policy= is not there yet: the administrator's policy holds for all jobs".into()),
            _ => return Err(unknown("option of fb", name, &OPTIONS)),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests;
