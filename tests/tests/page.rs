//! The page of a mount, in a real browser: what it shows, and that it needs no other host.
//!
//! The screenshots stay in `tmp` of Cargo's target directory, for a person to look at.

use std::fs;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use forebay_api::operator::Status;
use forebay_tests::cluster::{NodeAddress, addresses, peers_file};
use forebay_tests::http::get;
use forebay_tests::mount::{Mount, Options, Place};
use forebay_tests::process::{self, kill_group, wait_until};
use forebay_tests::servers::free_port;
use forebay_tests::webdriver::{BACKSPACE, ENTER, WebDriver};
use serde_json::{Value, json};

/// How long the page may take to show something.
const SOON: Duration = Duration::from_secs(120);
/// A name that would run a script if it were drawn as markup.
const HOSTILE: &str = "<img src=x onerror=\"document.title='taken over'\">";

/// A browser without a window, and its driver. Both end when it is dropped.
struct Browser {
    driver: Child,
    address: SocketAddr,
    /// The profile of the browser.
    _home: tempfile::TempDir,
    capabilities: Value,
}

impl Browser {
    fn start() -> Self {
        use std::os::unix::process::CommandExt;
        let home = tempfile::tempdir().unwrap();
        let port = free_port();
        let mut command = Command::new("chromedriver");
        command.arg(format!("--port={port}")).env("HOME", home.path()).process_group(0);
        let driver = process::spawn(command.stdout(Stdio::null()).stderr(Stdio::null()));
        let driver = driver.expect("chromedriver is there: packaging/deps test installs it");
        // A name that is not an address of the loopback device stands for nothing.
        let arguments = [
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--disable-background-networking",
            "--window-size=1440,2300",
            "--force-device-scale-factor=1",
            "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
            &format!("--user-data-dir={}", home.path().join("profile").display()),
        ];
        let capabilities = json!({ "goog:chromeOptions": { "args": arguments } });
        let address = ([127, 0, 0, 1], port).into();
        let browser = Self { driver, address, _home: home, capabilities };
        wait_until("the driver answers", || get(address, "/status", "").is_ok());
        browser
    }

    fn client(&self) -> WebDriver {
        WebDriver::start(self.address, &self.capabilities)
    }
}

impl Drop for Browser {
    fn drop(&mut self) {
        kill_group(self.driver.id());
        let _ = process::wait(&mut self.driver, Duration::from_secs(10));
    }
}

/// The page in a browser.
struct Page(WebDriver);

impl Page {
    fn run(&self, script: &str) -> Value {
        self.0.execute(script)
    }

    /// Returns the exact value of a number.
    fn exact(&self, id: &str) -> u64 {
        let value = self.run(&format!("return document.getElementById('{id}')?.value ?? '';"));
        value.as_str().and_then(|v| v.parse().ok()).unwrap_or_else(|| panic!("{id} shows {value}"))
    }

    fn wait(&self, what: &str, script: &str) {
        let deadline = Instant::now() + SOON;
        while self.run(script) != Value::Bool(true) {
            assert!(Instant::now() < deadline, "{what}: not within {SOON:?}\n{}", self.text());
            thread::sleep(Duration::from_millis(100));
        }
    }

    fn text(&self) -> String {
        self.run("return document.body.innerText;").as_str().unwrap_or_default().to_owned()
    }

    fn press(&self, key: &str) {
        self.0.type_keys(key);
    }

    fn save(&self, name: &str) {
        let picture = self.0.screenshot();
        let file = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
        fs::write(&file, picture).unwrap();
        println!("{}", file.display());
    }
}

/// Reads the files of a directory again and again, until it is dropped.
struct Reader {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Reader {
    fn start(dir: PathBuf) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = stop.clone();
        let thread = thread::spawn(move || {
            while !stopped.load(Ordering::Relaxed) {
                for file in fs::read_dir(&dir).into_iter().flatten().flatten() {
                    let _ = fs::read(file.path());
                    thread::sleep(Duration::from_millis(120));
                }
            }
        });
        Self { stop, thread: Some(thread) }
    }
}

impl Drop for Reader {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        let _ = self.thread.take().map(JoinHandle::join);
    }
}

/// A mount with something of everything that the page shows.
fn furnished() -> (Mount, SocketAddr) {
    let port = free_port();
    let mut options = Options::policy("[default]\nflush = \"manual\"\n");
    options.limit = Some("200M".into());
    options.throttle = Some("400MB/s,520ms".into());
    options.more = vec!["--metrics".into(), port.to_string()];
    let place = Place::new();
    // Nobody answers for the other member.
    let peers = peers_file(&place.at(""), &NodeAddress::new("this-node"), &addresses(1), "");
    options.more.extend(["--peers".into(), peers.display().to_string()]);
    for (dir, files, mib) in [("sets/train", 6, 6), ("sets/test", 4, 3), ("reference/genome", 2, 9), ("tools", 9, 1)] {
        fs::create_dir_all(place.pool().join(dir)).unwrap();
        for number in 0..files {
            fs::write(place.pool().join(format!("{dir}/part-{number:03}")), vec![number as u8 + 1; mib << 20]).unwrap();
        }
    }
    let mount = Mount::on(place, options);
    mount.forebay(["stage"], &[&mount.path("sets"), &mount.path("tools"), &mount.path("reference")]).ok();
    fs::create_dir(mount.path("results")).unwrap();
    for number in 0..12 {
        fs::write(mount.path(format!("results/run-{number:02}.out")), vec![7; 100_003 * (number + 1)]).unwrap();
    }
    fs::write(mount.path("results").join(HOSTILE.replace('/', "")), "x").unwrap();
    mount.forebay(["run", "--job", "train-17", "--", "cat"], &[&mount.path("sets/train/part-001")]).ok();
    (mount, ([127, 0, 0, 1], port).into())
}

/// Compares the numbers of the page with a status; the values that a page with a stale update would show differ.
fn assert_agrees(page: &Page, status: &Status) {
    let expected = [
        ("used-bytes", status.used_bytes),
        ("limit-bytes", status.limit_bytes),
        ("dirty-bytes", status.dirty_bytes),
        ("dirty-files", status.dirty_files),
        ("leased-bytes", status.leased_bytes),
        ("pool-read-bytes", status.counters.pool_read_bytes),
        ("pool-written-bytes", status.counters.pool_written_bytes),
    ];
    for (id, value) in expected {
        assert_eq!(page.exact(id), value, "{id}");
    }
    let size = page.run("return document.querySelector('#devices tbody data').value;");
    assert_eq!(size, status.fast[0].total_bytes.to_string());
}

/// SEMANTICS 103: "The page loads nothing from another host, and its numbers are those of `forebay status`."
#[test]
fn the_page_shows_what_status_says_and_follows_it() {
    let (mount, address) = furnished();
    let browser = Browser::start();
    let page = Page(browser.client());
    let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| shows(&page, &mount, address)));
    if let Err(failure) = outcome {
        page.save("page-failed.png");
        std::panic::resume_unwind(failure);
    }
    drop(page);
    drop(browser);
    mount.umount();
}

fn shows(page: &Page, mount: &Mount, address: SocketAddr) {
    page.0.goto(&format!("http://{address}/"));
    page.wait("updates come", "return Number(document.documentElement.dataset.updates) >= 3;");
    let dirty = mount.status();
    assert!(dirty.dirty_bytes > 1_000_000 && dirty.dirty_files > 12 && dirty.leased_bytes > 0, "{dirty:?}");
    let counted = format!("return document.getElementById('dirty-bytes').value === '{}';", dirty.dirty_bytes);
    page.wait("the census has the dirty files", &counted);
    assert_agrees(page, &dirty);

    // Nothing came from elsewhere, and nothing else was tried.
    let loaded = page.run("return performance.getEntriesByType('resource').map((entry) => entry.name);");
    let loaded: Vec<String> = serde_json::from_value(loaded).unwrap();
    assert!(loaded.len() >= 7, "{loaded:?}");
    assert!(loaded.iter().all(|name| name.starts_with(&format!("http://{address}/"))), "{loaded:?}");

    let text = page.text();
    for shown in ["pool up", "results/run-11.out", "train-17", "✓ healthy", "Read from fast pool", "page cache"] {
        assert!(text.contains(shown), "the page does not show {shown}:\n{text}");
    }
    assert!(text.contains("onerror"), "the hostile name is shown as text");
    assert_eq!(page.0.title(), format!("Forebay {}", mount.place.mnt().display()));
    page.wait("slow calls are shown", "return document.querySelectorAll('#slow tbody tr').length > 3;");

    page.wait("the members are shown", "return document.querySelectorAll('#peers tbody tr').length === 2;");
    page.wait("why one was passed over", "return document.getElementById('peers').innerText.includes('gone');");

    zooms(page, mount);
    page.0.click("#jobs button");
    page.wait("the files of the job", "return document.getElementById('job').innerText.includes('part-001');");

    // What happens is shown: something to see in the charts, in both themes.
    let reader = Reader::start(mount.path("sets/train"));
    pictures(page);
    drop(reader);

    page.press("p");
    page.wait("it is paused", "return document.getElementById('live').textContent === 'paused';");
    mount.flush();
    thread::sleep(Duration::from_secs(3));
    assert_eq!(page.exact("dirty-bytes"), dirty.dirty_bytes, "a paused page stays as it is");
    page.press("p");
    page.wait("the flush is shown", "return document.getElementById('dirty-bytes').value === '0';");
    assert!(page.text().contains("The pool has everything."));
    assert_agrees(page, &mount.status());

    // The page outlives a restart of the daemon.
    let worker = mount.worker();
    mount.kill_worker();
    mount.wait_for_other_worker(worker);
    let pid = format!("return document.getElementById('pid').textContent === '{}';", mount.worker().pid);
    page.wait("the next daemon is shown", &pid);
    assert_eq!(page.0.title(), format!("Forebay {}", mount.place.mnt().display()));
}

/// Goes down and up in the treemap, by mouse and by keyboard.
fn zooms(page: &Page, mount: &Mount) {
    page.wait("the treemap", "return document.querySelectorAll('#treemap .tile').length >= 4;");
    // A file system may count a block of its own to a file.
    let about = |bytes: u64| bytes..bytes + bytes / 100;
    let bytes = |name: &str| {
        let of = format!("return Number(document.querySelector('#treemap [data-name=\"{name}\"]').dataset.bytes);");
        page.run(&of).as_u64().unwrap()
    };
    assert!(about((6 * 6 + 4 * 3) << 20).contains(&bytes("sets")));
    assert!(about(18 << 20).contains(&bytes("reference")));
    let sum =
        "return [...document.querySelectorAll('#treemap .tile')].reduce((a, t) => a + Number(t.dataset.bytes), 0);";
    let sum = page.run(sum).as_u64();
    let total = page.run("return Number(document.querySelector('#treemap-note data').value);").as_u64();
    assert_eq!(sum, total);
    assert!(total.unwrap() <= mount.status().used_bytes);
    page.run("document.querySelector('#treemap [data-name=\"sets\"]').focus(); return true;");
    page.press(ENTER);
    page.wait("it shows sets", "return document.getElementById('crumbs').innerText.includes('sets');");
    assert!(about(12 << 20).contains(&bytes("test")));
    page.0.click("#treemap [data-name=train]");
    page.wait("it shows train", "return document.querySelectorAll('#treemap div.tile').length === 6;");
    page.press(BACKSPACE);
    page.press(BACKSPACE);
    page.wait("it shows the mount", "return !document.getElementById('crumbs').innerText.includes('sets');");
}

fn pictures(page: &Page) {
    page.wait("some history", "return Number(document.documentElement.dataset.updates) >= 25;");
    page.press("t");
    page.wait("the dark theme", "return document.documentElement.dataset.theme === 'dark';");
    page.wait("reads are shown", "return document.querySelector('#tiles').innerText.includes('MiB/s');");
    page.save("page-dark.png");
    page.press("t");
    page.wait("the light theme", "return document.documentElement.dataset.theme === 'light';");
    thread::sleep(Duration::from_secs(2));
    page.save("page-light.png");
    page.press("9");
    page.wait("the section of the peers", "return document.activeElement.id === 's9';");
    page.save("page-peers.png");
    page.press("?");
    page.wait("the keys", "return !document.getElementById('keys').hidden;");
    page.press("5");
    page.wait("the section of the dirty queue", "return document.activeElement.id === 's5';");
    let update_ms = page.run("return document.documentElement.dataset.updateMs;");
    println!("an update took {update_ms} ms of browser time");
}
