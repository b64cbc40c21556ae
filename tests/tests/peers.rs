//! Mounts that read from each other before the pool.

use std::collections::BTreeMap;
use std::fs;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener};
use std::os::fd::OwnedFd;
use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use forebay_api::peers::{MemberSource, PassOver, PeerState};
use forebay_tests::cache_node::Node;
use forebay_tests::cluster::{NodeAddress, TOKEN, addresses, node, node_with, nodes, passed_over, peers, peers_file};
use forebay_tests::http;
use forebay_tests::mount::{COMMAND, Mount, Options, Place, alone, content};
use forebay_tests::network::Network;
use forebay_tests::process::{need, run, wait_until};
use forebay_tests::servers::etcd::Etcd;
use forebay_tests::servers::s3::Versitygw;
use forebay_tests::servers::{Remote, Server, free_port};
use forebay_tests::tree;
use rustix::fs::{Mode, OFlags};

const MIB: usize = 1 << 20;

/// Files of the pool, by their names.
type Files = BTreeMap<String, Vec<u8>>;

/// Writes files into the directory that a server keeps, before it is used.
fn fill(dir: &Path) -> Files {
    let mut files = Files::new();
    for at in 0..40 {
        files.insert(format!("small/{at}"), content(at, 10_000 + 7_919 * at as usize));
    }
    // Two ranges of 64 MiB.
    files.insert("large".into(), content(100, 70 * MIB + 12_345));
    for (name, bytes) in &files {
        let path = dir.join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, bytes).unwrap();
    }
    files
}

fn read_all(mount: &Mount, files: &Files) {
    for (name, bytes) in files {
        assert!(fs::read(mount.path(name)).unwrap() == *bytes, "{name} differs");
    }
}

fn on(server: &Versitygw) -> Options {
    Options { remote: Some(server.remote()), ..Options::default() }
}

/// SEMANTICS 105: "Nodes of a cluster read from each other before the pool."
#[test]
fn five_nodes_that_read_the_same_files_read_each_byte_once_from_the_pool() {
    let _alone = alone();
    let server = Versitygw::start();
    let files = fill(&server.files());
    let all: u64 = files.values().map(|bytes| bytes.len() as u64).sum();
    let mounts = nodes(&addresses(5), &on(&server));
    thread::scope(|scope| {
        for mount in &mounts {
            scope.spawn(|| read_all(mount, &files));
        }
    });
    let counters: Vec<_> = mounts.iter().map(|mount| mount.status().counters).collect();
    let pool: u64 = counters.iter().map(|counters| counters.pool_read_bytes).sum();
    let from_peers: u64 = counters.iter().map(|counters| counters.peer_read_bytes).sum();
    for mount in &mounts {
        let status = peers(mount);
        println!("{}: {:?}", status.node, status.passed_over);
        assert_eq!(status.members.len(), 5);
        let shares: f64 = status.members.iter().map(|member| member.share).sum();
        assert!((shares - 1.0).abs() < 1e-9 && status.members.iter().all(|member| member.share > 0.1), "{status:?}");
    }
    println!("{all} bytes: {pool} from the pool, {from_peers} from peers");
    assert!(pool as f64 <= 1.05 * all as f64, "{pool} bytes left the pool, of {all}");
    assert_eq!(pool + from_peers, 5 * all);
    let given: u64 = mounts.iter().map(|mount| peers(mount).given_bytes).sum();
    assert!(given >= from_peers, "{given} given, {from_peers} got");
    let told = mounts[0].forebay(["peers"], &[&mounts[0].place.mnt()]).ok();
    assert!(told.out.contains("this node") && told.out.contains("of 5 nodes"), "{told}");
}

/// A directory pool has versions by inode, and here each node sees the same ones.
#[test]
fn a_node_takes_resident_content_from_an_owner_and_gives_no_content_that_the_pool_does_not_have() {
    let _alone = alone();
    let bytes = content(1, 3 * MIB + 5);
    let pool = Place::new();
    fs::write(pool.pool().join("f"), &bytes).unwrap();
    let members = addresses(2);
    let mounts: Vec<Mount> = members
        .iter()
        .map(|this| {
            let place = Place::new();
            let file = peers_file(&place.at(""), this, &members, "");
            fs::remove_dir(place.pool()).unwrap();
            std::os::unix::fs::symlink(pool.pool(), place.pool()).unwrap();
            let more = vec!["--peers".into(), file.display().to_string()];
            let policy = Some("[default]\nflush = \"manual\"\n".into());
            Mount::on(place, Options { more, policy, ..Options::default() })
        })
        .collect();
    for mount in &mounts {
        assert!(fs::read(mount.path("f")).unwrap() == bytes);
    }
    let read = |mount: &Mount| mount.status().counters;
    let total = [&mounts[0], &mounts[1]].map(|mount| read(mount).pool_read_bytes).iter().sum::<u64>();
    assert_eq!(total, bytes.len() as u64);
    // Written in one mount, and not flushed: the others see what the pool has.
    let ours = content(2, 3 * MIB + 5);
    fs::write(mounts[0].path("f"), &ours).unwrap();
    mounts[1].forebay(["evict"], &[&mounts[1].place.mnt()]).ok();
    assert!(fs::read(mounts[1].path("f")).unwrap() == bytes);
    mounts[0].flush();
    assert!(fs::read(mounts[1].path("f")).unwrap() == ours);
    assert!(fs::read(mounts[0].path("f")).unwrap() == ours);
}

/// SEMANTICS 107: "A peer gives content of the version that the reader's pool has confirmed, or nothing."
/// An object that another client replaces: each open sees the pool's copy, whatever the peers have.
#[test]
fn a_replaced_object_is_never_read_in_its_old_version_from_a_peer() {
    let _alone = alone();
    let server = Versitygw::start();
    let old = content(1, 9 * MIB);
    fs::write(server.files().join("f"), &old).unwrap();
    let mounts = nodes(&addresses(3), &on(&server));
    for mount in &mounts {
        assert!(fs::read(mount.path("f")).unwrap() == old);
    }
    for round in 2..6 {
        let new = content(round, 9 * MIB);
        let file = server.files().join("new");
        fs::write(&file, &new).unwrap();
        server.curl(&["-X", "PUT", "-T", file.to_str().unwrap()], "f");
        thread::scope(|scope| {
            for mount in &mounts {
                scope.spawn(|| assert!(fs::read(mount.path("f")).unwrap() == new, "round {round}"));
            }
        });
    }
}

/// SEMANTICS 106: "A node that fails, answers slowly or sends other bytes is passed over"
#[test]
fn programs_see_nothing_of_nodes_that_are_killed() {
    let _alone = alone();
    let server = Versitygw::start();
    let files = fill(&server.files());
    let members = addresses(3);
    let mut mounts = nodes(&members, &on(&server));
    let (stop, reader) = (AtomicBool::new(false), mounts.remove(0));
    thread::scope(|scope| {
        scope.spawn(|| {
            while !stop.load(Ordering::Relaxed) {
                read_all(&reader, &files);
                reader.forebay(["evict"], &[&reader.place.mnt()]).ok();
            }
        });
        for round in 0..6 {
            let killed = &mounts[round % 2];
            let worker = killed.worker();
            killed.kill_worker();
            killed.wait_for_other_worker(worker);
            read_all(killed, &files);
        }
        // A node that hears and does not answer.
        let frozen = mounts[0].worker().pid.cast_signed();
        let send = |signal| unsafe { libc::kill(frozen, signal) };
        assert_eq!(send(libc::SIGSTOP), 0);
        wait_until("the frozen node is too slow", || passed_over(&reader, "slow") > 0);
        send(libc::SIGCONT);
        // A node that does not come back.
        mounts[1].kill_all();
        thread::sleep(Duration::from_secs(2));
        stop.store(true, Ordering::Relaxed);
    });
    let status = peers(&reader);
    let gone = status.members.iter().find(|member| member.node == members[2].name).unwrap();
    println!("{status:?}");
    assert!(passed_over(&reader, "gone") > 0, "{status:?}");
    assert!(gone.passed_over.iter().any(|(why, _)| *why == PassOver::Gone), "{gone:?}");
}

/// A mount and a cache node of one pool.
#[test]
fn a_cache_node_is_a_peer_of_a_mount() {
    let _alone = alone();
    let members = addresses(2);
    let (place, other) = (Place::new(), Place::new());
    fs::remove_dir(other.pool()).unwrap();
    std::os::unix::fs::symlink(place.pool(), other.pool()).unwrap();
    for at in 0..20 {
        fs::write(place.pool().join(format!("f{at}")), content(at, 30_000)).unwrap();
    }
    let file = peers_file(&place.at(""), &members[0], &members, "");
    let node = Node::of(&place, &["--peers", file.to_str().unwrap()]);
    let file = peers_file(&other.at(""), &members[1], &members, "");
    let mount =
        Mount::on(other, Options { more: vec!["--peers".into(), file.display().to_string()], ..Options::default() });
    for at in 0..20 {
        let name = format!("f{at}");
        assert!(node.get(&format!("/{name}"), &[]).body == content(at, 30_000));
        assert!(fs::read(mount.path(name)).unwrap() == content(at, 30_000));
    }
    let counters = [node.status().counters, mount.status().counters];
    assert_eq!(counters.iter().map(|counters| counters.pool_read_bytes).sum::<u64>(), 20 * 30_000);
    assert!(counters.iter().all(|counters| counters.peer_read_bytes > 0), "{counters:?}");
}

/// A cache node keeps files open as long as they are fresh.
#[test]
fn a_cache_node_serves_what_a_mount_has_flushed_at_once() {
    let _alone = alone();
    let members = addresses(2);
    let (place, other) = (Place::new(), Place::new());
    fs::remove_dir(other.pool()).unwrap();
    std::os::unix::fs::symlink(place.pool(), other.pool()).unwrap();
    fs::write(place.pool().join("f"), "old").unwrap();
    let (file, policy) = (peers_file(&place.at(""), &members[0], &members, ""), place.at("policy.toml"));
    fs::write(&policy, "[default]\nmetadata-ttl = \"1h\"\nconsistency = \"ttl:1h\"\n").unwrap();
    let node = Node::of(&place, &["--peers", file.to_str().unwrap(), "--policy", policy.to_str().unwrap()]);
    let file = peers_file(&other.at(""), &members[1], &members, "");
    let more = vec!["--peers".into(), file.display().to_string()];
    let policy = Some("[default]\nflush = \"manual\"\n".into());
    let mount = Mount::on(other, Options { more, policy, ..Options::default() });
    for text in ["changed", "changed again"] {
        let before = node.get("/f", &[]);
        assert!(before.status == 200 && before.body != text.as_bytes(), "{}", before.head);
        assert!(node.get("/f", &[]).header("cache-status").starts_with("forebay; hit; ttl="), "it is fresh");
        fs::write(mount.path("f"), text).unwrap();
        mount.flush();
        // Each of these requests uses the file, which stays open meanwhile.
        wait_until("the change is served", || node.get("/f", &[]).body == text.as_bytes());
    }
}

/// Five nodes with addresses of their own, members by etcd, and what can fail around them.
#[test]
fn reads_go_on_without_nodes_and_without_etcd_and_across_pulled_cables() {
    const NODES: usize = 5;
    let _alone = alone();
    let network = Network::new(NODES);
    network.enter();
    let (server, mut etcd) = (Versitygw::on_all_addresses(), Etcd::start(Network::SWITCH));
    let files = fill(&server.files());
    let all: u64 = files.values().map(|bytes| bytes.len() as u64).sum();
    let lines =
        |name: &str| format!("[etcd]\nname = \"{name}\"\nendpoints = [\"http://{}:{}\"]", Network::SWITCH, etcd.port());
    let mut remote = server.remote();
    remote.url = remote.url.replace("127.0.0.1", Network::SWITCH);
    let mounts: Vec<Mount> = (0..NODES)
        .map(|at| {
            let this = NodeAddress { name: format!("n{at}"), host: Network::address(at), port: 7410 };
            let options = Options { remote: Some(remote.clone()), ..Options::default() };
            network.at(at, || node_with(&this, &[], &lines("test"), options))
        })
        .collect();
    let members = |mount: &Mount| peers(mount).members.len();
    wait_until("all know each other", || mounts.iter().all(|mount| members(mount) == NODES));
    assert!(peers(&mounts[0]).members.iter().all(|member| member.sources.contains(&MemberSource::Etcd)));
    let read_everywhere = |mounts: &[&Mount]| {
        thread::scope(|scope| {
            for mount in mounts {
                scope.spawn(|| read_all(mount, &files));
            }
        });
    };
    let nodes: Vec<&Mount> = mounts.iter().collect();
    read_everywhere(&nodes);
    let pool: u64 = mounts.iter().map(|mount| mount.status().counters.pool_read_bytes).sum();
    println!("{pool} of {all} bytes from the pool for {NODES} nodes");
    assert!(pool as f64 <= 1.05 * all as f64, "{pool} bytes left the pool, of {all}");

    let forget = |mount: &Mount| _ = mount.forebay(["evict"], &[&mount.place.mnt()]).ok();
    println!("etcd is killed: the list stays");
    etcd.kill();
    forget(&mounts[0]);
    read_everywhere(&nodes[..1]);
    assert_eq!(members(&mounts[0]), NODES);
    println!("a cable is pulled: the others go on, and so does the node itself as far as it has the bytes");
    network.connect(4, false);
    nodes[..3].iter().for_each(|mount| forget(mount));
    read_everywhere(&nodes[..4]);
    assert!(fs::read(mounts[4].path("small/1")).unwrap() == files["small/1"]);
    network.connect(4, true);
    forget(&mounts[4]);
    read_everywhere(&nodes);
    println!("a node is killed");
    mounts[3].kill_all();
    nodes[..3].iter().for_each(|mount| forget(mount));
    read_everywhere(&nodes[..3]);
    println!("etcd comes back: the killed node is no member any more");
    etcd.resume();
    wait_until("the others are members", || mounts[..3].iter().all(|mount| members(mount) == NODES - 1));
    assert_eq!(etcd.keys(), NODES - 1);
    mounts[4].umount();
    assert_eq!(etcd.keys(), NODES - 2, "who unmounts leaves at once");
    wait_until("the others know it", || members(&mounts[0]) == NODES - 2);
    read_everywhere(&nodes[..3]);
}

/// How a node that is none answers.
#[derive(Debug, Clone, Copy)]
enum Lie {
    Status(&'static str),
    Body(&'static [u8]),
    /// It accepts, and says nothing.
    Silence,
    /// It begins an answer, and says nothing more.
    Stall,
}

/// A node that answers each request with the present lie.
fn lying(listener: TcpListener, lie: &Arc<Mutex<Lie>>) {
    for stream in listener.incoming() {
        let (Ok(mut stream), lie) = (stream, lie.clone()) else { return };
        thread::spawn(move || {
            let mut request = [0; 4096];
            while stream.read(&mut request).is_ok_and(|count| count > 0) {
                let lie = *lie.lock().unwrap();
                let answer = match lie {
                    Lie::Status(status) => format!("HTTP/1.1 {status}\r\nContent-Length: 0\r\n\r\n").into_bytes(),
                    Lie::Body(body) => {
                        let head = format!("HTTP/1.1 206 Partial Content\r\nContent-Length: {}\r\n\r\n", body.len());
                        [head.as_bytes(), body].concat()
                    }
                    Lie::Silence => Vec::new(),
                    Lie::Stall => b"HTTP/1.1 206 Partial Content\r\nContent-Length: 99999\r\n\r\n".to_vec(),
                };
                if stream.write_all(&answer).is_err() {
                    return;
                }
            }
        });
    }
}

#[test]
fn what_a_broken_node_says_is_not_believed() {
    const FILES: u64 = 12;
    let _alone = alone();
    let place = Place::new();
    for at in 0..FILES {
        fs::write(place.pool().join(format!("f{at}")), content(at, 5_000)).unwrap();
    }
    let (this, members) = (NodeAddress::new("this"), addresses(1));
    let listener = TcpListener::bind(("127.0.0.1", members[0].port)).unwrap();
    let file = peers_file(&place.at(""), &this, &members, "");
    let metrics = free_port();
    let more = ["--peers", &file.display().to_string(), "--metrics", &metrics.to_string()];
    let more = more.map(str::to_owned).to_vec();
    let mount = Mount::on(place, Options { more, ..Options::default() });
    // 5,000 bytes with a wrong checksum.
    let wrong = Box::leak([&5_000_u32.to_be_bytes()[..], &[1; 4], &[0; 5_000]].concat().into_boxed_slice());
    let lie = Arc::new(Mutex::new(Lie::Silence));
    let present = lie.clone();
    thread::spawn(move || lying(listener, &present));
    let seen = |how: Lie, why: &str| {
        *lie.lock().unwrap() = how;
        let before = passed_over(&mount, why);
        wait_until(&format!("{how:?} is counted as {why}"), || {
            mount.forebay(["evict"], &[&mount.place.mnt()]).ok();
            for at in 0..FILES {
                assert!(fs::read(mount.path(format!("f{at}"))).unwrap() == content(at, 5_000), "{how:?}");
            }
            passed_over(&mount, why) > before
        });
    };
    for (how, why) in [
        (Lie::Status("412 Precondition Failed"), "refused-version"),
        (Lie::Status("500 Internal Server Error"), "gone"),
        (Lie::Status("302 Found\r\nLocation: http://127.0.0.1:1/"), "gone"),
        (Lie::Status("503 Busy\r\nForebay-Retry-After-Ms: 10\r\nForebay-Holders: ,,this, x y,n0,nobody"), "busy"),
        (Lie::Body(b""), "gone"),
        (Lie::Body(b"\xff\xff\xff\xff\0\0\0\0"), "damaged"),
        (Lie::Body(b"\0\0\0\0\0\0\0\x63"), "damaged"),
        (Lie::Body(b"\0\0\x13\x88"), "damaged"),
        (Lie::Body(wrong), "damaged"),
        (Lie::Silence, "slow"),
        (Lie::Stall, "slow"),
    ] {
        seen(how, why);
        // An answer of a sound node ends the suspicion, which would last longer each time.
        seen(Lie::Status("404 Not Found"), "not-resident");
    }
    assert_eq!(mount.status().counters.peer_read_bytes, 0);
    // A scrape says the same as `forebay peers`.
    let told = peers(&mount);
    let scraped = http::get(([127, 0, 0, 1], metrics).into(), "/metrics", "").unwrap().body;
    assert!(told.passed_over.len() >= 6, "{told:?}");
    for (why, count) in told.passed_over {
        let sample = format!("forebay_peer_passed_over_total{{reason=\"{why}\"}} {count}\n");
        assert!(scraped.contains(&sample), "{sample}{scraped}");
    }
    let others: u64 = ["trusted", "suspected"]
        .iter()
        .map(|state| {
            let sample = format!("forebay_peer_members{{state=\"{state}\"}} ");
            let rest = scraped.split_once(&sample).unwrap().1;
            rest.split(['.', '\n']).next().unwrap().parse::<u64>().unwrap()
        })
        .sum();
    assert_eq!(others, 1);
}

/// SEMANTICS 119: "What a node of a cluster has flushed is seen by programs on the other nodes before `metadata-ttl` has expired
/// there"
#[test]
fn what_a_node_has_flushed_is_seen_by_the_others_at_once() {
    let _alone = alone();
    let server = Versitygw::start();
    for (name, bytes) in [("changed", "old"), ("removed", "r"), ("moved", "m")] {
        fs::write(server.files().join(name), bytes).unwrap();
    }
    let policy = Some("[default]\nflush = \"manual\"\nmetadata-ttl = \"1h\"\nconsistency = \"ttl:1h\"\n".into());
    let mounts = nodes(&addresses(2), &Options { policy, ..on(&server) });
    let (writer, reader) = (&mounts[0], &mounts[1]);
    let size = |name: &str| fs::metadata(reader.path(name)).ok().map(|meta| meta.len());
    let names = || {
        let names =
            fs::read_dir(reader.path("")).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
        let mut names: Vec<_> = names.collect();
        names.sort();
        names
    };
    assert_eq!(names(), ["changed", "moved", "removed"]);
    let sizes = || ["changed", "created", "removed", "moved", "target"].map(size);
    assert_eq!(sizes(), [Some(3), None, Some(1), Some(1), None]);
    assert_eq!(fs::read(reader.path("changed")).unwrap(), b"old");
    fs::write(writer.path("changed"), "changed").unwrap();
    fs::write(writer.path("created"), "created!").unwrap();
    fs::remove_file(writer.path("removed")).unwrap();
    fs::rename(writer.path("moved"), writer.path("target")).unwrap();
    writer.flush();
    wait_until("the changes are seen", || sizes() == [Some(7), Some(8), None, None, Some(1)]);
    assert_eq!(names(), ["changed", "created", "target"]);
    assert_eq!(fs::read(reader.path("changed")).unwrap(), b"changed");
    wait_until("all is told", || peers(writer).announced >= 4);
}

/// SEMANTICS 119: "What a node of a cluster has flushed is seen by programs on the other nodes before `metadata-ttl` has expired
/// there"
#[test]
fn announcements_reach_hard_links_and_names_that_the_reader_has_moved() {
    let _alone = alone();
    let pool = Place::new();
    let dir = pool.pool();
    for name in ["linked", "moved", "dir/inside"] {
        fs::create_dir_all(dir.join(name).parent().unwrap()).unwrap();
        fs::write(dir.join(name), "old").unwrap();
    }
    fs::hard_link(dir.join("linked"), dir.join("other name")).unwrap();
    let remote = Remote {
        url: dir.to_str().unwrap().to_owned(),
        tree: Arc::new(tree::Files(dir.clone())),
        environment: BTreeMap::new(),
    };
    let members = addresses(3);
    let listener = TcpListener::bind((members[2].host.as_str(), members[2].port)).unwrap();
    thread::spawn(move || lying(listener, &Arc::new(Mutex::new(Lie::Silence))));
    let policy = Some("[default]\nflush = \"manual\"\nmetadata-ttl = \"1h\"\nconsistency = \"ttl:1h\"\n".into());
    let options = Options { policy, remote: Some(remote), ..Options::default() };
    let [writer, reader] = [0, 1].map(|at| node(&members[at], &members, options.clone()));
    let size = |name: &str| fs::metadata(reader.path(name)).ok().map(|meta| meta.len());
    let sizes = || ["linked", "other name", "moved", "taken", "dir", "elsewhere/inside"].map(size);
    // The reader's own changes, which wait: a file and a directory have other names there.
    fs::rename(reader.path("moved"), reader.path("taken")).unwrap();
    fs::rename(reader.path("dir"), reader.path("elsewhere")).unwrap();
    assert_eq!(sizes(), [Some(3), Some(3), None, Some(3), None, Some(3)]);
    fs::write(writer.path("linked"), "by one name").unwrap();
    fs::write(writer.path("moved"), "moved there").unwrap();
    fs::write(writer.path("dir/inside"), "inside it").unwrap();
    writer.flush();
    wait_until("the changes are seen", || sizes() == [Some(11), Some(11), None, Some(11), None, Some(9)]);
    assert_eq!(fs::read(reader.path("other name")).unwrap(), b"by one name");
    assert_eq!(fs::read(reader.path("taken")).unwrap(), b"moved there");
    assert_eq!(fs::read(reader.path("elsewhere/inside")).unwrap(), b"inside it");
    // The third member takes the connection and does not answer.
    wait_until("what the third does not take is counted", || peers(&writer).announcements_lost >= 3);
    reader.flush();
    assert_eq!(fs::read(dir.join("taken")).unwrap(), b"moved there");
    assert_eq!(fs::read(dir.join("elsewhere/inside")).unwrap(), b"inside it");
}

/// SECURITY 19: "answers no client without the token of the cluster"
#[test]
fn the_door_is_closed_without_the_token_and_bad_requests_are_refused() {
    let _alone = alone();
    let members = addresses(1);
    let place = Place::new();
    fs::write(place.pool().join("f"), "content").unwrap();
    let file = peers_file(&place.at(""), &members[0], &members, "");
    let more = vec!["--peers".into(), file.display().to_string()];
    let mount = Mount::on(place, Options { more, ..Options::default() });
    fs::read(mount.path("f")).unwrap();
    let address: SocketAddr = ([127, 0, 0, 1], members[0].port).into();
    let token = format!("Authorization: Bearer {}\r\n", TOKEN.replace(' ', "-"));
    let rest = "Forebay-Node: x\r\nForebay-Purpose: if-resident\r\nRange: bytes=0-6\r\nIf-Match: \"%7b%7d\"\r\n";
    for (path, head, status) in [
        ("/peer/v1/content/f", String::new(), 401),
        ("/peer/v1/content/f", "Authorization: Bearer other\r\n".into(), 401),
        ("/peer/v1/content/f", token.clone(), 400),
        ("/peer/v1/content/f", format!("{token}{rest}"), 400),
        ("/peer/v1/content/../../etc/passwd", format!("{token}{rest}"), 400),
        ("/peer/v1/content/%2e%2e/x", format!("{token}{rest}"), 400),
        ("/", token.clone(), 400),
        ("/peer/v1/changed", String::new(), 401),
        ("/peer/v1/changed", token.clone(), 400),
    ] {
        let answer = http::get(address, path, &head).unwrap();
        assert_eq!(answer.status, status, "{path} {head}: {answer:?}");
        assert!(!answer.body.contains("content\0") && answer.body != "content", "{answer:?}");
    }
    need(&["curl"]);
    let url = format!("http://{address}/peer/v1/changed");
    let post = |token: &str, body: &str| {
        let mut curl = Command::new("curl");
        curl.args(["-s", "-o", "/dev/null", "-w", "%{http_code}", "-H", token, "--data-binary", body, &url]);
        run(&mut curl, COMMAND).ok().out
    };
    let long = "a/".repeat(200) + "b\n";
    for (token, body, status) in [
        ("X: y", "f\n", "401"),
        (token.trim_end(), "f\nnot/there\n%2e%2e/x\n../x\n%00\n\n", "200"),
        (token.trim_end(), &long, "200"),
        (token.trim_end(), &long.repeat(164), "400"),
    ] {
        assert_eq!(post(token, body), status, "{token} {}", &body[..body.len().min(100)]);
    }
    assert_eq!(fs::read(mount.path("f")).unwrap(), b"content");
}

/// Opens the directory below `top` that has these names above it and its own, one after the other: together, they are longer
/// than the path of a call may be.
fn deep(top: &Path, names: &[String], makes: bool) -> OwnedFd {
    let directory = OFlags::RDONLY | OFlags::DIRECTORY;
    let mut at = rustix::fs::open(top, directory, Mode::empty()).unwrap();
    for name in names {
        if makes {
            rustix::fs::mkdirat(&at, name.as_str(), Mode::from_raw_mode(0o755)).unwrap();
        }
        at = rustix::fs::openat(&at, name.as_str(), directory, Mode::empty()).unwrap();
    }
    at
}

/// The head of an HTTP request has a bound, and each byte of these names is escaped.
#[test]
fn a_file_whose_path_is_too_long_for_a_request_makes_no_peer_suspected() {
    const FILES: u64 = 20;
    let _alone = alone();
    let pool = Place::new();
    let dir = pool.pool();
    let names = vec!["\u{e9}".repeat(127); 45];
    let bytes = content(99, 30_000);
    let make =
        rustix::fs::openat(deep(&dir, &names, true), "f", OFlags::WRONLY | OFlags::CREATE, Mode::RUSR | Mode::WUSR);
    fs::File::from(make.unwrap()).write_all(&bytes).unwrap();
    for at in 0..FILES {
        fs::write(dir.join(format!("f{at}")), content(at, 30_000)).unwrap();
    }
    let url = dir.to_str().unwrap().to_owned();
    let remote = Remote { url, tree: Arc::new(tree::Files(dir.clone())), environment: BTreeMap::new() };
    let mounts = nodes(&addresses(2), &Options { remote: Some(remote), ..Options::default() });
    for mount in &mounts {
        let at = deep(&mount.place.mnt(), &names, false);
        let mut read = Vec::new();
        let file = rustix::fs::openat(at, "f", OFlags::RDONLY, Mode::empty()).unwrap();
        fs::File::from(file).read_to_end(&mut read).unwrap();
        assert!(read == bytes);
        for at in 0..FILES {
            assert!(fs::read(mount.path(format!("f{at}"))).unwrap() == content(at, 30_000));
        }
    }
    let counters: Vec<_> = mounts.iter().map(|mount| mount.status().counters).collect();
    let from_peers: u64 = counters.iter().map(|counters| counters.peer_read_bytes).sum();
    assert_eq!(from_peers, FILES * 30_000, "all other files");
    for mount in &mounts {
        let status = peers(mount);
        assert!(status.members.iter().all(|member| member.state != PeerState::Suspected), "{status:?}");
        assert_eq!(passed_over(mount, "gone"), 0, "{status:?}");
    }
}
