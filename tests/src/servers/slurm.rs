//! Slurm on one machine: munged, slurmctld, and one slurmd for each node, with all their state in one directory.

pub mod directives;

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::time::Duration;

use super::started::{end, free_port, spawn, wait_until};
use crate::mount::Place;
use crate::process::{self, Answer, forebay};

const CALL: Duration = Duration::from_secs(180);

/// A controller and a node `n1`, perhaps also a node `n2`.
#[derive(Debug)]
pub struct Slurm {
    dir: PathBuf,
    munged: Child,
    controller: Option<Child>,
    node: Child,
    second: Option<SecondNode>,
}

/// A node with a mount table of its own. It has another fast pool, and another mount of the same pool, at the same paths.
#[derive(Debug)]
struct SecondNode {
    slurmd: Child,
    mountpoint: PathBuf,
}

/// What a second node does before its slurmd begins. PLACE is the directory of the place.
const SECOND_NODE: &str = "set -e
mount --make-rprivate /
umount --lazy PLACE/mnt
mkdir -p PLACE/fast-n2 PLACE/slurm/records PLACE/slurm/records-n2
chmod 701 PLACE/fast-n2
mount --bind PLACE/fast-n2 PLACE/fast
mount --bind PLACE/slurm/records-n2 PLACE/slurm/records
mount -t tmpfs -o mode=755 tmpfs /run/forebay
PROGRAM mount PLACE/pool PLACE/mnt --fast PLACE/fast --limit 2G --policy PLACE/policy.toml -o allow_other
exec slurmd -D -N n2 -f PLACE/slurm/slurm.conf";

/// The scripts that `packaging/slurm` has for a site.
const HOOKS: [&str; 3] = ["prolog", "epilog", "task-prolog"];

/// Logs what Slurm gives to the functions of `burst_buffer.lua`: a line for each call, with the number of arguments.
const LOG_CALLS: &str = r##"
for name, hook in pairs(_G) do
    if tostring(name):match("^slurm_bb_") then
        _G[name] = function(...)
            local file = io.open("LOG", "a")
            file:write(name:sub(10), " ", select("#", ...), "\n")
            file:close()
            return hook(...)
        end
    end
end
"##;

/// Returns the version of Slurm on this machine, such as `(24, 11)`.
pub fn version() -> (u32, u32) {
    let said = process::run(Command::new("slurmctld").arg("-V"), CALL).ok().out;
    let mut numbers = said.split(['.', ' ', '\n']).filter_map(|word| word.parse().ok());
    numbers.next().zip(numbers.next()).unwrap_or_else(|| panic!("no version: {said}"))
}

impl Slurm {
    /// Starts all daemons. Prolog, Epilog and TaskProlog are those of `packaging/slurm`, for the program under test and
    /// one mount. `within` limits the time of the first two.
    pub fn start(place: &Place, within: &str) -> Self {
        Self::start_with(place, within, false, false)
    }

    /// Like [`Self::start`], with `burst_buffer.lua` of `packaging/slurm`.
    pub fn with_burst_buffer(place: &Place, within: &str) -> Self {
        process::need(&["lua5.4"]);
        Self::start_with(place, within, true, false)
    }

    /// Like [`Self::with_burst_buffer`], with a second node, which mounts the pool of the place with its policy.
    pub fn with_two_nodes(place: &Place, within: &str) -> Self {
        process::need(&["lua5.4", "unshare", "nsenter"]);
        Self::start_with(place, within, true, true)
    }

    fn start_with(place: &Place, within: &str, has_burst_buffer: bool, has_second_node: bool) -> Self {
        let (dir, mount) = (&place.at("slurm"), &place.mnt());
        process::need(&["munged", "slurmctld", "slurmd", "sbatch"]);
        let make = |name: &str, mode: u32| {
            let path = dir.join(name);
            fs::create_dir_all(&path).unwrap();
            fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
        };
        make("", 0o755);
        ["munge", "state", "spool-n1", "spool-n2"].iter().for_each(|name| make(name, 0o755));
        // The output of jobs of all users.
        make("log", 0o777);
        // Every user can run it.
        let program = place.lend(&forebay());
        HOOKS.iter().for_each(|hook| write_hook(dir, hook, &program, mount, within));
        let key = dir.join("munge.key");
        fs::write(&key, crate::mount::content(std::process::id().into(), 128)).unwrap();
        fs::set_permissions(&key, fs::Permissions::from_mode(0o400)).unwrap();
        let mut munged = Command::new("munged");
        munged.args(["--foreground", "--force"]);
        for (option, file) in [
            ("key-file", "munge.key"),
            ("socket", "munge/socket"),
            ("pid-file", "munge/pid"),
            ("log-file", "log/munged"),
            ("seed-file", "munge/seed"),
        ] {
            munged.arg(format!("--{option}={}", dir.join(file).display()));
        }
        let log = dir.join("log/started");
        let munged = spawn(munged, &log);
        wait_until("munged", &log, || dir.join("munge/socket").exists());
        let mut text = configuration(dir, has_second_node);
        if has_burst_buffer {
            write_burst_buffer(dir, &program);
            text.push_str("BurstBufferType=burst_buffer/lua\n");
        }
        fs::write(dir.join("slurm.conf"), text).unwrap();
        let second = has_second_node.then(|| {
            let script = SECOND_NODE.replace("PROGRAM", &forebay().display().to_string());
            let script = script.replace("PLACE", place.at("").display().to_string().trim_end_matches('/'));
            let mut command = Command::new("unshare");
            command.args(["--mount", "sh", "-c", &script]);
            SecondNode { slurmd: spawn(command, &log), mountpoint: mount.clone() }
        });
        let node = spawn(slurmd(dir), &log);
        let mut slurm = Self { munged, controller: None, node, second, dir: dir.to_owned() };
        slurm.start_controller();
        slurm.wait_until_idle();
        slurm
    }

    pub fn start_controller(&mut self) {
        let mut command = Command::new("slurmctld");
        command.args(["-D", "-f"]).arg(self.dir.join("slurm.conf"));
        self.controller = Some(spawn(command, &self.dir.join("log/started")));
    }

    /// Makes the controller store what it knows of a job, and waits for that. It stores the start of a job only with the
    /// next change of another kind.
    pub fn store(&self, job: &str) {
        let begun = std::time::SystemTime::now();
        self.call("scontrol", &["update", &format!("jobid={job}"), "admincomment=stored"]).ok();
        let state = self.dir.join("state/job_state");
        let stored = || fs::metadata(&state).is_ok_and(|state| state.modified().is_ok_and(|at| at > begun));
        self.wait("the controller stores its state", stored);
    }

    /// `kill -9` of the controller.
    pub fn kill_controller(&mut self) {
        self.controller.as_mut().into_iter().for_each(end);
        self.controller = None;
    }

    /// Waits until the controller has stored that a job has a burst buffer. It does so every 30 s.
    pub fn store_burst_buffer(&self) {
        // Without burst buffers, it has two numbers.
        const EMPTY_BYTES: u64 = 6;
        let state = self.dir.join("state/burst_buffer_lua_state");
        let stored = || fs::metadata(&state).is_ok_and(|state| state.len() > EMPTY_BYTES);
        self.wait("the controller stores its burst buffers", stored);
    }

    /// Ends the controller, which stores its state.
    pub fn stop_controller(&mut self) {
        if let Some(controller) = &mut self.controller {
            let pid = rustix::process::Pid::from_child(controller);
            rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
            assert!(process::wait(controller, CALL).is_some(), "slurmctld does not end");
        }
        self.controller = None;
    }

    pub fn wait_until_idle(&self) {
        // Not `IDLE+COMPLETING`: an epilog runs.
        self.wait("the node is idle", || self.node().0 == "IDLE");
        if self.second.is_some() {
            self.wait("the second node is idle", || self.field("node", "n2", "State") == "IDLE");
        }
    }

    /// Runs the program under test on the second node.
    pub fn on_second_node(&self, arguments: &[&str]) -> Answer {
        let second = self.second.as_ref().expect("there is a second node");
        process::run(second.command().args(arguments), CALL)
    }

    /// Returns a command that finds this Slurm.
    pub fn command(&self, program: impl AsRef<std::ffi::OsStr>) -> Command {
        let mut command = Command::new(program);
        command.env("SLURM_CONF", self.dir.join("slurm.conf")).current_dir(&self.dir);
        command
    }

    /// Runs a program of Slurm.
    pub fn call(&self, program: &str, arguments: &[&str]) -> Answer {
        process::run(self.command(program).args(arguments), CALL)
    }

    /// Submits a job that runs a script of the shell. Returns its number.
    #[track_caller]
    pub fn submit(&self, options: &[&str], script: &str) -> String {
        self.try_submit(options, script).ok().out.trim().to_owned()
    }

    /// Returns what sbatch says.
    pub fn try_submit(&self, options: &[&str], script: &str) -> Answer {
        let file = self.dir.join("script");
        fs::write(&file, format!("#!/bin/bash\n{script}\n")).unwrap();
        let output = format!("--output={}/log/job-%j", self.dir.display());
        let mut arguments = vec!["--parsable", output.as_str()];
        arguments.extend(options);
        arguments.push(file.to_str().unwrap());
        self.call("sbatch", &arguments)
    }

    /// Returns what the processes of a job have printed.
    pub fn output(&self, job: &str) -> String {
        fs::read_to_string(self.dir.join(format!("log/job-{job}"))).unwrap_or_default()
    }

    /// Returns a field of `scontrol show`, or an empty text.
    pub fn field(&self, kind: &str, name: &str, field: &str) -> String {
        let shown = self.call("scontrol", &["show", kind, name]).out;
        let value = shown.split_whitespace().find_map(|word| word.strip_prefix(field)?.strip_prefix('='));
        value.unwrap_or_default().to_owned()
    }

    /// Returns the state of a job, such as `COMPLETED`.
    pub fn job(&self, job: &str) -> String {
        self.field("job", job, "JobState")
    }

    /// Returns the state of the node, and the reason why it is drained.
    pub fn node(&self) -> (String, String) {
        (self.field("node", "n1", "State"), self.field("node", "n1", "Reason"))
    }

    #[track_caller]
    pub fn wait_for(&self, job: &str, state: &str) {
        self.wait(&format!("job {job} is {state}"), || self.job(job) == state);
    }

    /// Waits until a job has completed and its epilog, too.
    #[track_caller]
    pub fn completed(&self, job: &str) {
        self.wait_for(job, "COMPLETED");
        self.wait_until_idle();
    }

    /// Waits until something holds. Shows the logs if it does not.
    #[track_caller]
    pub fn wait(&self, what: &str, mut holds: impl FnMut() -> bool) {
        let begun = std::time::Instant::now();
        while !holds() {
            assert!(begun.elapsed() < CALL, "{what}: not within {CALL:?}\n{}", self.log());
            std::thread::sleep(Duration::from_millis(100));
        }
    }

    /// Returns what all daemons and hooks have logged.
    pub fn log(&self) -> String {
        let logs = ["started", "slurmctld", "slurmd-n1", "slurmd-n2", "hooks", "job-1", "job-2", "job-3"]
            .map(|name| self.dir.join("log").join(name));
        logs.map(|log| fs::read_to_string(log).unwrap_or_default()).join("\n")
    }

    /// Returns a field of a job, such as `SystemComment`, with all its words.
    pub fn line(&self, job: &str, field: &str) -> String {
        let shown = self.call("scontrol", &["show", "job", job]).out;
        let value = shown.lines().find_map(|line| line.trim().strip_prefix(field)?.strip_prefix('='));
        value.unwrap_or_default().to_owned()
    }

    /// Returns the directory that the controller and the nodes see.
    pub fn exchange(&self) -> PathBuf {
        self.dir.join("exchange")
    }

    /// Makes calls of the plugin, such as `data-in`, wait until [`Self::release`].
    pub fn hold(&self, call: &str) {
        fs::write(self.dir.join(format!("hold-{call}")), "").unwrap();
    }

    /// Returns whether a call of the plugin has begun to wait.
    pub fn is_held(&self, call: &str) -> bool {
        self.dir.join(format!("held-{call}")).exists()
    }

    pub fn release(&self, call: &str) {
        fs::remove_file(self.dir.join(format!("hold-{call}"))).unwrap();
    }

    /// Returns the functions of the plugin that Slurm has called, each with the number of its arguments.
    pub fn plugin_calls(&self) -> BTreeMap<String, usize> {
        let log = fs::read_to_string(self.dir.join("log/calls")).unwrap_or_default();
        let calls = log.lines().filter_map(|line| line.split_once(' '));
        calls.map(|(name, arguments)| (name.to_owned(), arguments.parse().unwrap())).collect()
    }

    /// Rewrites the scripts of jobs by `job_submit.lua` of `packaging/slurm`. Starts the controller again.
    pub fn rewrite_submissions(&mut self) {
        fs::copy(packaged("job_submit.lua"), self.dir.join("job_submit.lua")).unwrap();
        let config = self.dir.join("slurm.conf");
        let text = fs::read_to_string(&config).unwrap();
        fs::write(&config, format!("{text}JobSubmitPlugins=lua\n")).unwrap();
        self.kill_controller();
        self.start_controller();
        self.wait_until_idle();
    }

    /// Returns what prologs and epilogs have said.
    pub fn hooks(&self) -> String {
        fs::read_to_string(self.dir.join("log/hooks")).unwrap_or_default()
    }
}

impl Slurm {
    /// Returns the processes of steps that have outlived slurmd: they work in its spool directory.
    fn steps(&self) -> Vec<rustix::process::Pid> {
        let is_ours = |pid: &u32| {
            let of = |name: &str| PathBuf::from(format!("/proc/{pid}/{name}"));
            let name = fs::read_to_string(of("comm")).unwrap_or_default();
            let environment = fs::read(of("environ")).unwrap_or_default();
            let is_here = fs::read_link(of("cwd")).is_ok_and(|dir| dir.starts_with(&self.dir));
            let names_us = String::from_utf8_lossy(&environment).contains(&self.dir.display().to_string());
            name.trim() == "slurmstepd" && (is_here || names_us)
        };
        let all = forebay_system::process::all().filter(is_ours);
        all.filter_map(|pid| rustix::process::Pid::from_raw(pid as i32)).collect()
    }
}

impl Drop for Slurm {
    fn drop(&mut self) {
        if self.controller.is_some() {
            self.call("scancel", &["--user=root", "--signal=KILL", "--full"]);
            self.call("scancel", &["--user=root"]);
        }
        // slurmd ends after its epilogs; steps are no children of it.
        let _ =
            rustix::process::kill_process(rustix::process::Pid::from_child(&self.node), rustix::process::Signal::TERM);
        process::wait(&mut self.node, Duration::from_secs(20));
        self.second.iter_mut().for_each(SecondNode::stop);
        end(&mut self.node);
        self.kill_controller();
        end(&mut self.munged);
        for step in self.steps() {
            let _ = rustix::process::kill_process(step, rustix::process::Signal::KILL);
        }
    }
}

impl SecondNode {
    /// Returns a command that runs the program under test where this node sees its mounts.
    fn command(&self) -> Command {
        let mut command = Command::new("nsenter");
        let of = |name: &str| format!("/proc/{}/{name}", self.slurmd.id());
        // The tests may run in another root directory than that of the namespace.
        command.arg(format!("--mount={}", of("ns/mnt"))).arg(format!("--root={}", of("root"))).arg(forebay());
        command
    }

    fn stop(&mut self) {
        // The mount is in the namespace of slurmd.
        process::run(self.command().arg("umount").arg(&self.mountpoint), CALL);
        end(&mut self.slurmd);
    }
}

fn slurmd(dir: &Path) -> Command {
    let mut command = Command::new("slurmd");
    command.args(["-D", "-N", "n1", "-f"]).arg(dir.join("slurm.conf"));
    command
}

fn packaged(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../packaging/slurm").join(name)
}

/// Writes a script of `packaging/slurm`, changed to run the program under test at one mount, and to log what it says.
fn write_hook(dir: &Path, hook: &str, program: &Path, mount: &Path, within: &str) {
    let mut text = fs::read_to_string(packaged(hook)).unwrap();
    let mut replace = |what: &str, by: String| {
        assert!(text.contains(what), "{hook} has no `{what}`");
        text = text.replace(what, &by);
    };
    replace("PATH=/usr/local/bin", format!("PATH={}", program.parent().unwrap().display()));
    let mount = mount.display();
    match hook {
        "task-prolog" => replace(
            "slurm task-prolog",
            format!(
                "slurm task-prolog --mount {mount} --exchange {} --records {}",
                dir.join("exchange").display(),
                dir.join("records").display()
            ),
        ),
        _ => {
            let (log, records) = (dir.join("log/hooks"), dir.join("records"));
            let own = format!("--exchange {} --records {}", dir.join("exchange").display(), records.display());
            replace("--within 20s", format!("--within {within} --mount {mount} {own} >>{} 2>&1", log.display()));
        }
    }
    let path = dir.join(hook);
    fs::write(&path, text).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
}

/// Writes the plugin of `packaging/slurm`, changed to run the program under test, to log its calls, and to wait if a test
/// holds a call.
fn write_burst_buffer(dir: &Path, program: &Path) {
    let caller = dir.join("caller");
    // The arguments are `slurm bb CALL ...`.
    let script = format!(
        "#!/bin/sh\n[ ! -e {at}/hold-$3 ] || touch {at}/held-$3\nwhile [ -e {at}/hold-$3 ]; do sleep .1; done\n\
        exec {program} \"$@\"\n",
        at = dir.display(),
        program = program.display()
    );
    fs::write(&caller, script).unwrap();
    fs::set_permissions(&caller, fs::Permissions::from_mode(0o755)).unwrap();
    let copy = |name: &str, changes: &[(&str, String)]| {
        let mut text = fs::read_to_string(packaged(name)).unwrap();
        for (what, by) in changes {
            assert!(text.contains(what), "{name} has no `{what}`");
            text = text.replace(what, by);
        }
        fs::write(dir.join(name), text).unwrap();
    };
    let log = LOG_CALLS.replace("LOG", &dir.join("log/calls").display().to_string());
    copy(
        "burst_buffer.lua",
        &[
            ("forebay = \"/usr/bin/forebay\"", format!("forebay = \"{}\"", caller.display())),
            ("exchange = \"/var/spool/forebay/slurm\"", format!("exchange = \"{}\"", dir.join("exchange").display())),
            ("\nreturn {", format!("{log}\nreturn {{")),
        ],
    );
    // Slurm 22.05 refuses to start with it.
    let poll = if version() >= (24, 11) { "PollInterval=1" } else { "#PollInterval=10" };
    copy("burst_buffer.conf", &[("#PollInterval=10", poll.to_owned())]);
}

fn configuration(dir: &Path, has_second_node: bool) -> String {
    let host = rustix::system::uname().nodename().to_string_lossy().into_owned();
    let host = host.split('.').next().unwrap_or("localhost").to_owned();
    let (controller, node, second) = (free_port(), free_port(), free_port());
    let at = dir.display();
    let size = "CPUs=2 RealMemory=1000 State=UNKNOWN";
    let other = match has_second_node {
        true => format!("NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={second} {size}\n"),
        false => String::new(),
    };
    format!(
        "ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={at}/munge/socket,cred_expire=5
CredType=cred/munge
StateSaveLocation={at}/state
SlurmdSpoolDir={at}/spool-%n
SlurmctldPidFile={at}/slurmctld.pid
SlurmdPidFile={at}/slurmd-%n.pid
SlurmctldLogFile={at}/log/slurmctld
SlurmdLogFile={at}/log/slurmd-%n
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=batch_sched_delay=0,sched_interval=1,bf_interval=1
MpiDefault=none
ReturnToService=2
KillWait=2
MinJobAge=600
PrologFlags=Alloc
Prolog={at}/prolog
Epilog={at}/epilog
TaskProlog={at}/task-prolog
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={node} CPUs=2 RealMemory=1000 State=UNKNOWN
{other}PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"
    )
}
