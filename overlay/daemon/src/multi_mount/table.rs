//! `forebay.toml`: the pools of a mixed root, each in a `[[pool]]` table, and the policy that they share.

use std::net::SocketAddr;
use std::num::NonZeroU8;
use std::path::{Path, PathBuf};

use bytesize::ByteSize;
use forebay_backends::{PoolLocation, RESERVED_PREFIX};
use forebay_policy::{PolicyFile, PolicyFiles};
use serde::Deserialize;

use super::super::config::MountConfig;
use super::super::metrics::parse_address;
use super::super::{Failure, limits, paths, policy_files};

/// The longest name of a directory on any known file system.
const NAME_BYTES: usize = 255;
const EXAMPLE: &str = "a table such as: [[pool]] name = \"home\" url = \"/mnt/nfs/home\" limit = \"500G\"; it may also \
                       have fast, memory, threads, policy, deadline, retry, read-only, immutable, metrics, peers";

/// A pool of a mixed root, and how it is mounted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NamedPool {
    pub name: String,
    pub config: MountConfig,
}

/// One `[[pool]]`. The command line gives the values that are missing.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct PoolTable {
    name: String,
    url: String,
    #[serde(default)]
    fast: Vec<PathBuf>,
    limit: Option<String>,
    memory: Option<String>,
    threads: Option<NonZeroU8>,
    /// A policy file for this pool, instead of the policy that the pools share.
    policy: Option<PathBuf>,
    deadline: Option<String>,
    retry: Option<String>,
    read_only: Option<bool>,
    immutable: Option<bool>,
    metrics: Option<String>,
    peers: Option<PathBuf>,
}

/// Reads the file. `common` has what the command line says for all pools. Its mountpoint is the root, and each of its
/// fast directories gets a subdirectory for each pool that names none. Relative paths in the file are relative to its
/// directory.
///
/// # Errors
/// `Usage`, with the file, the table and what is wrong in it.
pub fn read(file: &Path, common: &MountConfig) -> Result<Vec<NamedPool>, Failure> {
    let text = std::fs::read_to_string(file).map_err(|e| Failure::given(file.display(), &e))?;
    let file = paths::absolute(file).map_err(|e| Failure::io(file.display(), &e))?;
    parse(&text, &file, common)
}

fn parse(text: &str, file: &Path, common: &MountConfig) -> Result<Vec<NamedPool>, Failure> {
    let place = file.display();
    let mut shared: toml::Table =
        toml::from_str(text).map_err(|e| Failure::usage(format!("{place}: {}", e.to_string().trim_end())))?;
    let tables = match shared.remove("pool") {
        Some(toml::Value::Array(tables)) if !tables.is_empty() => tables,
        _ => return Err(Failure::usage(format!("{place}: it has no [[pool]]")).remedy(EXAMPLE)),
    };
    if tables.len() > limits::MIXED_POOLS {
        let (count, most) = (tables.len(), limits::MIXED_POOLS);
        return Err(Failure::usage(format!("{place}: {count} pools; at most {most}"))
            .remedy("divide them among several mountpoints"));
    }
    let beside = toml::to_string(&shared).map_err(|e| Failure::usage(format!("{place}: {e}")))?;
    policy_files::compile(&beside.into(), "")
        .map_err(|e| Failure::usage(format!("{place}: beside [[pool]]: {e}")).remedy(EXAMPLE))?;
    let mut pools: Vec<NamedPool> = Vec::with_capacity(tables.len());
    for (at, table) in tables.into_iter().enumerate() {
        let mut label = format!("{place}: [[pool]] {}", at + 1);
        if let Some(name) = table.get("name").and_then(toml::Value::as_str) {
            label += &format!(" ({name:?})");
        }
        let named = one(table, file, &shared, common).map_err(|failure| within(&label, failure))?;
        if pools.iter().any(|p| p.name == named.name) {
            return Err(Failure::usage(format!("{label}: another pool has the name"))
                .remedy("each pool is a directory: give it a name of its own"));
        }
        if let Some(other) =
            pools.iter().find(|p| p.config.metrics.is_some() && p.config.metrics == named.config.metrics)
        {
            return Err(Failure::usage(format!("{label}: pool {:?} has the same metrics address", other.name))
                .remedy("each pool has a daemon of its own: give it a port of its own"));
        }
        pools.push(named);
    }
    Ok(pools)
}

/// Adds the table to a failure that it caused.
pub(super) fn within(label: &str, failure: Failure) -> Failure {
    Failure { what: format!("{label}: {}", failure.what), ..failure }
}

fn one(table: toml::Value, file: &Path, shared: &toml::Table, common: &MountConfig) -> Result<NamedPool, Failure> {
    let table: PoolTable = table
        .try_into()
        .map_err(|e: toml::de::Error| Failure::usage(e.to_string().trim_end().to_string()).remedy(EXAMPLE))?;
    check_name(&table.name)?;
    let beside = |path: &Path| file.parent().unwrap_or(Path::new("/")).join(path);
    let pool = match PoolLocation::parse(&table.url).map_err(|e| Failure::usage(e.to_string()))? {
        PoolLocation::Directory(_) if table.url.is_empty() => {
            return Err(Failure::usage("the url is empty").remedy(EXAMPLE));
        }
        PoolLocation::Directory(dir) if dir.is_relative() => beside(&dir).to_string_lossy().into_owned(),
        _ => table.url.clone(),
    };
    let fast: Vec<PathBuf> = match table.fast.is_empty() {
        true => common.fast.iter().map(|dir| dir.join(&table.name)).collect(),
        false => table.fast.iter().map(|dir| beside(dir)).collect(),
    };
    if fast.is_empty() {
        return Err(Failure::usage("it has no fast pool")
            .remedy("fast = [\"DIR\"] in the table, or --fast DIR for all: each pool then has DIR/NAME"));
    }
    let limit_bytes = bytes("limit", table.limit.as_deref())?.or(common.limit_bytes);
    if limit_bytes.is_none() {
        return Err(Failure::usage("it has no limit, and pools that share a device would fill it together")
            .remedy("limit = \"500G\" in the table, or --limit 500G for each that has none"));
    }
    let immutable = table.immutable.unwrap_or(common.immutable);
    let policy = policy(&table, beside, shared, immutable)?;
    let config = MountConfig {
        pool,
        mountpoint: common.mountpoint.join(&table.name),
        fast,
        limit_bytes,
        policy,
        read_only: table.read_only.unwrap_or(common.read_only),
        immutable,
        threads: table.threads.map(|n| usize::from(n.get())).or(common.threads),
        memory_bytes: bytes("memory", table.memory.as_deref())?.or(common.memory_bytes),
        metrics: metrics_address(table.metrics.as_deref())?,
        peers: table.peers.as_deref().map(beside),
        ..common.clone()
    };
    Ok(NamedPool { name: table.name, config })
}

/// Checks a name: it becomes one directory that all users see.
fn check_name(name: &str) -> Result<(), Failure> {
    let why = if name.is_empty() {
        "is empty"
    } else if matches!(name, "." | "..") {
        "is the directory itself or the one above it"
    } else if name.contains('/') {
        "has a slash"
    } else if name.chars().any(char::is_control) {
        "has a control character"
    } else if name.len() > NAME_BYTES {
        "is longer than 255 bytes"
    } else if name.as_bytes().starts_with(RESERVED_PREFIX) {
        "starts with .forebay~, which is reserved for unfinished uploads"
    } else {
        return Ok(());
    };
    Err(Failure::usage(format!("the name {why}")).remedy("a name is one directory of the root, such as \"home\""))
}

fn bytes(key: &str, text: Option<&str>) -> Result<Option<u64>, Failure> {
    let read = |text: &str| {
        let size: Result<ByteSize, _> = text.parse();
        size.map(|s| s.as_u64())
            .map_err(|e| Failure::usage(format!("{key} = {text:?}: {e}")).remedy(format!("{key} = \"500G\"")))
    };
    text.map(read).transpose()
}

fn metrics_address(text: Option<&str>) -> Result<Option<SocketAddr>, Failure> {
    let read = |text| parse_address(text).map_err(|why| Failure::usage(format!("metrics = {text:?}: {why}")));
    text.map(read).transpose()
}

/// Returns the policy of one pool: that of its own file, or else the shared one, and what its table says.
fn policy(
    table: &PoolTable,
    beside: impl Fn(&Path) -> PathBuf,
    shared: &toml::Table,
    immutable: bool,
) -> Result<Option<PolicyFiles>, Failure> {
    let generated = |name: &str, table: &toml::Table| -> Result<PolicyFile, Failure> {
        let text = toml::to_string(table).map_err(|e| Failure::usage(format!("the policy: {e}")))?;
        Ok(PolicyFile { name: name.into(), text })
    };
    let mut files = PolicyFiles::default();
    match &table.policy {
        Some(file) => files = policy_files::read(&beside(file))?,
        None if !shared.is_empty() => files.0.push(generated("the shared policy", shared)?),
        None => {}
    }
    let mut own = toml::Table::new();
    for (key, value) in [("deadline", &table.deadline), ("retry", &table.retry)] {
        if let Some(value) = value {
            let pool = own.entry("pool").or_insert_with(|| toml::Table::new().into());
            if let Some(pool) = pool.as_table_mut() {
                pool.insert(key.into(), value.as_str().into());
            }
        }
    }
    if !own.is_empty() {
        files.0.push(generated("its [[pool]] table", &own)?);
    }
    if files.0.is_empty() {
        return Ok(None);
    }
    if immutable && table.policy.is_none() {
        let text = "[default]\nconsistency = \"immutable\"\nmetadata-ttl = \"365days\"\n".to_owned();
        files.0.insert(0, PolicyFile { name: "immutable".into(), text });
    }
    policy_files::compile(&files, &table.url)?;
    Ok(Some(files))
}

#[cfg(test)]
mod tests;
