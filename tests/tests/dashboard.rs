//! `forebay top` on a terminal: what the screen shows, and what its keys do.

use std::fs;
use std::io::{Read, Write};
use std::num::NonZeroU16;
use std::os::unix::process::CommandExt;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::thread;

use forebay_tests::mount::{COMMAND, Mount, Options, content};
use forebay_tests::process::{Running, forebay, kill_group, wait, wait_until};

const ROWS: NonZeroU16 = NonZeroU16::new(40).unwrap();
const COLUMNS: NonZeroU16 = NonZeroU16::new(140).unwrap();

/// A program on a terminal of its own, which `script` gives it.
struct Terminal {
    child: Child,
    keys: ChildStdin,
    screen: Arc<Mutex<vt100::Parser>>,
}

impl Terminal {
    fn start(command: &str) -> Self {
        let sized = format!("stty rows {ROWS} cols {COLUMNS}; exec {command}");
        let mut script = Command::new("script");
        script.args(["--quiet", "--return", "--command", &sized, "/dev/null"]).env("TERM", "xterm-256color");
        script.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::inherit()).process_group(0);
        let mut child = script.spawn().expect("`script` of bsdutils");
        let (keys, mut shown) = (child.stdin.take().unwrap(), child.stdout.take().unwrap());
        let screen = Arc::new(Mutex::new(vt100::Parser::new(ROWS, COLUMNS, 0)));
        let parser = screen.clone();
        thread::spawn(move || {
            let mut bytes = [0; 4096];
            while let Ok(read @ 1..) = shown.read(&mut bytes) {
                parser.lock().unwrap().process(&bytes[..read]);
            }
        });
        Self { child, keys, screen }
    }

    fn press(&mut self, keys: &str) {
        self.keys.write_all(keys.as_bytes()).unwrap();
    }

    fn text(&self) -> String {
        self.screen.lock().unwrap().screen().contents()
    }

    #[track_caller]
    fn shows(&self, parts: &[&str]) {
        let begun = std::time::Instant::now();
        while !parts.iter().all(|part| self.text().contains(part)) {
            assert!(begun.elapsed() < COMMAND, "{parts:?} are not all on the screen:\n{}", self.text());
            thread::sleep(std::time::Duration::from_millis(20));
        }
    }

    fn is_restored(&self) -> bool {
        let parser = self.screen.lock().unwrap();
        !parser.screen().alternate_screen() && !parser.screen().hide_cursor()
    }

    fn line_with(&self, part: &str) -> String {
        self.text().lines().find(|line| line.contains(part)).unwrap_or_default().to_owned()
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        kill_group(self.child.id());
        let _ = self.child.wait();
    }
}

#[test]
fn the_dashboard_shows_jobs_files_and_dirty_files_and_obeys_its_keys() {
    let mount = Mount::new(Options::policy("[default]\nflush = \"manual\"\n"));
    for (seed, name) in ["often", "seldom"].into_iter().enumerate() {
        fs::write(mount.pool(name), content(seed as u64, 3_000_000)).unwrap();
    }
    let mut job = Command::new(forebay());
    job.args(["run", "--job", "busy", "--mount"]).arg(mount.place.mnt()).current_dir(mount.place.mnt());
    job.args(["--", "bash", "-euc", "while :; do cat often often often seldom >/dev/null; sleep 0.02; done"]);
    let running = Running::new(&mut job);
    fs::write(mount.path("not \x1b[31mred"), content(9, 70_000)).unwrap();
    let top = format!("{} top {} --interval 300ms", forebay().display(), mount.place.mnt().display());
    let mut terminal = Terminal::start(&top);
    terminal.shows(&[
        "throughput",
        "page cache",
        "fast pool",
        "calls to the pool",
        "jobs: 1",
        "busy",
        "(no job)",
        "quit",
    ]);
    terminal.shows(&[&mount.place.mnt().display().to_string(), "dirty 68.4 KiB"]);
    wait_until("the job is read from the page cache", || {
        let line = terminal.line_with("busy");
        line.contains("MiB") || line.contains("MB") || line.contains("GB")
    });

    // Files of the selected job; what is read most comes first.
    terminal.press("f");
    terminal.shows(&["files of job busy", "often", "seldom"]);
    wait_until("what is read most is first", || {
        let text = terminal.text();
        matches!((text.find("often"), text.find("seldom")), (Some(often), Some(seldom)) if often < seldom)
    });
    terminal.press("r");
    wait_until("the order is reversed", || {
        let text = terminal.text();
        text.contains("read/s ▲") && text.find("seldom") < text.find("often")
    });

    // A filter hides other rows until it is ended.
    terminal.press("/sel");
    terminal.shows(&["filter: sel_"]);
    wait_until("rows are filtered", || !terminal.text().contains("often"));
    terminal.press("\r\x1b");
    terminal.shows(&["often", "seldom", "quit"]);

    // What is not in the pool yet. A name cannot change the terminal.
    terminal.press("d");
    terminal.shows(&["not in the pool yet", "data", r"not \u{1b}[31mred"]);

    // Nothing changes while it is paused.
    terminal.press(" j");
    terminal.shows(&["PAUSED", "jobs: 1"]);
    // What was on its way to the screen is there by now.
    thread::sleep(std::time::Duration::from_millis(500));
    let line = terminal.line_with("busy");
    thread::sleep(std::time::Duration::from_secs(1));
    assert_eq!(terminal.line_with("busy"), line);
    terminal.press(" ");
    wait_until("it goes on", || terminal.line_with("busy") != line);

    // Without the mount, the last sample stays, and it is said that it is the last one.
    drop(running);
    mount.flush();
    mount.umount();
    terminal.shows(&["NO NEWER SAMPLE: it is not mounted any more", "(no job)"]);
    assert!(terminal.screen.lock().unwrap().screen().alternate_screen());
    terminal.press("q");
    assert_eq!(wait(&mut terminal.child, COMMAND).expect("it ends").code(), Some(0));
    wait_until("the terminal is as before", || terminal.is_restored());
}

#[test]
fn a_dashboard_without_a_mount_says_so_and_leaves_the_terminal_alone() {
    let mut terminal = Terminal::start(&format!("{} top /no/such/mount", forebay().display()));
    assert_ne!(wait(&mut terminal.child, COMMAND).expect("it ends").code(), Some(0));
    terminal.shows(&["/no/such/mount"]);
    assert!(!terminal.screen.lock().unwrap().screen().alternate_screen());
}

/// A signal ends it as `q` does: the terminal is usable again.
#[test]
fn a_dashboard_that_is_told_to_end_restores_the_terminal() {
    let mount = Mount::new(Options::default());
    let mut terminal = Terminal::start(&format!("{} top {}", forebay().display(), mount.place.mnt().display()));
    terminal.shows(&["throughput", "(no job)"]);
    assert!(terminal.screen.lock().unwrap().screen().alternate_screen());
    let script = terminal.child.id();
    let children = fs::read_to_string(format!("/proc/{script}/task/{script}/children")).unwrap();
    let [top] = children.split_whitespace().collect::<Vec<_>>()[..] else { panic!("children of script: {children}") };
    assert!(Command::new("kill").args(["-TERM", top]).status().unwrap().success());
    assert_eq!(wait(&mut terminal.child, COMMAND).expect("it ends").code(), Some(0));
    wait_until("the terminal is as before", || terminal.is_restored());
}
