//! What makes a node a member: an entry in the peers file, or a record in etcd.

use std::fs;
use std::net::TcpListener;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use forebay_api::peers::PeerState;
use forebay_tests::cluster::{NodeAddress, addresses, node_with, peers, peers_file};
use forebay_tests::mount::{Mount, Options, Place, alone, attempt, content};
use forebay_tests::process::wait_until;
use forebay_tests::servers::Server;
use forebay_tests::servers::etcd::Etcd;
use forebay_tests::servers::s3::Versitygw;

/// SECURITY 20: "A record that another client of etcd writes does not become a member"
#[test]
fn a_record_in_etcd_without_the_code_of_the_token_makes_no_member() {
    const FILES: u64 = 12;
    let _alone = alone();
    let (server, etcd) = (Versitygw::start(), Etcd::start("127.0.0.1"));
    for at in 0..FILES {
        fs::write(server.files().join(format!("f{at}")), content(at, 30_000)).unwrap();
    }
    let stranger = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = stranger.local_addr().unwrap();
    let connections = Arc::new(AtomicUsize::new(0));
    let counted = connections.clone();
    thread::spawn(move || stranger.incoming().for_each(|_| _ = counted.fetch_add(1, Ordering::SeqCst)));
    let record = |id: &str, more: &str| {
        let text = format!("{{\"id\":\"{id}\",\"address\":\"{address}\",\"role\":\"cache\"{more}}}");
        etcd.put(&format!("/forebay/test/members/{id}"), &text);
    };
    record("stranger", "");
    record("another", ",\"code\":\"AAAA\"");
    let lines = format!("[etcd]\nname = \"test\"\nendpoints = [\"http://127.0.0.1:{}\"]", etcd.port());
    let options = Options { remote: Some(server.remote()), ..Options::default() };
    let mounts: Vec<Mount> = addresses(2).iter().map(|this| node_with(this, &[], &lines, options.clone())).collect();
    let names = |mount: &Mount| peers(mount).members.into_iter().map(|member| member.node).collect::<Vec<_>>();
    wait_until("both know each other", || mounts.iter().all(|mount| names(mount).contains(&"n1".to_owned())));
    wait_until("both know each other", || mounts.iter().all(|mount| names(mount).contains(&"n0".to_owned())));
    // Comes while both watch.
    record("late", "");
    for (at, mount) in mounts.iter().enumerate() {
        for file in 0..FILES {
            assert!(fs::read(mount.path(format!("f{file}"))).unwrap() == content(file, 30_000));
        }
        fs::write(mount.path(format!("written by {at}")), "content").unwrap();
        mount.flush();
        wait_until("the other member is told", || peers(mount).announced > 0);
    }
    for mount in &mounts {
        wait_until("the late record was read", || mount.log().contains("etcd: 3 records are of no member"));
        let mut names = names(mount);
        names.sort();
        assert_eq!(names, ["n0", "n1"]);
    }
    assert_eq!(connections.load(Ordering::SeqCst), 0, "a client without the token was asked");
}

#[test]
fn a_bad_peers_file_is_refused_and_a_changed_one_is_taken() {
    let _alone = alone();
    let place = Place::new();
    let (this, other) = (NodeAddress::new("this"), NodeAddress::new("other"));
    let file = peers_file(&place.at(""), &this, &[], "placement = \"somewhere\"");
    let options = Options { more: vec!["--peers".into(), file.display().to_string()], ..Options::default() };
    attempt(&place, &options).refused(2, &["peers.toml", "somewhere", "CLUSTER.md"]);
    peers_file(&place.at(""), &this, &[], "");
    let mount = Mount::on(place, options);
    assert_eq!(peers(&mount).members.len(), 1);
    peers_file(&mount.place.at(""), &this, &[this.clone(), other], "");
    wait_until("the new member is known", || peers(&mount).members.len() == 2);
    let state = |name: &str| peers(&mount).members.iter().find(|member| member.node == name).map(|m| m.state);
    assert_eq!((state("this"), state("other")), (Some(PeerState::This), Some(PeerState::Trusted)));
    peers_file(&mount.place.at(""), &NodeAddress::new("another"), &[], "");
    wait_until("the fault is told", || mount.log().contains("the peers file says node = \"another\""));
    assert_eq!((state("this"), state("other")), (Some(PeerState::This), Some(PeerState::Trusted)));
    fs::write(&file, "listen = 1").unwrap();
    wait_until("the fault is told", || mount.log().contains("the members stay as they are"));
    assert_eq!(peers(&mount).members.len(), 2);
    let without = Mount::new(Options::default());
    without.forebay(["peers"], &[&without.place.mnt()]).refused(2, &["has no peers", "--peers FILE"]);
}

/// SEMANTICS 11: "If a worker dies, another one replaces it." The mount serves, whatever became of its peers file.
#[test]
fn a_worker_that_starts_again_serves_without_a_peers_file_until_it_can_be_read() {
    let _alone = alone();
    let (place, this) = (Place::new(), NodeAddress::new("this"));
    let file = peers_file(&place.at(""), &this, std::slice::from_ref(&this), "");
    let mount =
        Mount::on(place, Options { more: vec!["--peers".into(), file.display().to_string()], ..Options::default() });
    fs::write(mount.path("a"), "a").unwrap();
    fs::write(&file, "placement = ").unwrap();
    let worker = mount.worker();
    mount.kill_worker();
    mount.wait_for_other_worker(worker);
    assert_eq!(fs::read(mount.path("a")).unwrap(), b"a");
    mount.forebay(["peers"], &[&mount.place.mnt()]).refused(2, &["has no peers"]);
    assert!(mount.log().contains("serves without peers"), "{}", mount.log());
    peers_file(&mount.place.at(""), &this, std::slice::from_ref(&this), "");
    wait_until("the peers are known", || mount.forebay(["peers"], &[&mount.place.mnt()]).code == Some(0));
    assert_eq!(peers(&mount).members.len(), 1);
}
