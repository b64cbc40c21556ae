//! Rules and files: what is decided for each file.

use forebay_backends::FileKind;
use proptest::prelude::*;

use super::super::*;

/// Rules of a site, one for each condition and setting.
const SITE: &str = r#"
[default]
flush = "idle:10s"
whole-file = "8MiB"

[[rule]]
name = "homes"
paths = "home/**"
flush = "idle:1s"
priority = "high"

[[rule]]
name = "scratch"
paths = ["scratch/**", "home/*/scratch/**"]
write = "local"

[[rule]]
name = "temporary"
paths = ["**/*.tmp", "**/core", "**/build-*/**"]
flush = "manual"

[[rule]]
name = "large"
size = "1GiB.."
read = "bypass"
readahead = "64MiB"

[[rule]]
name = "small configuration"
paths = "etc/**"
size = "..64KiB"
read = "pin"
consistency = "ttl:1m"

[[rule]]
name = "old data"
paths = "data/**"
written-ago = "30d.."
consistency = "immutable"
metadata-ttl = "1day"

[[rule]]
name = "user 1000"
owner = "1000"
whole-file = "1MiB"

[[rule]]
name = "group 50"
group = "50"
conflict = "ours"

[[rule]]
name = "directories"
type = "directory"
metadata-ttl = "2m"

[[rule]]
name = "training"
job = "train*"
flush = "job-end"

[[rule]]
name = "checkpoints"
paths = "ckpt/*/step-[0-9]*.pt"
profile = "resnet"
write = "through"
flush-deadline = "5m"

[[rule]]
name = "ssd"
storage-pool = "ssd"
consistency = "close-to-open"
read = "bypass"

[[rule]]
name = "logs"
paths = "**/*.log"
flush = "every:30s"
"#;

const DAY: u64 = 86_400;

/// `PATH [size=BYTES] [uid=N] [gid=N] [dir] [written=SECONDS] [job=NAME] [profile=NAME] [pool=NAME]`
fn decide(policy: &Policy, file: &str) -> PathPolicy {
    let mut words = file.split(' ');
    let path = PoolPath::parse(words.next().unwrap()).unwrap();
    let (mut facts, mut jobs) = (FileFacts::of_path(&path), Vec::new());
    for word in words {
        match word.split_once('=').unwrap_or((word, "")) {
            ("dir", _) => facts.kind = FileKind::Directory,
            ("size", size) => facts.size = size.parse().unwrap(),
            ("uid", uid) => facts.uid = uid.parse().unwrap(),
            ("gid", gid) => facts.gid = gid.parse().unwrap(),
            ("written", age) => facts.written_ago = Some(Duration::from_secs(age.parse().unwrap())),
            ("job", name) => jobs.push(JobFacts { name: name.into(), profile: None }),
            ("profile", name) => jobs.push(JobFacts { name: "j".into(), profile: Some(name.into()) }),
            ("pool", name) => facts.storage_pool = Some(name),
            _ => panic!("{word}"),
        }
    }
    facts.jobs = &jobs;
    policy.decide(&facts)
}

#[test]
fn every_case_is_decided_as_the_table_says() {
    let policy = Policy::parse(SITE).unwrap();
    let (month, young) = (30 * DAY, 30 * DAY - 1);
    let gib = 1u64 << 30;
    // For each file, what differs from the default: `setting=value`.
    let cases = [
        // Paths.
        ("a".to_owned(), ""),
        ("homes/a".into(), ""),
        ("home".into(), ""),
        ("home/a".into(), "flush=idle:1s priority=high"),
        ("home/anna/a/b/c".into(), "flush=idle:1s priority=high"),
        ("xhome/a".into(), ""),
        ("a/homes/b".into(), ""),
        ("scratch".into(), ""),
        ("scratch/a".into(), "write=local flush=manual"),
        ("scratch/a/b".into(), "write=local flush=manual"),
        ("home/anna/scratch/x".into(), "priority=high write=local flush=manual"),
        ("home/anna/b/scratch/x".into(), "flush=idle:1s priority=high"),
        ("home/scratch/x".into(), "flush=idle:1s priority=high"),
        ("x.tmp".into(), "flush=manual"),
        ("a/x.tmp".into(), "flush=manual"),
        ("a/b/.tmp".into(), "flush=manual"),
        ("a/b/x.tmp2".into(), ""),
        ("a/b/xtmp".into(), ""),
        ("a/x.tmp/b".into(), ""),
        ("core".into(), "flush=manual"),
        ("a/core".into(), "flush=manual"),
        ("a/core/b".into(), ""),
        ("a/core.1".into(), ""),
        ("build-1/a".into(), "flush=manual"),
        ("a/build-x/b/c".into(), "flush=manual"),
        ("a/build-x".into(), ""),
        ("a/build/x".into(), ""),
        ("home/a.tmp".into(), "flush=manual priority=high"),
        // Sizes.
        (format!("a size={}", gib - 1), ""),
        (format!("a size={gib}"), "read=bypass readahead=64MiB"),
        (format!("a size={}", 9 * gib), "read=bypass readahead=64MiB"),
        (format!("home/a size={gib}"), "read=bypass readahead=64MiB flush=idle:1s priority=high"),
        ("etc/a size=0".into(), "read=pin consistency=ttl:1m"),
        ("etc/a size=65535".into(), "read=pin consistency=ttl:1m"),
        ("etc/a size=65536".into(), ""),
        (format!("etc/a size={gib}"), "read=bypass readahead=64MiB"),
        ("b/etc/a size=1".into(), ""),
        // Ages.
        ("data/a".into(), ""),
        (format!("data/a written={young}"), ""),
        (format!("data/a written={month}"), "consistency=immutable metadata-ttl=1day"),
        (format!("data/a/b written={}", 99 * DAY), "consistency=immutable metadata-ttl=1day"),
        (format!("date/a written={}", 99 * DAY), ""),
        ("a written=1".into(), ""),
        // Owners, groups, kinds.
        ("a uid=1000".into(), "whole-file=1MiB"),
        ("a uid=1001".into(), ""),
        ("home/a uid=1000".into(), "whole-file=1MiB flush=idle:1s priority=high"),
        ("a gid=50".into(), "conflict=ours"),
        ("a gid=51".into(), ""),
        ("a uid=50".into(), ""),
        ("a gid=1000".into(), ""),
        ("a uid=1000 gid=50".into(), "whole-file=1MiB conflict=ours"),
        ("a dir".into(), "metadata-ttl=2m"),
        (format!("data/a dir written={month}"), "consistency=immutable metadata-ttl=2m"),
        ("home/a dir".into(), "metadata-ttl=2m flush=idle:1s priority=high"),
        // Jobs and profiles.
        ("a job=train".into(), "flush=job-end"),
        ("a job=train-7".into(), "flush=job-end"),
        ("a job=retrain".into(), ""),
        ("a job=x job=train".into(), "flush=job-end"),
        ("a profile=train".into(), ""),
        ("home/a job=train".into(), "flush=job-end priority=high"),
        ("x.tmp job=train".into(), "flush=job-end"),
        ("x.log job=train".into(), "flush=every:30s"),
        ("scratch/a job=train".into(), "write=local flush=manual"),
        ("ckpt/a/step-1.pt profile=resnet".into(), "write=through flush=on-close flush-deadline=5m"),
        ("ckpt/a/step-12x.pt profile=resnet".into(), "write=through flush=on-close flush-deadline=5m"),
        ("ckpt/a/step-1.pt".into(), ""),
        ("ckpt/a/step-1.pt profile=vgg".into(), ""),
        ("ckpt/a/step-1.pt job=resnet".into(), ""),
        ("ckpt/a/step-x.pt profile=resnet".into(), ""),
        ("ckpt/a/b/step-1.pt profile=resnet".into(), ""),
        ("ckpt/step-1.pt profile=resnet".into(), ""),
        ("ckpt/a/step-1.pt job=train profile=resnet".into(), "write=through flush=on-close flush-deadline=5m"),
        // Storage pools.
        ("a pool=ssd".into(), "read=bypass"),
        ("a pool=hdd".into(), ""),
        ("etc/a size=1 pool=ssd".into(), "read=bypass"),
        (format!("data/a written={month} pool=ssd"), "read=bypass metadata-ttl=1day"),
        // Endings.
        ("a.log".into(), "flush=every:30s"),
        ("home/b/a.log".into(), "flush=every:30s priority=high"),
        ("a.log.1".into(), ""),
        ("scratch/a.log".into(), "write=local flush=manual"),
        ("build-1/a.log".into(), "flush=every:30s"),
    ];
    let mut checked = 0;
    for (file, differs) in &cases {
        let is = decide(&policy, file);
        for name in SettingName::ALL {
            let expected =
                differs.split(' ').filter_map(|word| word.split_once('=')).find(|(key, _)| *key == name.key());
            let default = policy.default.value(name);
            let value = if name == SettingName::Flush { is.flush().to_string() } else { is.value(name) };
            assert_eq!(value, expected.map_or(default, |(_, value)| value.into()), "{name} of {file}");
            checked += 1;
        }
    }
    assert!(cases.len() >= 80 && checked >= 800);
}

#[test]
fn every_value_is_read_as_it_is_shown() {
    let cases = [
        ("consistency", "close-to-open"),
        ("consistency", "ttl:1m 30s"),
        ("consistency", "immutable"),
        ("metadata-ttl", "1h"),
        ("read", "cache"),
        ("read", "bypass"),
        ("read", "pin"),
        ("whole-file", "0B"),
        ("whole-file", "16MiB"),
        ("readahead", "auto"),
        ("readahead", "1MiB"),
        ("write", "back"),
        ("write", "through"),
        ("write", "around"),
        ("write", "local"),
        ("flush", "on-close"),
        ("flush", "idle:5s"),
        ("flush", "every:10m"),
        ("flush", "job-end"),
        ("flush", "manual"),
        ("flush-deadline", "none"),
        ("flush-deadline", "1day"),
        ("priority", "high"),
        ("priority", "normal"),
        ("priority", "low"),
        ("conflict", "keep-both"),
        ("conflict", "fail"),
        ("conflict", "ours"),
        ("conflict", "theirs"),
        ("tier", "auto"),
        ("tier", "fast"),
    ];
    for (key, value) in cases {
        for text in
            [format!("[default]\n{key} = \"{value}\"\n"), format!("[[rule]]\npaths = \"a\"\n{key} = \"{value}\"\n")]
        {
            let policy = Policy::parse(&text).unwrap();
            let name = SettingName::ALL.into_iter().find(|name| name.key() == key).unwrap();
            assert_eq!(decide(&policy, "a").value(name), value, "{key}");
            assert_eq!(
                decide(&policy, "b").value(name) == value,
                !text.contains("rule") || PathPolicy::default().value(name) == value
            );
        }
    }
    for name in SettingName::ALL {
        assert!(cases.iter().any(|(key, _)| *key == name.key()), "{name} has no case");
    }
}

/// One rule in plain words: every condition is looked at, one after the other.
#[derive(Debug, Clone)]
struct PlainRule {
    glob: Option<&'static str>,
    owner: Option<u32>,
    size: Option<(u64, u64)>,
    directory: bool,
    whole_file: Option<u64>,
    read: Option<&'static str>,
}

impl PlainRule {
    fn text(&self) -> String {
        let mut text = "[[rule]]\n".to_owned();
        if let Some(glob) = self.glob {
            text += &format!("paths = \"{glob}\"\n");
        }
        if let Some(owner) = self.owner {
            text += &format!("owner = \"{owner}\"\n");
        }
        if let Some((from, until)) = self.size {
            text += &format!("size = \"{from}B..{until}B\"\n");
        }
        if self.directory {
            text += "type = \"directory\"\n";
        }
        if let Some(bytes) = self.whole_file {
            text += &format!("whole-file = \"{bytes}B\"\n");
        }
        if let Some(read) = self.read {
            text += &format!("read = \"{read}\"\n");
        }
        text
    }

    fn holds(&self, path: &str, uid: u32, size: u64, kind: FileKind) -> bool {
        let glob = |glob| globset::GlobBuilder::new(glob).literal_separator(true).build().unwrap();
        self.glob.is_none_or(|text| glob(text).compile_matcher().is_match(path))
            && self.owner.is_none_or(|owner| owner == uid)
            && self.size.is_none_or(|(from, until)| from <= size && size < until)
            && (!self.directory || kind == FileKind::Directory)
    }
}

fn plain_rule() -> impl Strategy<Value = PlainRule> {
    let glob = prop_oneof![
        Just("a/**"),
        Just("a/b"),
        Just("**/*.x"),
        Just("**/c"),
        Just("*"),
        Just("a/*/c"),
        Just("b/**/c.x"),
        Just("**"),
        Just("{a,b}/c")
    ];
    let settings =
        (prop::option::of(0..4u64), prop::option::of(prop_oneof![Just("pin"), Just("bypass"), Just("cache")]));
    (prop::option::of(glob), prop::option::of(0..3u32), prop::option::of((0..4u64, 4..8u64)), any::<bool>(), settings)
        .prop_map(|(glob, owner, size, directory, (whole_file, read))| PlainRule {
            glob,
            owner,
            size,
            directory: directory || (glob.is_none() && owner.is_none() && size.is_none()),
            whole_file,
            read: if whole_file.is_none() { read.or(Some("pin")) } else { read },
        })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1000))]

    /// The compiled policy decides what a plain reading of the rules says: each rule in order, the later one wins.
    #[test]
    fn the_compiled_policy_agrees_with_a_plain_reading(
        rules in prop::collection::vec(plain_rule(), 0..10),
        files in prop::collection::vec(
            (prop_oneof![Just("a"), Just("a/b"), Just("a/b/c"), Just("c"), Just("b/c.x"), Just("b/d/c.x"), Just("x.x")],
             0..3u32, 0..9u64, any::<bool>()), 1..12),
    ) {
        let text: String = rules.iter().map(PlainRule::text).collect();
        let policy = Policy::parse(&text).unwrap();
        for (path, uid, size, directory) in files {
            let kind = if directory { FileKind::Directory } else { FileKind::File };
            let (mut whole_file, mut read) = (PathPolicy::default().whole_file_bytes, "cache".to_owned());
            for rule in rules.iter().filter(|rule| rule.holds(path, uid, size, kind)) {
                whole_file = rule.whole_file.unwrap_or(whole_file);
                read = rule.read.map_or(read, str::to_owned);
            }
            let path = PoolPath::parse(path).unwrap();
            let facts = FileFacts { uid, size, kind, ..FileFacts::of_path(&path) };
            let decided = policy.decide(&facts);
            prop_assert_eq!((decided.whole_file_bytes, decided.read.to_string()), (whole_file, read), "{} of {}", path, text);
            prop_assert_eq!(policy.explain(&facts).policy, decided);
        }
    }
}
