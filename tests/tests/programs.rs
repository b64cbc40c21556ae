//! Common programs on the mount: git, a compiler, sqlite, rsync.

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc;
use std::time::Duration;

use forebay_tests::mount::{Mount, Options, alone, content};
use forebay_tests::process::{self, need, sh, sources};

const LIMIT: Duration = Duration::from_secs(120);

/// Makes a repository beside the mount: the C sources of lz4 with a makefile, in two commits and on two branches.
fn repository(place: &Path) {
    let lz4 = sources("lz4-sys").join("liblz4/lib");
    fs::write(
        place.join("Makefile"),
        "CFLAGS = -O1 -DXXH_NAMESPACE=LZ4_\n\
         OBJECTS = $(patsubst %.c,%.o,$(wildcard *.c))\n\
         check: $(OBJECTS)\n\t$(CC) -o $@ $^\n\t./check\n",
    )
    .unwrap();
    fs::write(
        place.join("main.c"),
        "#include <string.h>\n#include <stdio.h>\n#include \"lz4.h\"\n\
         int main(void) {\n  char in[4096], packed[8192], out[4096];\n\
         for (int i = 0; i < 4096; i++) in[i] = i * i >> 5;\n\
         int n = LZ4_compress_default(in, packed, 4096, 8192);\n\
         int m = LZ4_decompress_safe(packed, out, n, 4096);\n\
         printf(\"%d\\n\", m);\n  return m != 4096 || memcmp(in, out, 4096);\n}\n",
    )
    .unwrap();
    let script = format!(
        "git init -q -b main repo && cd repo && git config user.name t && git config user.email t@example.org
         cp {}/*.[ch] . && git add . && git commit -qm sources
         git checkout -qb program && cp ../Makefile ../main.c . && git add . && git commit -qm program",
        lz4.display()
    );
    sh(place, &script, LIMIT);
}

/// As on any file system, the open fails with `ETXTBSY`, and the program runs on.
#[test]
fn running_programs_are_not_opened_for_writing_nor_emptied() {
    let _alone = alone();
    let mount = Mount::new(Options::default());
    let program = mount.path("program");
    fs::copy("/bin/sleep", &program).unwrap();
    let size = fs::metadata(&program).unwrap().len();
    for round in 0..50 {
        let mut running = Command::new(&program).arg("60").spawn().unwrap();
        let mut truncating = fs::File::options();
        truncating.read(true).custom_flags(libc::O_TRUNC);
        for options in [fs::File::options().write(true), fs::File::options().append(true), &truncating] {
            let refused = options.open(&program).map(drop).unwrap_err();
            assert_eq!(refused.raw_os_error(), Some(libc::ETXTBSY), "round {round}");
        }
        assert!(running.try_wait().unwrap().is_none(), "round {round}: the program was killed");
        running.kill().unwrap();
        running.wait().unwrap();
    }
    assert_eq!(fs::metadata(&program).unwrap().len(), size);
    // The program does not run any more.
    fs::File::options().read(true).custom_flags(libc::O_TRUNC).open(&program).unwrap();
    assert_eq!(fs::metadata(&program).unwrap().len(), 0);
}

#[test]
fn git_clones_builds_and_finds_nothing_wrong() {
    need(&["git", "make", "gcc"]);
    let _alone = alone();
    let mount = Mount::new(Options::default());
    repository(&mount.place.native());
    let script = "
        export GIT_CONFIG_COUNT=1 GIT_CONFIG_KEY_0=safe.directory GIT_CONFIG_VALUE_0='*'
        git clone -q --no-local \"$NATIVE/repo\" one
        git clone -q one two
        cd two
        make -s -j2 check
        git fsck --full --strict
        test -z \"$(git status --porcelain -uno)\"
        git checkout -q -b other origin/program~1 2>/dev/null || git checkout -q -b other HEAD~1
        test ! -e main.c
        git checkout -q program
        git gc -q --aggressive --prune=now
        git fsck --full --strict
        cd .. && git -C one fsck --full --strict";
    let script = format!("NATIVE={}; {script}", mount.place.native().display());
    sh(&mount.place.mnt(), &script, LIMIT);
    mount.flush();
    let check =
        "git -c safe.directory='*' -C two fsck --full --strict && git -c safe.directory='*' -C two diff --quiet";
    sh(&mount.place.pool(), check, LIMIT);
}

#[test]
fn untarred_sources_are_the_same_and_compile() {
    need(&["tar", "gcc", "diff"]);
    let _alone = alone();
    let mount = Mount::new(Options::default());
    let rocksdb = sources("librocksdb-sys");
    let (parent, name) = (rocksdb.parent().unwrap(), rocksdb.file_name().unwrap().to_str().unwrap());
    let native = mount.place.native();
    sh(&native, &format!("tar -C {} -cf sources.tar {name}", parent.display()), LIMIT);
    sh(&mount.place.mnt(), &format!("tar -xf {}/sources.tar && mv {name} tree", native.display()), LIMIT);
    sh(&mount.place.mnt(), &format!("diff -r --no-dereference tree {}", rocksdb.display()), LIMIT);
    repository(&native);
    let compile = format!(
        "mkdir build && cp {}/repo/* build/ && make -s -C build -j2 check && cd tree/rocksdb
         for file in coding hash slice; do
             g++ -std=c++20 -O0 -DROCKSDB_PLATFORM_POSIX -DROCKSDB_LIB_IO_POSIX -DOS_LINUX -I. -Iinclude \
                 -c util/$file.cc -o ../../build/$file.o
         done",
        native.display()
    );
    sh(&mount.place.mnt(), &compile, LIMIT);
    mount.flush();
    sh(&mount.place.pool(), &format!("diff -r --no-dereference tree {}", rocksdb.display()), LIMIT);
}

/// Makes a tree with everything that `rsync -aHAX` can carry.
fn tree(at: &Path) {
    let script = "
        mkdir -p a/b/c empty && cd a
        printf one > one && ln one b/two && ln one b/c/three
        ln -s ../one b/symlink && ln -s /nowhere dangling
        head -c 3000000 /dev/urandom > big && cp --sparse=always big hole && truncate -s 50M hole
        setfattr -n user.name -v value one && setfattr -n user.empty b
        setfacl -m u:daemon:rw,g:daemon:r one && setfacl -d -m u:daemon:rwx b
        mkfifo fifo && mknod zero c 1 5
        chown daemon:daemon big && chmod 6751 big && chmod 1777 b/c
        touch -d '1999-12-31 23:59:59.123456789' one && touch -d '2050-01-01 00:00:00.000000001' big
        for i in $(seq 300); do echo $i > b/file-$i; done
        touch -h -d '2001-02-03 04:05:06.789' b/symlink
        touch -d '2010-10-10 10:10:10.101010101' b/c b empty .";
    sh(at, script, LIMIT);
}

const RSYNC: &str = "rsync -aHAX --numeric-ids";

/// SEMANTICS 24: "Modes, owners, times to the nanosecond, extended attributes and ACLs reach the pool."
#[test]
fn rsync_there_and_back_leaves_no_difference() {
    need(&["rsync", "setfacl", "setfattr"]);
    let _alone = alone();
    let mount = Mount::new(Options::default());
    let native = mount.place.native();
    fs::create_dir(native.join("from")).unwrap();
    tree(&native.join("from"));
    let same = |from: &Path, to: &Path| {
        let script = format!("{RSYNC} -in --checksum --delete {}/ {}/", from.display(), to.display());
        let answer = sh(&native, &script, LIMIT);
        assert!(answer.out.trim().is_empty(), "{} is not {}:\n{}", to.display(), from.display(), answer.out);
    };
    let copy = |from: &Path, to: &Path| {
        sh(&native, &format!("{RSYNC} {}/ {}/", from.display(), to.display()), LIMIT);
        same(from, to);
    };
    let (from, there, back) = (native.join("from"), mount.path("there"), native.join("back"));
    copy(&from, &there);
    mount.flush();
    same(&from, &mount.pool("there"));
    mount.forebay(["evict"], &[&there]).ok();
    copy(&there, &back);
    same(&from, &back);
    assert_eq!(fs::metadata(mount.pool("there/a/one")).unwrap().nlink(), 3);
    sh(&from, "rm a/b/two a/b/file-1* && mv a/big a/b/moved && printf two >> a/one", LIMIT);
    sh(&native, &format!("{RSYNC} --delete {}/ {}/", from.display(), there.display()), LIMIT);
    mount.flush();
    same(&from, &mount.pool("there"));
}

/// A sqlite3 process that inserts one row after the other, and the last row that it acknowledged.
struct Writer {
    child: Child,
    acknowledged: mpsc::Receiver<u64>,
    sent: u64,
}

const SETUP: &str = "PRAGMA journal_mode=WAL; PRAGMA synchronous=FULL;
    CREATE TABLE IF NOT EXISTS t(n INTEGER PRIMARY KEY, text TEXT);";

fn row(n: u64) -> String {
    content(n, 600).iter().map(|b| format!("{b:02x}")).collect()
}

impl Writer {
    /// Starts to insert at row `next`.
    fn start(database: &Path, next: u64) -> Self {
        let mut child = Command::new("stdbuf")
            .args(["-oL", "sqlite3", "-batch"])
            .arg(database)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .process_group(0)
            .spawn()
            .unwrap();
        let mut stdin = child.stdin.take().unwrap();
        let stdout = child.stdout.take().unwrap();
        let (tell, acknowledged) = mpsc::channel();
        std::thread::spawn(move || {
            for line in BufReader::new(stdout).lines().map_while(Result::ok) {
                if let Some(n) = line.strip_prefix("ok ").and_then(|n| n.parse().ok()) {
                    let _ = tell.send(n);
                }
            }
        });
        std::thread::spawn(move || {
            let _ = writeln!(stdin, ".timeout 10000\n.bail on");
            for n in next.. {
                if writeln!(stdin, "INSERT INTO t VALUES({n}, '{}'); SELECT 'ok {n}';", row(n)).is_err() {
                    break;
                }
            }
        });
        Self { child, acknowledged, sent: next - 1 }
    }

    /// Returns when `rows` more rows were acknowledged.
    fn wait_for(&mut self, rows: u64) {
        let until = self.sent + rows;
        while self.sent < until {
            let next = self.acknowledged.recv_timeout(Duration::from_secs(120));
            self.sent = next.unwrap_or_else(|e| panic!("no row after {} was acknowledged: {e}", self.sent));
        }
    }

    /// Kills the process with `kill -9`. Returns the last row that it acknowledged.
    fn kill(mut self) -> u64 {
        process::kill_group(self.child.id());
        process::wait(&mut self.child, Duration::from_secs(30)).expect("it ends when it is killed");
        while let Ok(n) = self.acknowledged.recv_timeout(Duration::from_millis(200)) {
            self.sent = n;
        }
        self.sent
    }
}

/// Checks every row, and returns their number.
fn check(database: &Path, acknowledged: u64) -> u64 {
    let mut sqlite = Command::new("sqlite3");
    sqlite.arg("-batch").arg(database).arg("PRAGMA integrity_check; SELECT n || ' ' || text FROM t ORDER BY n;");
    let answer = process::run(&mut sqlite, LIMIT).ok();
    let mut lines = answer.out.lines();
    assert_eq!(lines.next(), Some("ok"), "integrity_check: {answer}");
    let mut rows = 0;
    for line in lines {
        rows += 1;
        let (n, text) = line.split_once(' ').unwrap();
        assert!(n == rows.to_string() && text == row(rows), "row {rows} is {n}, and not as it was written");
    }
    assert!(rows >= acknowledged, "{acknowledged} rows were acknowledged, {rows} are there");
    rows
}

#[test]
fn sqlite_keeps_committed_transactions_when_writer_and_daemon_are_killed() {
    need(&["sqlite3", "stdbuf"]);
    let _alone = alone();
    let mount = Mount::new(Options::policy("[default]\nflush = \"idle:1s\"\n"));
    let database = mount.path("data.db");
    process::run(Command::new("sqlite3").arg(&database).arg(SETUP), LIMIT).ok();
    let mut rows = 0;
    for round in 0..12 {
        let mut writer = Writer::start(&database, rows + 1);
        writer.wait_for(20 + 7 * round);
        match round % 3 {
            // The worker dies, and sqlite goes on with the files that it has open.
            0 | 1 => {
                let old = mount.worker();
                mount.kill_worker();
                mount.wait_for_other_worker(old);
                writer.wait_for(50);
                rows = check(&database, writer.kill());
            }
            // All processes of the mount die, and then sqlite.
            _ => {
                mount.kill_all();
                let acknowledged = writer.kill();
                mount.mount();
                rows = check(&database, acknowledged);
            }
        }
    }
    process::run(Command::new("sqlite3").arg(&database).arg("PRAGMA wal_checkpoint(TRUNCATE);"), LIMIT).ok();
    mount.flush();
    assert_eq!(check(&mount.pool("data.db"), rows), rows);
    println!("{rows} rows");
}
