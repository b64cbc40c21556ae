//! What a policy says of the whole mount: limits, shares, the pool, the processors.

use std::collections::BTreeMap;
use std::time::Duration;

use forebay_backends::Result;
use toml_edit::Table;

use crate::document::{PolicyFields, PolicySource, duration, meant};
use crate::quotas::QuotaPolicy;
use crate::settings::SettingName;
use crate::tiers::{self, Tier};
use crate::writeback::{SendWindow, WriteBack, rate, request_rate};

/// Limits of the fast pool.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SpacePolicy {
    /// Eviction starts above this share of the limit.
    pub high_watermark: f64,
    /// Eviction stops below this share of the limit.
    pub low_watermark: f64,
}

/// The share of one user in what the other users left, between 0 and 1. Root and the user who mounts may take all.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SharePolicy {
    /// Bytes of the fast pool that are not in the pool yet.
    pub dirty: f64,
    /// Open files, as a share of the descriptors that the daemon may have.
    pub open_files: f64,
    /// Requests that wait at the same time.
    pub requests: f64,
}

impl Default for SharePolicy {
    fn default() -> Self {
        Self { dirty: 0.75, open_files: 0.75, requests: 0.75 }
    }
}

/// What is fetched before a program requests it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Prefetch {
    /// Files that a job will probably read, when the job begins.
    pub jobs: bool,
    /// Files that readers will probably open next, predicted from what they open.
    pub online: bool,
}

/// Everything that is the same for all paths of a mount.
#[derive(Debug, Clone, PartialEq)]
pub struct MountPolicy {
    /// Names given to storage pools that the pool identifies only by numbers.
    pub(crate) storage_pool_names: BTreeMap<String, String>,
    pub space: SpacePolicy,
    pub shares: SharePolicy,
    /// Name of the eviction policy.
    pub evictor: String,
    pub prefetch: Prefetch,
    /// Whether reads are observed even while no part of the daemon needs it.
    pub observes_always: bool,
    /// How long a metadata call may take before the pool counts as not answering.
    pub pool_deadline: Duration,
    /// How often a pool that does not answer is probed; zero: every call probes it.
    pub pool_retry: Duration,
    /// How long idle processors may take to wake up while requests stream, to the microsecond. Zero: they do not sleep.
    /// `None`: no limit.
    pub wakeup_latency: Option<Duration>,
    /// Fastest first. Empty: the `--fast` directories are the only tier.
    pub tiers: Vec<Tier>,
    pub write_back: WriteBack,
    pub quotas: QuotaPolicy,
    /// The settings that the owner of a directory may make for it by an extended attribute.
    pub allowed: Vec<SettingName>,
}

impl Default for MountPolicy {
    fn default() -> Self {
        Self {
            storage_pool_names: BTreeMap::new(),
            space: SpacePolicy { high_watermark: 0.95, low_watermark: 0.90 },
            shares: SharePolicy::default(),
            evictor: forebay_prefetch::eviction::DEFAULT.into(),
            prefetch: Prefetch { jobs: true, online: true },
            observes_always: false,
            pool_deadline: Duration::from_secs(10),
            pool_retry: Duration::from_secs(2),
            wakeup_latency: Some(Duration::ZERO),
            tiers: Vec::new(),
            write_back: WriteBack::default(),
            quotas: QuotaPolicy::default(),
            allowed: Vec::new(),
        }
    }
}

/// The names of the sections.
pub(crate) const SECTIONS: [&str; 9] =
    ["space", "shares", "pool", "write-back", "cpu", "prefetch", "observer", "allow", "storage-pools"];

fn take<T>(given: Option<T>, to: &mut T) {
    if let Some(given) = given {
        *to = given;
    }
}

impl MountPolicy {
    /// Takes what the sections of one file say.
    pub(crate) fn take(&mut self, source: &PolicySource<'_>, document: &Table) -> Result<()> {
        let section = |name: &str, known: &[&str]| PolicyFields::section(source, document, name, known);
        if let Some(space) = section("space", &["high-watermark", "low-watermark", "evictor"])? {
            take(space.share("high-watermark")?, &mut self.space.high_watermark);
            take(space.share("low-watermark")?, &mut self.space.low_watermark);
            let SpacePolicy { high_watermark, low_watermark } = self.space;
            if low_watermark > high_watermark {
                let key = if space.item("low-watermark").is_some() { "low-watermark" } else { "high-watermark" };
                let what = format!("low-watermark ({low_watermark}) is above high-watermark ({high_watermark})");
                return Err(space.error(key, what));
            }
            if let Some(name) = space.text("evictor")? {
                let known: Vec<&str> = forebay_prefetch::eviction::names().collect();
                if !known.contains(&name) {
                    return Err(
                        space.error("evictor", format!("evictor = \"{name}\" is not known{}", meant(name, &known)))
                    );
                }
                self.evictor = name.into();
            }
        }
        if let Some(shares) = section("shares", &["dirty", "open-files", "requests"])? {
            take(shares.share("dirty")?, &mut self.shares.dirty);
            take(shares.share("open-files")?, &mut self.shares.open_files);
            take(shares.share("requests")?, &mut self.shares.requests);
        }
        if let Some(pool) = section("pool", &["deadline", "retry"])? {
            take(pool.read("deadline", duration)?, &mut self.pool_deadline);
            take(pool.read("retry", duration)?, &mut self.pool_retry);
        }
        if let Some(write_back) = section("write-back", &["rate", "requests", "schedule", "pace-below", "max-lag"])? {
            take(write_back.read("rate", rate)?, &mut self.write_back.limits.bytes);
            take(write_back.read("requests", request_rate)?, &mut self.write_back.limits.requests);
            let below = write_back.number("pace-below")?;
            if let Some(below) = below.filter(|below| !(0.0..=1.0).contains(below)) {
                let what = format!("pace-below = {below}: must be at least 0 (never) and at most 1");
                return Err(write_back.error("pace-below", what));
            }
            take(below, &mut self.write_back.pace_below);
            let lag = |text: &str| if text == "any" { Ok(None) } else { duration(text).map(Some) };
            take(write_back.read("max-lag", lag)?, &mut self.write_back.max_lag);
            let window = |text: &str| {
                SendWindow::parse(text).map_err(|why| write_back.error("schedule", format!("\"{text}\": {why}")))
            };
            let windows = write_back.texts("schedule")?;
            take(
                windows.map(|windows| windows.into_iter().map(window).collect::<Result<_>>()).transpose()?,
                &mut self.write_back.schedule,
            );
        }
        if let Some(cpu) = section("cpu", &["wakeup-latency"])? {
            let latency = |text: &str| if text == "any" { Ok(None) } else { duration(text).map(Some) };
            take(cpu.read("wakeup-latency", latency)?, &mut self.wakeup_latency);
        }
        if let Some(prefetch) = section("prefetch", &["jobs", "online"])? {
            take(prefetch.boolean("jobs")?, &mut self.prefetch.jobs);
            take(prefetch.boolean("online")?, &mut self.prefetch.online);
        }
        if let Some(observer) = section("observer", &["at-work"])? {
            let always = |text: &str| match text {
                "needed" => Ok(false),
                "always" => Ok(true),
                _ => Err("must be one of needed, always".to_owned()),
            };
            take(observer.read("at-work", always)?, &mut self.observes_always);
        }
        if let Some(allow) = section("allow", &["settings"])? {
            let known = SettingName::ALL.map(SettingName::key);
            let setting = |text: &str| match SettingName::ALL.into_iter().find(|name| name.key() == text) {
                Some(name) => Ok(name),
                None => Err(allow.error("settings", format!("there is no setting `{text}`{}", meant(text, &known)))),
            };
            let empty = allow.item("settings").and_then(|item| item.as_array()).is_some_and(toml_edit::Array::is_empty);
            let settings = if empty { Some(Vec::new()) } else { allow.texts("settings")? };
            take(
                settings.map(|settings| settings.into_iter().map(setting).collect::<Result<_>>()).transpose()?,
                &mut self.allowed,
            );
        }
        let tiers = tiers::read(source, document, self.space)?;
        if !tiers.is_empty() {
            self.tiers = tiers;
        }
        if let Some(item) = document.get("storage-pools") {
            let table = item
                .as_table_like()
                .ok_or_else(|| source.error(item.span(), "`storage-pools` must be a table: [storage-pools]"))?;
            for (number, name) in table.iter() {
                let Some(text) = name.as_str() else {
                    return Err(source.error(name.span(), format!("the name of storage pool {number} must be text")));
                };
                self.storage_pool_names.insert(number.into(), text.into());
            }
        }
        Ok(())
    }
}
