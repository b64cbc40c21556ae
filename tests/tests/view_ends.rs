//! Mounts of views that are taken away again, and views that cannot be made.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};

use forebay_api::views::{View, ViewVerb};
use forebay_daemon::protocol::{Reply, Request};
use forebay_daemon::registry::{self, RegisteredMount};
use forebay_daemon::{Failure, FailureKind, client, view_mounts};
use forebay_system::bind;
use forebay_system::mounts::{self, MountEntry};
use forebay_tests::mount::{COMMAND, Mount, Place, content};
use forebay_tests::process::{Answer, forebay, need, run, wait_until};
use rustix::fs::{CWD, RenameFlags, renameat_with};
use rustix::mount::{UnmountFlags, mount_bind, unmount};

const USAGE: i32 = 2;

/// Takes the mounts below a directory away when it is dropped.
struct LeftMounts(PathBuf);

impl Drop for LeftMounts {
    fn drop(&mut self) {
        for at in mounts::list().unwrap().iter().rev().filter(|at| at.mountpoint.starts_with(&self.0)) {
            let _ = unmount(&at.mountpoint, UnmountFlags::DETACH | UnmountFlags::NOFOLLOW);
        }
    }
}

/// A process that ends with the test.
struct Killed(Child);

impl Drop for Killed {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn mounted_at(path: &Path) -> Option<MountEntry> {
    mounts::list().unwrap().into_iter().rev().find(|at| at.mountpoint == path)
}

fn stage(mount: &Mount, path: &str) -> Answer {
    run(Command::new(forebay()).args(["stage", "--view"]).arg(mount.path(path)), COMMAND)
}

fn registered(mount: &Mount) -> RegisteredMount {
    registry::entries().into_iter().find(|entry| entry.mountpoint() == mount.place.mnt()).unwrap()
}

fn ask(entry: &RegisteredMount, verb: ViewVerb) -> Result<Vec<Reply>, Failure> {
    client::call(entry, &Request::View(verb))?.collect()
}

fn view(entry: &RegisteredMount) -> View {
    let replies = ask(entry, ViewVerb::List).unwrap();
    let views = replies.into_iter().find_map(|reply| if let Reply::Views(views) = reply { Some(views) } else { None });
    views.unwrap().pop().unwrap()
}

/// A user who owns a directory above a view could make root detach any other mount.
#[test]
fn a_link_in_the_place_of_a_directory_does_not_lead_to_another_mount() {
    for lazy in [true, false] {
        let place = Place::new();
        let _left = LeftMounts(place.at("views"));
        let at = |path: &str| place.at("views").join(path);
        for dir in ["one", "two", "user/dir/home", "other/home"] {
            fs::create_dir_all(at(dir)).unwrap();
        }
        mount_bind(at("one"), at("user/dir/home")).unwrap();
        mount_bind(at("two"), at("other/home")).unwrap();
        symlink(at("other"), at("user/link")).unwrap();
        let view = mounted_at(&at("user/dir/home")).unwrap();
        renameat_with(CWD, at("user/dir"), CWD, at("user/link"), RenameFlags::EXCHANGE).unwrap();
        bind::detach(&view, lazy).unwrap();
        assert!(mounted_at(&at("other/home")).is_some(), "lazy: {lazy}");
        assert!(mounted_at(&at("user/link/home")).is_none(), "lazy: {lazy}");
        bind::detach(&view, lazy).unwrap();
    }
}

#[test]
fn a_view_that_ended_before_it_was_mounted_is_not_left_over_its_path() {
    need(&["unshare"]);
    let mount = Mount::manual();
    fs::create_dir(mount.pool("data")).unwrap();
    fs::write(mount.pool("data/f"), content(1, 1 << 16)).unwrap();
    stage(&mount, "data").ok();
    let entry = registered(&mount);
    let refused = ask(&entry, ViewVerb::Mounted { id: "view-999".into() }).unwrap_err();
    // Older daemons, which do not know the request, answer with `Usage`.
    assert_ne!(refused.kind, FailureKind::Usage, "{refused}");
    let view = view(&entry);
    ask(&entry, ViewVerb::Mounted { id: view.id.clone() }).unwrap();
    view_mounts::detach(&view, false).unwrap();
    // A client mounts it, and is told that the view has ended.
    let attached = view_mounts::attach(&entry, &view, None).unwrap();
    assert!(view_mounts::is_mounted(&entry, &view));
    attached.take_away().unwrap();
    assert!(!view_mounts::is_mounted(&entry, &view));
    let job =
        Killed(Command::new("unshare").args(["--mount", "--propagation", "slave", "sleep", "60"]).spawn().unwrap());
    let namespace = |pid: &str| fs::read_link(format!("/proc/{pid}/ns/mnt")).ok();
    let pid = job.0.id();
    wait_until("it has its namespace", || {
        namespace(&pid.to_string()).is_some_and(|namespace_of_job| Some(namespace_of_job) != namespace("self"))
    });
    let seen = || fs::read_to_string(format!("/proc/{pid}/mountinfo")).unwrap().contains("/content/views/view-");
    let attached = view_mounts::attach(&entry, &view, Some(pid)).unwrap();
    assert!(seen() && !view_mounts::is_mounted(&entry, &view));
    attached.take_away().unwrap();
    assert!(!seen());
    ask(&entry, ViewVerb::End { id: view.id }).unwrap();
    assert_eq!(fs::read(mount.path("data/f")).unwrap(), content(1, 1 << 16));
}

#[test]
fn a_view_with_very_long_paths_is_refused() {
    let mount = Mount::manual();
    let deep: PathBuf = std::iter::once("data".to_owned()).chain((0..13).map(|_| "d".repeat(240))).collect();
    fs::create_dir_all(mount.pool(&deep)).unwrap();
    fs::write(mount.pool(&deep).join("f"), "x").unwrap();
    stage(&mount, "data").refused(USAGE, &["a path in it has", "of 3000 at most"]);
    assert_eq!(fs::read(mount.path(&deep).join("f")).unwrap(), b"x");
    assert!(mounts::list().unwrap().iter().all(|at| at.mountpoint != mount.path("data")));
    // Another worker starts.
    let old = mount.worker();
    mount.kill_worker();
    mount.wait_for_other_worker(old);
    assert_eq!(fs::read(mount.path(&deep).join("f")).unwrap(), b"x");
}
