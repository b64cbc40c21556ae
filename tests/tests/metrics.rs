//! Metrics, as Prometheus gets them from a real mount.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::io::Read;
use std::net::{SocketAddr, TcpListener};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use forebay_tests::http::{exchange, get, get_until};
use forebay_tests::mount::{COMMAND, Mount, Options, Place, attempt};
use forebay_tests::process::{self, wait_until};
use forebay_tests::servers::free_port;

const USAGE: i32 = 2;
const BUSY: i32 = 6;
/// How long an announced change may take: more than the pause of the census.
const SOON: Duration = Duration::from_secs(120);
const NOBODY: u32 = 65_534;

fn loopback(port: u16) -> SocketAddr {
    ([127, 0, 0, 1], port).into()
}

/// A mount that is flushed by request alone, with metrics at a port of the loopback device.
fn with_metrics() -> (Mount, SocketAddr) {
    let port = free_port();
    let mut options = Options::policy("[default]\nflush = \"manual\"\n");
    options.more = vec!["--metrics".into(), port.to_string()];
    (Mount::new(options), loopback(port))
}

fn scrape(address: SocketAddr) -> String {
    let answer = get(address, "/metrics", "").expect("the metrics address answers");
    assert_eq!(answer.status, 200, "{answer:?}");
    assert!(answer.head.contains("content-type: text/plain; version=0.0.4"), "{}", answer.head);
    answer.body
}

/// Returns the values of all samples, by name and labels.
fn samples(text: &str) -> BTreeMap<String, f64> {
    let lines = text.lines().filter(|line| !line.starts_with('#'));
    let sample = |line: &str| {
        let (name, value) = line.rsplit_once(' ').unwrap_or_else(|| panic!("not a sample: {line}"));
        (name.to_owned(), value.parse().unwrap_or_else(|_| panic!("not a number: {line}")))
    };
    lines.map(sample).collect()
}

/// Returns name and type of each exported family.
fn families(text: &str) -> BTreeSet<(String, String)> {
    let types = text.lines().filter_map(|line| line.strip_prefix("# TYPE ")?.split_once(' '));
    types.map(|(name, kind)| (name.to_owned(), kind.to_owned())).collect()
}

/// SEMANTICS 102: "No metric has a job, a user or a path as a label."
#[test]
fn the_document_lists_what_a_daemon_exports_and_nothing_else() {
    let (mount, address) = with_metrics();
    fs::write(mount.path("secret-name"), "x").unwrap();
    mount.forebay(["run", "--job", "secret-job", "--", "cat"], &[&mount.path("secret-name")]).ok();
    let text = scrape(address);
    let page = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().join("docs/METRICS.md");
    let page = fs::read_to_string(page).unwrap();
    let mut listed = BTreeSet::new();
    let mut labels_of = BTreeMap::new();
    for line in page.lines().filter(|line| line.starts_with("| `forebay_")) {
        let cells: Vec<&str> = line.trim_matches('|').split('|').map(str::trim).collect();
        let name = cells[0].trim_matches('`').to_owned();
        let labels: BTreeSet<String> = cells[2].split(", ").map(|l| l.trim_matches('`').to_owned()).collect();
        labels_of.insert(name.clone(), labels);
        assert!(listed.insert((name, cells[1].to_owned())), "{line} is there twice");
    }
    assert!(listed.len() > 40, "only {} metrics are listed", listed.len());
    assert_eq!(families(&text), listed, "exported, and listed in docs/METRICS.md");
    for sample in samples(&text).keys() {
        let (name, rest) = sample.split_once('{').unwrap_or((sample, ""));
        let family = ["_bucket", "_sum", "_count"].iter().find_map(|end| name.strip_suffix(end)).unwrap_or(name);
        let labels = rest.trim_end_matches('}').split(',').filter_map(|label| Some(label.split_once('=')?.0));
        let expected = labels_of.get(family).unwrap_or_else(|| panic!("{sample} is of no family"));
        for label in labels.filter(|label| *label != "le") {
            assert!(expected.contains(label), "{sample}: the label is not listed");
            assert!(!["job", "user", "path", "uid"].contains(&label), "{sample}");
        }
    }
    for secret in ["secret", mount.place.mnt().to_str().unwrap()] {
        assert!(!text.contains(secret), "a scrape contains {secret}");
    }
}

#[test]
fn promtool_finds_nothing_to_complain_of() {
    let (mount, address) = with_metrics();
    fs::write(mount.path("f"), "x").unwrap();
    let scraped = mount.place.at("scraped");
    fs::write(&scraped, scrape(address)).unwrap();
    let mut check = Command::new("sh");
    check.args(["-c", "promtool check metrics <\"$0\""]).arg(&scraped);
    let answer = process::run(&mut check, COMMAND).ok();
    assert!(answer.out.trim().is_empty() && answer.err.trim().is_empty(), "{answer}");
}

#[test]
fn numbers_follow_what_happens() {
    const BYTES: usize = 3 << 20;
    let (mount, address) = with_metrics();
    fs::write(mount.pool("in-pool"), vec![1; BYTES]).unwrap();
    fs::write(mount.pool("big"), vec![2; 16 << 20]).unwrap();
    let before = samples(&scrape(address));
    assert_eq!(fs::read(mount.path("in-pool")).unwrap().len(), BYTES);
    // Not fetched whole: its reads go through the daemon.
    let mut buffer = [0; 4096];
    File::open(mount.path("big")).unwrap().read_exact_at(&mut buffer, 1 << 20).unwrap();
    fs::write(mount.path("dirty"), vec![3; 5000]).unwrap();
    wait_until("the dirty file is counted", || samples(&scrape(address))["forebay_dirty_bytes"] == 5000.0);
    let after = samples(&scrape(address));
    let grown = |name: &str| after[name] - before[name];
    assert!(grown("forebay_fetched_bytes_total") >= (BYTES + 4096) as f64);
    assert_eq!(grown("forebay_pool_bytes_total{direction=\"read\"}"), grown("forebay_fetched_bytes_total"));
    assert!(grown("forebay_read_bytes_total{source=\"fetched\"}") >= 4096.0);
    assert!(grown("forebay_reads_total{source=\"fetched\"}") >= 1.0);
    assert!(grown("forebay_pool_calls_total{call=\"read\",outcome=\"ok\"}") >= 2.0);
    assert!(grown("forebay_pool_call_duration_seconds_count{call=\"read\"}") >= 2.0);
    assert!(grown("forebay_fuse_request_duration_seconds_count{operation=\"open\"}") >= 2.0);
    assert!(grown("forebay_fuse_request_duration_seconds_bucket{operation=\"open\",le=\"+Inf\"}") >= 2.0);
    // The directory's times are one more.
    assert_eq!((after["forebay_pool_up"], after["forebay_dirty_files"]), (1.0, mount.status().dirty_files as f64));
    assert_eq!(after["forebay_device_state{device=\"0\",state=\"healthy\"}"], 1.0);

    mount.forebay(["stage"], &[&mount.path("big")]).ok();
    mount.flush();
    wait_until("the lease is counted", || samples(&scrape(address))["forebay_leased_files"] == 1.0);
    mount.forebay(["release"], &[&mount.path("big")]).ok();
    mount.forebay(["evict"], &[&mount.path("in-pool")]).ok();
    wait_until("the lease is gone", || samples(&scrape(address))["forebay_leased_bytes"] == 0.0);
    wait_until("nothing is dirty", || samples(&scrape(address))["forebay_dirty_files"] == 0.0);
    let last = samples(&scrape(address));
    let status = mount.status();
    assert_eq!(last["forebay_evictions_total{reason=\"request\"}"], 1.0);
    assert!(last["forebay_evicted_bytes_total{reason=\"request\"}"] >= BYTES as f64);
    assert_eq!(last["forebay_flushed_bytes_total"], 5000.0);
    assert_eq!(last["forebay_fast_pool_used_bytes"], status.used_bytes as f64);
    assert_eq!(last["forebay_fast_pool_limit_bytes"], status.limit_bytes as f64);
    assert_eq!(last["forebay_fetched_bytes_total"], status.counters.pool_read_bytes as f64);
}

/// SEMANTICS 101: "A scrape reads no records of files: what is dirty and leased is as of a census, which is made only if
/// something has changed."
#[test]
fn scrapes_count_nothing_anew_while_nothing_changes() {
    let (mount, address) = with_metrics();
    for number in 0..100 {
        fs::write(mount.path(format!("f{number}")), "dirty").unwrap();
    }
    wait_until("all files are counted", || {
        let files = mount.status().dirty_files;
        files >= 100 && samples(&scrape(address))["forebay_dirty_files"] == files as f64
    });
    let counted = || samples(&scrape(address))["forebay_census_timestamp_seconds"];
    // A census of the last changes may still be due.
    wait_until("scrapes without a census", || {
        let first = counted();
        (0..40).all(|_| {
            std::thread::sleep(Duration::from_millis(100));
            counted() == first
        })
    });
    let oldest = samples(&scrape(address))["forebay_dirty_oldest_seconds"];
    assert!(oldest >= 4.0, "ages grow without a census: {oldest}");
}

/// SEMANTICS 100: "A mount whose metrics address cannot be listened on is refused, and the message names the reason. A
/// mount that serves goes on without its metrics address if another program took it over a restart of the daemon, and
/// serves it again once it is free."
#[test]
fn an_address_that_is_taken_refuses_a_mount_and_not_a_restart() {
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap();
    let place = Place::new();
    let options = Options { more: vec!["--metrics".into(), address.port().to_string()], ..Options::default() };
    attempt(&place, &options).refused(BUSY, &[&address.to_string(), "another program listens there", "--metrics PORT"]);
    assert!(!forebay_daemon::mounts::is_ours(&place.mnt()));
    drop(taken);
    for (bad, why) in [("80", "1024"), ("example", "ADDRESS:PORT"), ("192.0.2.1:9464", "does not have the address")] {
        let options = Options { more: vec!["--metrics".into(), bad.into()], ..Options::default() };
        attempt(&place, &options).refused(USAGE, &[bad, why]);
    }

    let mount = Mount::on(place, options);
    fs::write(mount.path("f"), "x").unwrap();
    scrape(address);
    let worker = mount.worker();
    mount.kill_worker();
    mount.wait_for_other_worker(worker);
    wait_until("the next worker serves the address", || get(address, "/metrics", "").is_ok());

    // A worker that is stopped cannot answer, and one that is killed leaves its port to whoever is first.
    let (worker, state) = (mount.worker(), mount.state());
    let signal = |pid: u32, signal| assert_eq!(unsafe { libc::kill(pid.cast_signed(), signal) }, 0);
    signal(state.supervisor.pid, libc::SIGSTOP);
    mount.kill_worker();
    let squatter = TcpListener::bind(address);
    signal(state.supervisor.pid, libc::SIGCONT);
    let squatter = squatter.expect("the port is free");
    mount.wait_for_other_worker(worker);
    assert_eq!(fs::read_to_string(mount.path("f")).unwrap(), "x");
    assert!(mount.log().contains("another program listens there"), "{}", mount.log());
    drop(squatter);
    wait_until("the address is served once it is free", || get(address, "/metrics", "").is_ok());
    mount.umount();
    assert!(get(address, "/metrics", "").is_err(), "nothing listens after the unmount");
}

/// SEMANTICS 99: "A mount without `--metrics` listens on no network address. A port without an address is one of the
/// loopback device."
#[test]
fn nothing_listens_unless_it_is_asked_for_and_a_port_is_local() {
    let listening = |mount: &Mount| {
        let answer = process::run(Command::new("ss").args(["-Hltnp"]), COMMAND).ok();
        let pid = format!("pid={},", mount.worker().pid);
        let of_worker = answer.out.lines().filter(|line| line.contains(&pid));
        of_worker.filter_map(|line| line.split_whitespace().nth(3).map(str::to_owned)).collect::<Vec<_>>()
    };
    assert_eq!(listening(&Mount::new(Options::default())), [""; 0]);
    let (mount, address) = with_metrics();
    assert_eq!(listening(&mount), [address.to_string()]);
    // As in fstab.
    let port = free_port();
    let options = Options { more: vec!["-o".into(), format!("metrics=[::1]:{port}")], ..Options::default() };
    let mount = Mount::new(options);
    assert_eq!(listening(&mount), [format!("[::1]:{port}")]);
    assert!(mount.state().command.contains(&format!("--metrics [::1]:{port}")), "{}", mount.state().command);
}

#[test]
fn each_pool_of_a_mixed_root_has_an_address_of_its_own() {
    let place = Place::new();
    let (first, second) = (free_port(), free_port());
    let describe = |a: u16, b: u16| {
        let text = format!(
            "[[pool]]\nname = \"a\"\nurl = \"pool\"\nmetrics = \"{a}\"\n\
             [[pool]]\nname = \"b\"\nurl = \"native\"\nmetrics = \"{b}\"\n"
        );
        fs::write(place.at("forebay.toml"), text).unwrap();
    };
    let mount = |more: &[&str]| {
        let mut command = Command::new(process::forebay());
        command.args(["mount", "--config"]).arg(place.at("forebay.toml")).arg(place.mnt());
        command.arg("--fast").arg(place.fast()).args(["--limit", "1G"]).args(more);
        process::run(&mut command, COMMAND)
    };
    describe(first, first);
    mount(&[]).refused(USAGE, &["same metrics address", "a port of its own"]);
    describe(first, second);
    mount(&["--metrics", "9464"]).refused(USAGE, &["--metrics", "[[pool]]"]);
    mount(&[]).ok();
    for port in [first, second] {
        assert!(scrape(loopback(port)).contains("forebay_pool_up 1"));
    }
    process::run(Command::new(process::forebay()).arg("umount").arg(place.mnt()), COMMAND).ok();
}

/// SEMANTICS 104: "On a loopback address, names of files and jobs are shown to root and the user who mounted alone, and
/// to no page of another site."
#[test]
fn names_are_for_root_and_the_user_who_mounted() {
    let (mount, address) = with_metrics();
    fs::create_dir(mount.path("secret-dir")).unwrap();
    fs::write(mount.path("secret-dir/f"), "x").unwrap();
    let ask_as = |user: u32, path: &str| {
        let mut command = Command::new("setpriv");
        let id = user.to_string();
        command.args([
            "--reuid",
            &id,
            "--regid",
            &id,
            "--clear-groups",
            "curl",
            "-sS",
            "-m",
            "5",
            "-w",
            "\n%{http_code}",
        ]);
        let answer = process::run(command.arg(format!("http://{address}{path}")), COMMAND);
        answer.out
    };
    for path in ["/events", "/resident?path=", "/job?id=a"] {
        let said = ask_as(NOBODY, path);
        assert!(said.ends_with("403") && !said.contains("secret"), "{path}: {said}");
    }
    assert!(ask_as(NOBODY, "/metrics").ends_with("200"));
    assert!(ask_as(NOBODY, "/").ends_with("200"), "the page itself has no names");
    wait_until("the file counts as resident", || ask_as(0, "/resident?path=").contains("secret-dir"));
    let update = get_until(address, "/events", |text| text.contains("\n\n") && text.contains("secret-dir"));
    assert!(update.unwrap().contains("text/event-stream"));

    // Of a page whose name was made to stand for 127.0.0.1.
    let foreign = get(address, "/resident?path=", "Host: evil.example:9464\r\n").unwrap();
    assert!(foreign.status == 421 && !foreign.body.contains("secret"), "{foreign:?}");
    assert_eq!(get(address, "/metrics", "Host: localhost:9464\r\n").unwrap().status, 200);
}

#[test]
fn bad_requests_are_refused() {
    let (mount, address) = with_metrics();
    let status = |path: &str| get(address, path, "").unwrap().status;
    assert_eq!(status("/healthz"), 200);
    for path in ["/none", "/page.rs", "/..%2fmetrics", "/%00", "//metrics"] {
        assert_eq!(status(path), 404, "{path}");
    }
    for path in ["/resident", "/resident?path=%ff", "/resident?path=..", "/resident?path=a%00b", "/job", "/job?job=1"] {
        assert_eq!(status(path), 400, "{path}");
    }
    assert_eq!((status("/resident?path=none"), status("/job?id=none")), (404, 404));
    let posted = exchange(
        address,
        "POST /metrics HTTP/1.1\r\nHost: localhost\r\nContent-Length: 0\r\nConnection: close\r\n\r\n",
    );
    let posted = posted.unwrap();
    assert!(posted.status == 405 && posted.head.contains("allow: get, head"), "{posted:?}");
    let long = "a".repeat(200 << 10);
    assert!(get(address, &format!("/resident?path={long}"), "").map_or(true, |answer| answer.status >= 400));
    // Clients that send nothing, or half a request, do not keep others from being answered.
    let idle: Vec<_> = (0..20).map(|_| std::net::TcpStream::connect(address).unwrap()).collect();
    assert_eq!(status("/metrics"), 200);
    drop(idle);
    mount.umount();
}

#[test]
fn an_open_page_does_not_delay_the_unmount() {
    let (mount, address) = with_metrics();
    let mut page = Command::new("curl");
    page.args(["-sN", "-m", "60"]).arg(format!("http://{address}/events")).stdout(Stdio::piped());
    let mut page = process::spawn(&mut page).unwrap();
    let mut first = [0; 5];
    page.stdout.as_mut().unwrap().read_exact(&mut first).unwrap();
    assert_eq!(&first, b"data:");
    mount.umount();
    assert!(process::wait(&mut page, SOON).is_some(), "the answer ends with the mount");
}

/// Returns the words of a text that are names of metrics, without the endings of samples of histograms.
fn metrics_in(text: &str) -> BTreeSet<String> {
    let words = text.split(|c: char| !c.is_ascii_alphanumeric() && c != '_');
    let names = words.filter(|word| word.starts_with("forebay_"));
    names.map(|name| name.strip_suffix("_bucket").unwrap_or(name).to_owned()).collect()
}

#[test]
fn the_packaged_alerts_fire_and_the_dashboard_names_what_exists() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    let rules = root.join("packaging/prometheus");
    for words in [["check", "rules", "forebay.rules.yml"], ["test", "rules", "forebay.rules.test.yml"]] {
        process::run(Command::new("promtool").args(words).current_dir(&rules), COMMAND).ok();
    }
    let listed = metrics_in(&fs::read_to_string(root.join("docs/METRICS.md")).unwrap());
    for (file, least) in [("packaging/prometheus/forebay.rules.yml", 10), ("packaging/grafana/forebay.json", 15)] {
        let text = fs::read_to_string(root.join(file)).unwrap();
        let named = metrics_in(&text);
        assert!(named.len() >= least, "{file} names {named:?}");
        let unknown: Vec<_> = named.difference(&listed).collect();
        assert!(unknown.is_empty(), "{file} names {unknown:?}, which docs/METRICS.md does not list");
    }
    let dashboard = fs::read(root.join("packaging/grafana/forebay.json")).unwrap();
    let dashboard: serde_json::Value = serde_json::from_slice(&dashboard).unwrap();
    // Each query is one that Prometheus understands.
    let panels = dashboard["panels"].as_array().unwrap();
    let queries = panels.iter().flat_map(|panel| panel["targets"].as_array().unwrap());
    let queries = queries.map(|target| target["expr"].as_str().unwrap().replace("$__rate_interval", "5m"));
    let rules: Vec<String> =
        queries.enumerate().map(|(n, q)| format!("  - record: q:{n}\n    expr: '{q}'\n")).collect();
    assert!(rules.len() >= 15);
    let place = tempfile::tempdir().unwrap();
    let file = place.path().join("queries.yml");
    fs::write(&file, format!("groups:\n- name: dashboard\n  rules:\n{}", rules.concat())).unwrap();
    process::run(Command::new("promtool").args(["check", "rules"]).arg(file), COMMAND).ok();
}
