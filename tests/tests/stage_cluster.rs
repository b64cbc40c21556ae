//! `forebay stage --cluster`: nodes that stage together.

use std::collections::BTreeMap;
use std::fs;
use std::net::SocketAddr;
use std::path::Path;
use std::process::Command;

use forebay_api::operator::{ContentState, ListedPath, ObjectKind, Progress, Summary};
use forebay_api::peers::MemberStageState;
use forebay_api::protocol::Reply;
use forebay_tests::cluster::{NodeAddress, TOKEN, addresses, node_with, nodes, peers, peers_file};
use forebay_tests::http;
use forebay_tests::mount::{COMMAND, Mount, Options, Place, alone, content};
use forebay_tests::process::{Answer, need, run, wait_until};
use forebay_tests::servers::Server;
use forebay_tests::servers::s3::Versitygw;

const MIB: usize = 1 << 20;
/// The length of a file that has ranges with several first owners: two of 64 MiB, and a part of one.
const LARGE: usize = 129 * MIB + 77;

/// Writes a tree below `set` into the directory that a server keeps, before it is used. Returns its sizes.
fn fill(dir: &Path, large: bool) -> BTreeMap<String, u64> {
    let mut sizes = BTreeMap::new();
    let mut add = |name: String, bytes: Vec<u8>| {
        let path = dir.join(&name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, &bytes).unwrap();
        sizes.insert(name, bytes.len() as u64);
    };
    for at in 0..30 {
        add(format!("set/small/{at}"), content(at, 10_000 + 7_919 * at as usize));
    }
    for at in 0..6 {
        add(format!("set/{at}"), content(100 + at, 5 * MIB + at as usize));
    }
    if large {
        add("set/large".into(), content(200, LARGE));
    }
    sizes
}

fn on(server: &Versitygw) -> Options {
    Options { remote: Some(server.remote()), ..Options::default() }
}

/// Returns each file of a mount, with its residency.
fn listed(mount: &Mount) -> Vec<ListedPath> {
    let answer = mount.forebay(["--json", "ls", "-R"], &[&mount.path("set")]).ok();
    let all = answer.out.lines().map(|line| serde_json::from_str::<ListedPath>(line).unwrap());
    let files = all.filter(|file| file.kind == ObjectKind::File);
    files.map(|file| ListedPath { path: file.path.trim_start_matches('/').to_owned(), ..file }).collect()
}

fn pool_bytes(mounts: &[Mount]) -> u64 {
    mounts.iter().map(|mount| mount.status().counters.pool_read_bytes).sum()
}

/// Checks that about `all` bytes left the pool. A node that is passed over because this machine is busy, which its
/// counters show, makes another one read the pool again.
#[track_caller]
fn assert_read_once(mounts: &[Mount], all: u64) {
    let pool = pool_bytes(mounts);
    if pool as f64 > 1.05 * all as f64 {
        let passed_over: Vec<_> = mounts.iter().flat_map(|mount| peers(mount).passed_over).collect();
        println!("{pool} bytes left the pool, of {all}: {passed_over:?}");
        assert!(passed_over.iter().any(|(_, count)| *count > 0), "{pool} bytes left the pool, of {all}");
    }
}

/// Returns the summary in the output of a stage with `--json`.
fn summary(answer: &Answer) -> Summary {
    let last = answer.out.lines().last().unwrap_or_else(|| panic!("{answer}"));
    let Progress::Done(summary) = serde_json::from_str(last).unwrap() else { panic!("{answer}") };
    summary
}

/// SEMANTICS 17: "With `--cluster`, this holds on each node for what the node stages"
#[test]
fn a_tree_is_resident_and_leased_on_each_node_and_leaves_the_pool_once() {
    let _alone = alone();
    let server = Versitygw::start();
    let sizes = fill(&server.files(), false);
    let all: u64 = sizes.values().sum();
    let mounts = nodes(&addresses(3), &on(&server));
    let planned = mounts[0].forebay(["--json", "stage", "--cluster", "--dry-run"], &[&mounts[0].path("set")]).ok();
    let planned = summary(&planned);
    assert_eq!((planned.files, planned.bytes, planned.members.len()), (3 * sizes.len() as u64, 3 * all, 3));
    assert_eq!(pool_bytes(&mounts), 0, "a rehearsal fetches nothing");
    let words = ["stage", "--cluster", "--owner", "training", "--lease", "1h"];
    let told = mounts[1].forebay(words, &[&mounts[1].path("set")]).ok();
    for name in ["n0: staged: 36 files", "n1: staged: 36 files", "n2: staged: 36 files", "staged: 108 files"] {
        assert!(told.out.contains(name), "{name}: {told}");
    }
    for mount in &mounts {
        let files = listed(mount);
        let found: BTreeMap<String, u64> = files.iter().map(|file| (file.path.clone(), file.resident_bytes)).collect();
        assert_eq!(found, sizes);
        assert!(files.iter().all(|file| file.lease_owner.as_deref() == Some("training")), "{files:?}");
        assert!(files.iter().all(|file| file.leased_until_unix.is_some()), "{files:?}");
        assert_eq!(mount.status().leased_bytes, all);
    }
    let pool = pool_bytes(&mounts);
    println!("{all} bytes: {pool} from the pool");
    assert_read_once(&mounts, all);
    // What is staged is found, and nothing is fetched again.
    let again = mounts[0].forebay(["--json", "stage", "--cluster=each"], &[&mounts[0].path("set")]).ok();
    assert_eq!((summary(&again).bytes, summary(&again).failed), (0, 0));
    assert_eq!(pool_bytes(&mounts), pool);
}

/// SEMANTICS 17: "ranges that `--cluster=owners` stages of a file with several first owners have no lease"
#[test]
fn owners_stage_each_file_on_one_node_and_share_a_large_one() {
    let _alone = alone();
    let server = Versitygw::start();
    let sizes = fill(&server.files(), true);
    let all: u64 = sizes.values().sum();
    let mounts = nodes(&addresses(3), &on(&server));
    let planned = mounts[0].forebay(["--json", "stage", "--cluster=owners", "--dry-run"], &[&mounts[0].path("set")]);
    assert_eq!(summary(&planned.ok()).bytes, all);
    let staged = mounts[0].forebay(["--json", "stage", "--cluster=owners"], &[&mounts[0].path("set")]).ok();
    let done = summary(&staged);
    assert_eq!((done.bytes, done.failed, done.members.len()), (all, 0, 3));
    assert_eq!(done.members.iter().map(|member| member.bytes).sum::<u64>(), all);
    let listings: Vec<Vec<ListedPath>> = mounts.iter().map(listed).collect();
    for (path, size) in &sizes {
        let on_nodes: Vec<&ListedPath> = listings.iter().flatten().filter(|file| file.path == *path).collect();
        let resident: Vec<u64> = on_nodes.iter().map(|file| file.resident_bytes).filter(|bytes| *bytes > 0).collect();
        assert_eq!(resident.iter().sum::<u64>(), *size, "{path}: {on_nodes:?}");
        let leased = on_nodes.iter().filter(|file| file.lease_owner.is_some()).count();
        if *size == LARGE as u64 {
            assert!(resident.len() > 1 && leased == 0, "{path}: {on_nodes:?}");
            continue;
        }
        assert_eq!((resident.len(), leased), (1, 1), "{path}: {on_nodes:?}");
        let holder = on_nodes.iter().find(|file| file.resident_bytes > 0).unwrap();
        assert_eq!(holder.state, ContentState::Resident, "{path}");
    }
    assert!(listings.iter().all(|files| files.iter().any(|file| file.resident_bytes > 0)), "each node has a share");
    assert_eq!(pool_bytes(&mounts), all);
    // Each node reads all of it, and nothing comes from the pool again.
    for mount in &mounts {
        for (path, size) in &sizes {
            assert_eq!(fs::read(mount.path(path)).unwrap().len() as u64, *size);
        }
    }
    assert_read_once(&mounts, all);
}

#[test]
fn a_member_that_is_gone_or_hangs_is_named_and_the_others_stage() {
    let _alone = alone();
    let server = Versitygw::start();
    let sizes = fill(&server.files(), false);
    let mounts = nodes(&addresses(3), &on(&server));
    let stage = || mounts[0].forebay(["--json", "stage", "--cluster"], &[&mounts[0].path("set")]);
    let state_of = |summary: &Summary, node: &str| {
        summary.members.iter().find(|member| member.node == node).map(|member| member.state).unwrap()
    };
    // A member that hears and does not answer.
    let frozen = mounts[1].worker().pid.cast_signed();
    let send = |signal| assert_eq!(unsafe { libc::kill(frozen, signal) }, 0);
    send(libc::SIGSTOP);
    let answer = stage().refused(1, &["timed-out"]);
    send(libc::SIGCONT);
    let done = summary(&answer);
    assert_eq!(state_of(&done, "n1"), MemberStageState::TimedOut, "{answer}");
    for node in ["n0", "n2"] {
        assert_eq!(state_of(&done, node), MemberStageState::Staged, "{answer}");
    }
    assert!(done.failed >= 1 && answer.took < COMMAND, "{answer}");
    assert_eq!(mounts[2].status().resident_files, sizes.len() as u64);
    // What n1 asked the pool before it was frozen has timed out meanwhile, so n1 takes it for gone until it asks again.
    wait_until("n1 stages again", || {
        let told = mounts[0].forebay(["--json", "stage", "--cluster"], &[&mounts[0].path("set")]);
        told.code == Some(0)
    });
    // A member that does not come back.
    mounts[2].kill_all();
    let answer = stage().refused(1, &["n2"]);
    let done = summary(&answer);
    assert_eq!(state_of(&done, "n2"), MemberStageState::Unreachable, "{answer}");
    for node in ["n0", "n1"] {
        assert_eq!(state_of(&done, node), MemberStageState::Staged, "{answer}");
    }
    let told = mounts[0].forebay(["stage", "--cluster"], &[&mounts[0].path("set")]);
    told.refused(1, &["n2: unreachable", "n0: staged", "n1: staged"]);
    assert_eq!(mounts[1].status().resident_files, sizes.len() as u64);
}

#[test]
fn a_stage_whose_command_is_killed_ends_on_all_nodes() {
    let _alone = alone();
    let server = Versitygw::start();
    let sizes = fill(&server.files(), false);
    let mounts = nodes(&addresses(2), &on(&server));
    // So slow that it takes minutes.
    let mut command = Command::new(forebay_tests::process::forebay());
    command.args(["stage", "--cluster", "--rate", "100KB/s"]).arg(mounts[0].path("set"));
    let mut stage = forebay_tests::process::spawn(&mut command).unwrap();
    // A file that is being staged is leased.
    wait_until("both stage", || mounts.iter().all(|mount| mount.status().leased_bytes > 0));
    stage.kill().unwrap();
    stage.wait().unwrap();
    wait_until("the member is told", || mounts[1].log().contains("a stage for another node ended early"));
    wait_until("this node stops", || mounts[0].log().contains("a stage on the cluster ended early"));
    assert!(mounts.iter().all(|mount| mount.status().resident_files < sizes.len() as u64));
}

#[test]
fn what_cannot_be_done_on_a_cluster_is_refused_with_the_remedy() {
    let _alone = alone();
    let without = Mount::new(Options::default());
    fs::write(without.pool("f"), "content").unwrap();
    without.forebay(["stage", "--cluster"], &[&without.path("f")]).refused(2, &["has no peers", "--peers FILE"]);
    without.forebay(["stage", "--cluster", "--view"], &[&without.path("f")]).refused(2, &["--view"]);
    without.forebay(["stage", "--cluster=all"], &[&without.path("f")]).refused(2, &["each", "owners"]);

    let server = Versitygw::start();
    fill(&server.files(), false);
    let placed = |lines: &str| node_with(&NodeAddress::new("n0"), &[], lines, on(&server));
    let own = placed("placement = \"own\"");
    own.forebay(["stage", "--cluster"], &[&own.path("set")]).refused(2, &["placement is own", "on each node"]);
    let pool = placed("placement = \"pool\"");
    pool.forebay(["stage", "--cluster=owners"], &[&pool.path("set")]).refused(2, &["placement is pool"]);
    let told = pool.forebay(["stage", "--cluster"], &[&pool.path("set")]).ok();
    assert!(told.out.contains("each member reads the pool itself"), "{told}");

    // A job of `run` is known to one node.
    let path = pool.path("set");
    let inside = |more: &[&str]| {
        let mut command = Command::new(forebay_tests::process::forebay());
        command.args(["run", "--"]).arg(forebay_tests::process::forebay()).args(["stage", "--cluster"]).args(more);
        run(command.arg(&path), COMMAND)
    };
    inside(&[]).refused(2, &["runs on this node only", "--owner"]);
    inside(&["--owner", "me"]).ok();
}

#[test]
fn content_is_staged_only_where_it_may_be() {
    let _alone = alone();
    let server = Versitygw::start();
    let sizes = fill(&server.files(), false);
    let members = addresses(3);
    let lines = "confine-to = [\"n0\", \"n1\"]";
    let mounts: Vec<Mount> = members.iter().map(|this| node_with(this, &members, lines, on(&server))).collect();
    // The node that asks need not have it.
    let answer = mounts[2].forebay(["--json", "stage", "--cluster"], &[&mounts[2].path("set")]).ok();
    let done = summary(&answer);
    let names: Vec<&str> = done.members.iter().map(|member| member.node.as_str()).collect();
    assert_eq!(names, ["n0", "n1"], "{answer}");
    let resident: Vec<u64> = mounts.iter().map(|mount| mount.status().resident_files).collect();
    assert_eq!(resident, [sizes.len() as u64, sizes.len() as u64, 0]);
    // A member whose file says otherwise refuses.
    let fewer = [members[0].clone(), members[2].clone()];
    peers_file(&mounts[0].place.at(""), &members[0], &fewer, "");
    wait_until("the file is read", || {
        let told = mounts[0].forebay(["stage", "--cluster"], &[&mounts[0].path("set")]);
        told.code == Some(1) && told.out.contains("n2: refused") && told.out.contains("confined to other members")
    });
    peers_file(&mounts[2].place.at(""), &members[2], &members, "");
    wait_until("owners must agree", || {
        let told = mounts[0].forebay(["stage", "--cluster=owners"], &[&mounts[0].path("set")]);
        told.code == Some(1) && told.out.contains("it sees other members")
    });
}

/// SECURITY 19: "answers no client without the token of the cluster"
#[test]
fn a_stage_needs_the_token_and_a_bad_request_is_refused_with_the_reason() {
    let _alone = alone();
    need(&["curl"]);
    let members = addresses(1);
    let place = Place::new();
    fs::write(place.pool().join("f"), "content").unwrap();
    let file = peers_file(&place.at(""), &members[0], &members, "");
    let more = vec!["--peers".into(), file.display().to_string()];
    let mount = Mount::on(place, Options { more, ..Options::default() });
    let address: SocketAddr = ([127, 0, 0, 1], members[0].port).into();
    let token = format!("Authorization: Bearer {}", TOKEN.replace(' ', "-"));
    assert_eq!(http::get(address, "/peer/v1/stage", "").unwrap().status, 401);
    assert_eq!(http::get(address, "/peer/v1/stage", &format!("{token}\r\n")).unwrap().status, 400);
    let body = mount.place.at("body");
    let post = |token: &str, headers: bool, text: &[u8]| {
        fs::write(&body, text).unwrap();
        let mut curl = Command::new("curl");
        curl.args(["-s", "-w", "\n%{http_code}", "-H", token, "-H", "Expect:"]);
        if headers {
            curl.args(["-H", "Forebay-Node: x", "-H", "Forebay-Members: 1"]);
        }
        curl.arg("--data-binary").arg(format!("@{}", body.display())).arg(format!("http://{address}/peer/v1/stage"));
        let out = run(&mut curl, COMMAND).out;
        let (answer, status) = out.rsplit_once('\n').unwrap();
        (status.to_owned(), answer.to_owned())
    };
    let request = |paths: &str, more: &str| {
        format!("{{\"op\":\"stage\",\"paths\":{paths},\"lease_secs\":60,\"dry_run\":false{more}}}\n")
    };
    let each = ",\"lease_owner\":\"me\",\"cluster\":\"each\"";
    let good = request("[\"f\"]", each);
    for (token, status) in [("X: y", "401"), ("Authorization: Bearer other", "401")] {
        assert_eq!(post(token, true, good.as_bytes()).0, status, "{token}");
    }
    let other = |more: &str| request("[\"f\"]", more);
    for (text, reason) in [
        ("no JSON at all".to_owned(), "not understood"),
        ("[".repeat(5000), "not understood"),
        ("{\"op\":\"stage\"}".to_owned(), "paths"),
        ("{\"op\":\"dance\"}".to_owned(), "dance"),
        ("{\"op\":\"evict\",\"paths\":[\"f\"],\"release_leases\":true,\"dry_run\":false}".to_owned(), "to stage"),
        (format!("{{\"api\":99,\"program\":\"9.9\",{}", &good[1..]), "version 99"),
        (other(",\"lease_owner\":\"me\""), "cluster"),
        (other(",\"lease_owner\":\"me\",\"cluster\":\"some\""), "some"),
        (other(",\"lease_owner\":\"\",\"cluster\":\"each\""), "owner"),
        (other(&format!(",\"lease_owner\":\"{}\",\"cluster\":\"each\"", "x".repeat(256))), "lease_owner"),
        (other(&format!("{each},\"job\":\"j\"")), "job"),
        (other(&format!("{each},\"bytes_per_second\":0")), "bytes_per_second"),
        (other(&format!("{each},\"invocation\":{{\"user\":0,\"words\":[\"a\"]}}")), "paths"),
        (request("[]", each), "paths"),
        (request("[\"../../etc\"]", each), "../../etc"),
        (request("[\"f\",\"a/../../b\"]", each), "a/../../b"),
        (request("[\"\\u0000\"]", each), "not a path"),
        (request(&format!("[\"{}\"]", "a/".repeat(4 << 20)), each), "less of it"),
    ] {
        let (status, answer) = post(&token, true, text.as_bytes());
        let begin: String = text.chars().take(100).collect();
        assert!(status == "400" && answer.contains(reason) && answer.len() < 2000, "{begin}: {status} {answer}");
    }
    let (status, answer) = post(&token, false, good.as_bytes());
    assert!(status == "400" && answer.contains("forebay-node"), "{status} {answer}");
    assert_eq!(mount.status().resident_files, 0, "nothing was staged");
    let owners = other(",\"lease_owner\":\"me\",\"cluster\":\"owners\"");
    assert_eq!(post(&token, true, owners.as_bytes()).0, "409", "the fingerprint of its members is another");
    let (status, answer) = post(&token, true, good.as_bytes());
    let replies: Vec<Reply> = answer.lines().map(|line| Reply::from_line(line.as_bytes()).unwrap()).collect();
    assert!(matches!(replies.last(), Some(Reply::End)) && status == "200", "{status} {answer}");
    let done = replies.iter().find_map(|reply| match reply {
        Reply::Progress(Progress::Done(summary)) => Some(summary),
        _ => None,
    });
    assert_eq!(done.map(|summary| (summary.files, summary.failed)), Some((1, 0)), "{answer}");
    assert_eq!((mount.status().resident_files, mount.status().leased_bytes), (1, 7));
    // Many at once: they wait for their turn, and all are carried out.
    std::thread::scope(|scope| {
        for _ in 0..40 {
            scope.spawn(|| {
                let head = format!("{token}\r\nForebay-Node: x\r\nForebay-Members: 1\r\n");
                let length = good.len();
                let text = format!(
                    "POST /peer/v1/stage HTTP/1.1\r\nHost: h\r\n{head}Content-Length: {length}\r\nConnection: close\r\n\r\n{good}"
                );
                let answer = http::exchange(address, &text).unwrap();
                assert!(answer.status == 200 && answer.body.contains("\"reply\":\"end\""), "{answer:?}");
            });
        }
    });
    // The time limit of the request holds on the member, too.
    fs::write(mount.pool("late"), vec![0; 1 << 20]).unwrap();
    let (_, answer) = post(&token, true, request("[\"late\"]", &format!("{each},\"within_ms\":0")).as_bytes());
    assert!(answer.contains("the time was up"), "{answer}");
}
