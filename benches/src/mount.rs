//! A mount, and what its daemon uses.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::Result;

/// Returns the `forebay` program to measure: `FOREBAY_BIN`, or the one that was built beside this bench.
pub fn program() -> Result<PathBuf> {
    if let Some(path) = std::env::var_os("FOREBAY_BIN") {
        return Ok(path.into());
    }
    // The bench is in `release/deps`, `forebay` in `release`.
    let exe = std::env::current_exe()?;
    let beside = exe.ancestors().nth(2).map(|dir| dir.join("forebay"));
    beside.filter(|path| path.exists()).ok_or_else(|| "no forebay program: run `make bench`, or set FOREBAY_BIN".into())
}

/// A mount; it is unmounted when this value is dropped.
pub struct Mount {
    program: PathBuf,
    point: PathBuf,
    environment: Vec<(String, String)>,
}

impl Mount {
    /// Mounts `pool` at `point` with the fast pool `fast`.
    pub fn start(pool: &Path, point: &Path, fast: &Path, options: &[&str]) -> Result<Self> {
        fs::create_dir_all(pool)?;
        let url = pool.to_str().ok_or("a directory whose name is not UTF-8")?;
        Self::start_url(url, point, fast, options, &[])
    }

    /// The same for any kind of pool. `environment` has variables for the `forebay` commands, such as credentials.
    pub fn start_url(
        url: &str,
        point: &Path,
        fast: &Path,
        options: &[&str],
        environment: &[(&str, &str)],
    ) -> Result<Self> {
        let environment = environment.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
        let mount = Self { program: program()?, point: point.into(), environment };
        for dir in [point, fast] {
            fs::create_dir_all(dir)?;
        }
        mount.run(|forebay| forebay.arg("mount").arg(url).arg(point).arg("--fast").arg(fast).args(options))?;
        Ok(mount)
    }

    pub fn path(&self) -> &Path {
        &self.point
    }

    /// Stages everything below `path`.
    pub fn stage(&self, path: &Path) -> Result<()> {
        self.run(|forebay| forebay.arg("stage").arg(path)).map(drop)
    }

    /// Creates a scratch directory, and returns its path.
    pub fn make_scratch(&self, name: &str) -> Result<PathBuf> {
        let made =
            self.run(|forebay| forebay.args(["scratch", "create", "--job", name, "--mount"]).arg(&self.point))?;
        Ok(made.trim().into())
    }

    /// Commits a path of a scratch directory to a name in the mount.
    pub fn commit_scratch(&self, from: &Path, name: &str) -> Result<()> {
        self.run(|forebay| forebay.args(["scratch", "commit"]).arg(from).arg(self.point.join(name))).map(drop)
    }

    pub fn discard_scratch(&self, dir: &Path) -> Result<()> {
        self.run(|forebay| forebay.args(["scratch", "discard"]).arg(dir)).map(drop)
    }

    /// Stages a name in the mount, and shows it as a view.
    pub fn make_view(&self, name: &str) -> Result<()> {
        self.run(|forebay| forebay.args(["stage", "--view"]).arg(self.point.join(name))).map(drop)
    }

    pub fn end_view(&self, name: &str) -> Result<()> {
        self.run(|forebay| forebay.args(["view", "end"]).arg(self.point.join(name))).map(drop)
    }

    /// Flushes everything and waits, so that no flush runs during the next measurement.
    pub fn settle(&self) -> Result<()> {
        self.run(|forebay| forebay.arg("flush").arg("--wait").arg(&self.point)).map(drop)
    }

    /// Returns the bytes that the daemon has sent to the pool.
    pub fn pool_written_bytes(&self) -> Result<u64> {
        let status: serde_json::Value = serde_json::from_str(&self.status()?)?;
        Ok(status["status"]["counters"]["pool_written_bytes"]
            .as_u64()
            .ok_or("forebay status does not tell what it has sent")?)
    }

    /// Returns the seconds of processor time that the daemon has used.
    pub fn cpu_secs(&self) -> Result<f64> {
        let mut ticks = 0;
        for pid in self.processes()? {
            let stat = fs::read_to_string(format!("/proc/{pid}/stat"))?;
            // The name may contain any character. After its closing `)`, utime and stime are the 12th and 13th fields.
            let fields: Vec<&str> = stat.rsplit_once(')').map_or("", |(_, rest)| rest).split_whitespace().collect();
            for at in [11, 12] {
                ticks += fields.get(at).ok_or("a short /proc/PID/stat")?.parse::<u64>()?;
            }
        }
        // SAFETY: takes and returns numbers.
        let hz = unsafe { libc::sysconf(libc::_SC_CLK_TCK) };
        Ok(ticks as f64 / hz as f64)
    }

    /// Returns the sum of the peak resident set sizes of the daemon's processes.
    pub fn peak_rss_bytes(&self) -> Result<u64> {
        let mut sum = 0;
        for pid in self.processes()? {
            let status = fs::read_to_string(format!("/proc/{pid}/status"))?;
            let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).ok_or("no VmHWM")?;
            sum += line.trim().trim_end_matches(" kB").parse::<u64>()? * 1024;
        }
        Ok(sum)
    }

    /// Returns the process ids of supervisor and worker.
    pub fn processes(&self) -> Result<Vec<u64>> {
        let state = self.state()?;
        let pids: Vec<u64> = ["supervisor", "worker"].iter().filter_map(|who| state[who]["pid"].as_u64()).collect();
        if pids.is_empty() { Err("forebay status names no process".into()) } else { Ok(pids) }
    }

    /// Kills the worker by SIGKILL, as in a crash.
    pub fn kill_worker(&self) -> Result<()> {
        let pid = self.state()?["worker"]["pid"].as_i64().and_then(|pid| i32::try_from(pid).ok());
        let pid = pid.ok_or("forebay status names no worker")?;
        // SAFETY: takes numbers.
        match unsafe { libc::kill(pid, libc::SIGKILL) } {
            0 => Ok(()),
            _ => Err(std::io::Error::last_os_error().into()),
        }
    }

    fn state(&self) -> Result<serde_json::Value> {
        let mut status: serde_json::Value = serde_json::from_str(&self.status()?)?;
        Ok(status["state"].take())
    }

    fn status(&self) -> Result<String> {
        self.run(|forebay| forebay.arg("status").arg("--json").arg(&self.point))
    }

    fn run(&self, arguments: impl FnOnce(&mut Command) -> &mut Command) -> Result<String> {
        let mut command = Command::new(&self.program);
        command.envs(self.environment.iter().map(|(name, value)| (name, value)));
        let output = arguments(&mut command).stdin(Stdio::null()).output()?;
        if !output.status.success() {
            return Err(format!("{command:?}: {}", String::from_utf8_lossy(&output.stderr)).into());
        }
        Ok(String::from_utf8(output.stdout)?)
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        let gone = self.run(|forebay| forebay.arg("umount").arg(&self.point));
        if gone.is_err() {
            let _ = self.run(|forebay| forebay.arg("umount").arg("--lazy").arg(&self.point));
        }
    }
}
