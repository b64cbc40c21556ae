//! Read-only pools behind real servers, through the mount.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use forebay_tests::mount::{Mount, Options, Place, alone, content};
use forebay_tests::process::{Answer, forebay, run, sh, wait_until};
use forebay_tests::servers::Remote;
use forebay_tests::servers::stores::{Kind, StoreServer};
use forebay_tests::tree::Files;
use tokio::runtime::Runtime;

const LIMIT: Duration = Duration::from_secs(60);
/// Servers report times in whole seconds.
const NEXT_SECOND: Duration = Duration::from_millis(1_100);
const INCOMPLETE: i32 = 1;

/// A server, the runtime of its client, and the files that were put there.
struct Served {
    server: StoreServer,
    runtime: Runtime,
    files: BTreeMap<String, Vec<u8>>,
}

impl Served {
    fn start(kind: Kind) -> Self {
        let runtime = Runtime::new().unwrap();
        let server = runtime.block_on(StoreServer::start(kind));
        let mut served = Self { server, runtime, files: BTreeMap::new() };
        let names = ["a/b/c/deep", "a/b/file", "a/empty", "with space/100% #1?&+", "ünïcode", "large"];
        for (n, name) in names.into_iter().enumerate() {
            let length = [10, 4_096, 0, 100_000, 1, 9 << 20][n];
            served.put(name, content(n as u64, length));
        }
        for n in 0..1_200 {
            served.put(&format!("many/{n:04}"), n.to_string().into_bytes());
        }
        served
    }

    fn put(&mut self, name: &str, content: Vec<u8>) {
        self.runtime.block_on(self.server.put(name, content.clone().into())).unwrap();
        self.files.insert(name.to_owned(), content);
    }

    fn remote(&self) -> Remote {
        let tree = Arc::new(Files(self.server.files()));
        Remote { url: self.server.url(""), tree, environment: self.server.environment() }
    }

    fn mount(&self) -> Mount {
        // Some of these servers answer few requests at a time.
        let patient = Options::policy("[pool]\ndeadline = \"60s\"\n");
        Mount::new(Options { remote: Some(self.remote()), ..patient })
    }

    fn doctor(&self, words: &[&str]) -> Answer {
        let remote = self.remote();
        let mut command = Command::new(forebay());
        run(command.args(["doctor", "--pool", &remote.url]).args(words).envs(&remote.environment), LIMIT)
    }

    /// Checks that a directory shows the files that were put on the server, and nothing else.
    #[track_caller]
    fn assert_shown_at(&self, dir: &Path) {
        let shown = sh(dir, "find . -type f -printf '%P\\n' | sort", LIMIT).out;
        let mut shown: Vec<_> = shown.lines().collect();
        shown.sort_unstable();
        assert_eq!(shown, self.files.keys().collect::<Vec<_>>());
        for (name, content) in &self.files {
            assert!(fs::read(dir.join(name)).unwrap() == *content, "{name} differs");
        }
    }
}

#[track_caller]
fn refused<T>(what: &str, answer: io::Result<T>) {
    let errno = answer.err().and_then(|error| error.raw_os_error());
    assert_eq!(errno, Some(libc::EROFS), "{what}");
}

fn is_read_and_not_changed(kind: Kind) {
    let _alone = alone();
    let mut served = Served::start(kind);
    let mount = served.mount();
    served.assert_shown_at(&mount.path(""));

    let (file, new) = (mount.path("a/b/file"), mount.path("a/new"));
    refused("create", File::create(&new));
    refused("open to write", File::options().write(true).open(&file));
    refused("mkdir", fs::create_dir(&new));
    refused("remove", fs::remove_file(&file));
    refused("rmdir", fs::remove_dir(mount.path("a/b/c")));
    refused("rename", fs::rename(&file, &new));
    refused("symlink", std::os::unix::fs::symlink("a", &new));
    refused("chmod", fs::set_permissions(&file, fs::Permissions::from_mode(0o600)));
    assert_eq!(mount.status().dirty_files, 0);

    std::thread::sleep(NEXT_SECOND);
    served.put("a/b/file", content(77, 5_000));
    served.put("large", content(78, 9 << 20));
    for name in ["a/b/file", "large"] {
        assert!(fs::read(mount.path(name)).unwrap() == served.files[name], "{name} is still the old one");
    }
    mount.umount();
    mount.mount();
    served.assert_shown_at(&mount.path(""));

    let dry = served.doctor(&["--dry-run"]).ok();
    assert!(dry.out.contains("changes") && dry.out.contains("names are listed"), "{dry}");
    served.doctor(&[]).refused(INCOMPLETE, &["is read-only"]);
}

#[test]
fn google_is_read_and_not_changed() {
    is_read_and_not_changed(Kind::FakeGcs);
}

#[test]
fn azure_is_read_and_not_changed() {
    is_read_and_not_changed(Kind::Azurite);
}

#[test]
fn index_pages_of_nginx_are_read_and_not_changed() {
    is_read_and_not_changed(Kind::Nginx);
}

/// nginx does not list names that begin with a dot, and sends an index.html in place of a list.
#[test]
fn names_that_an_index_page_hides_are_found() {
    let _alone = alone();
    let mut served = Served::start(Kind::Nginx);
    served.put("hidden/.dot", b"dot".to_vec());
    served.put("hidden/shown", b"shown".to_vec());
    served.put("paged/index.html", b"<html><a href=\"elsewhere\">elsewhere</a></html>".to_vec());
    // More than are looked up one by one where a listing tells all names.
    let names: Vec<String> = (0..50).map(|n| format!("paged/{n}")).collect();
    names.iter().for_each(|name| served.put(name, name.clone().into_bytes()));
    let mount = served.mount();
    let listed =
        |dir: &str| fs::read_dir(mount.path(dir)).unwrap().map(|entry| entry.unwrap().file_name()).collect::<Vec<_>>();
    assert_eq!(listed("hidden"), ["shown"]);
    assert_eq!(listed("paged"), ["elsewhere"; 0]);
    for name in names.iter().map(String::as_str).chain(["hidden/.dot", "paged/index.html"]) {
        assert!(fs::read(mount.path(name)).unwrap() == served.files[name], "{name}");
    }
    let absent = fs::read(mount.path("paged/none")).unwrap_err();
    assert_eq!(absent.kind(), io::ErrorKind::NotFound);
    // What is known is shown, until it is removed.
    std::thread::sleep(NEXT_SECOND * 2);
    assert_eq!((listed("hidden").len(), listed("paged").len()), (2, 51));
    fs::remove_file(served.server.files().join("paged/7")).unwrap();
    wait_until("the removed file is not shown", || listed("paged").len() == 50);
    assert_eq!(fs::read(mount.path("paged/7")).unwrap_err().kind(), io::ErrorKind::NotFound);
}

#[test]
fn webdav_is_read_and_not_changed() {
    is_read_and_not_changed(Kind::NginxDav);
}

#[test]
fn index_pages_of_python_are_read_and_not_changed() {
    is_read_and_not_changed(Kind::Python);
}

#[test]
fn stores_are_directories_of_a_mixed_root() {
    let _alone = alone();
    let (azure, web) = (Served::start(Kind::Azurite), Served::start(Kind::Nginx));
    let place = Place::new();
    let table = |name: &str, served: &Served| {
        format!("[[pool]]\nname = \"{name}\"\nurl = \"{}\"\nlimit = \"1G\"\n", served.remote().url)
    };
    let config = place.at("forebay.toml");
    fs::write(&config, table("azure", &azure) + &table("web", &web)).unwrap();
    let mut command = Command::new(forebay());
    command.arg("mount").arg("--config").arg(&config).arg(place.mnt()).arg("--fast").arg(place.fast());
    run(command.envs(azure.server.environment()), LIMIT).ok();
    azure.assert_shown_at(&place.mnt().join("azure"));
    web.assert_shown_at(&place.mnt().join("web"));
    refused("create", File::create(place.mnt().join("web/new")));
    run(Command::new(forebay()).arg("umount").arg(place.mnt()), LIMIT).ok();
}

/// A program that knows the paths can read the files.
#[test]
fn a_server_that_lists_no_names_is_read_by_paths() {
    let _alone = alone();
    let served = Served::start(Kind::NginxBare);
    let dry = served.doctor(&["--dry-run"]).ok();
    let row = dry.out.lines().find(|line| line.contains("names are listed")).unwrap().to_owned();
    assert!(row.trim_end().ends_with("no"), "{row}");
    let mount = served.mount();
    for (name, content) in &served.files {
        assert!(fs::read(mount.path(name)).unwrap() == *content, "{name} differs");
    }
    for n in 0..100 {
        assert!(!mount.path(format!("a/nothing-{n}")).exists());
    }
    let listed = fs::read_dir(mount.path("a")).and_then(|mut entries| entries.next().transpose());
    assert_eq!(listed.unwrap_err().raw_os_error(), Some(libc::EOPNOTSUPP));
}
