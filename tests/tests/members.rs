//! Which records in etcd make a node a member.

use std::fs;
use std::net::TcpListener;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use forebay_tests::cluster::{addresses, node_with, peers};
use forebay_tests::mount::{Mount, Options, alone, content};
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
