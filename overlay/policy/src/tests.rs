//! Tests of whole policies.

mod docs;
mod table;

use super::*;

fn at(policy: &Policy, path: &str) -> PathPolicy {
    policy.decide(&FileFacts::of_path(&PoolPath::parse(path).unwrap()))
}

#[test]
fn later_rules_change_what_earlier_ones_said() {
    let policy = Policy::parse(
        "[default]\nflush = \"manual\"\n\
         [[rule]]\npaths = [\"out/**\"]\nflush = \"on-close\"\nwhole-file = \"1MiB\"\n\
         [[rule]]\npaths = [\"out/*.tmp\"]\nflush = \"idle:1m\"\n",
    )
    .unwrap();
    assert_eq!(at(&policy, "in/a").flush(), FlushPolicy::Manual);
    assert_eq!(at(&policy, "out/x/y").flush(), FlushPolicy::OnClose);
    assert_eq!(at(&policy, "out/a.tmp").flush(), FlushPolicy::Idle(Duration::from_secs(60)));
    assert_eq!(at(&policy, "out/a.tmp").whole_file_bytes, 1 << 20);
}

#[test]
fn later_files_change_what_earlier_ones_said_and_each_setting_knows_its_place() {
    let file = |name: &str, text: &str| PolicyFile { name: name.into(), text: text.into() };
    let files = PolicyFiles(vec![
        file(
            "site.toml",
            "[default]\nflush = \"manual\"\n\n[[rule]]\nname = \"results\"\npaths = \"out/**\"\nread = \"pin\"\nflush = \"on-close\"\n",
        ),
        file("mine.toml", "[default]\nwhole-file = \"1MiB\"\n[[rule]]\npaths = \"out/tmp/**\"\n  read = \"bypass\"\n"),
    ]);
    let policy = Policy::compile(&files, &Context { pool_url: "", accounts: &NoAccounts }).unwrap();
    let path = PoolPath::parse("out/tmp/a").unwrap();
    let verdict = policy.explain(&FileFacts::of_path(&path));
    assert_eq!(verdict.policy, policy.decide(&FileFacts::of_path(&path)));
    let origin = |name: SettingName| match &verdict.origins[name as usize] {
        Origin::BuiltIn => "built in".into(),
        Origin::Default { place } => format!("default {place}"),
        Origin::Rule { title, place } => format!("{title} {place}"),
        Origin::Directory { path } => format!("directory {path}"),
    };
    assert_eq!(origin(SettingName::Flush), "results site.toml:8:9");
    assert_eq!(origin(SettingName::Read), "paths = \"out/tmp/**\" mine.toml:5:10");
    assert_eq!(origin(SettingName::WholeFile), "default mine.toml:2:14");
    assert_eq!(origin(SettingName::Write), "built in");
}

#[test]
fn rules_hold_for_a_storage_pool_by_its_number_or_its_name() {
    let policy = Policy::parse(
        "[storage-pools]\n2 = \"fast\"\n\
         [[rule]]\nstorage-pool = \"fast\"\nflush = \"manual\"\n\
         [[rule]]\nstorage-pool = \"2\"\npaths = [\"out/**\"]\nflush = \"on-close\"\n",
    )
    .unwrap();
    let at = |path: &str, pool| {
        let path = PoolPath::parse(path).unwrap();
        policy.decide(&FileFacts { storage_pool: pool, ..FileFacts::of_path(&path) }).flush()
    };
    assert!(policy.needed().storage_pool && policy.uniform().is_none());
    assert_eq!(at("a", Some("2")), FlushPolicy::Manual);
    assert_eq!(at("out/a", Some("2")), FlushPolicy::OnClose);
    for elsewhere in [Some("1"), None] {
        assert_eq!(at("out/a", elsewhere), PathPolicy::default().flush());
    }
    assert_eq!((policy.storage_pool_name("2"), policy.storage_pool_name("3")), ("fast", "3"));
}

#[test]
fn rules_may_be_for_some_pools_only() {
    let text = "[[rule]]\npool = \"nfs://*\"\nconsistency = \"ttl:9s\"\n";
    let at = |pool_url: &str| {
        let policy = Policy::compile(&text.into(), &Context { pool_url, accounts: &NoAccounts }).unwrap();
        at(&policy, "a").consistency
    };
    assert_eq!(at("nfs://server/export"), Consistency::Ttl(Duration::from_secs(9)));
    assert_eq!(at("s3://bucket"), Consistency::CloseToOpen);
}

#[test]
fn users_and_groups_are_known_by_name_or_number() {
    struct Two;
    impl Accounts for Two {
        fn uid(&self, name: &str) -> Option<u32> {
            (name == "anna").then_some(7)
        }
        fn gid(&self, name: &str) -> Option<u32> {
            (name == "lab").then_some(70)
        }
    }
    let text = "[[rule]]\nowner = [\"anna\", \"8\"]\nread = \"pin\"\n[[rule]]\ngroup = \"lab\"\nwrite = \"through\"\n";
    let policy = Policy::compile(&text.into(), &Context { pool_url: "", accounts: &Two }).unwrap();
    let path = PoolPath::parse("x").unwrap();
    let of = |uid, gid| policy.decide(&FileFacts { uid, gid, ..FileFacts::of_path(&path) });
    assert_eq!([of(7, 0).read, of(8, 0).read, of(9, 0).read], [Read::Pin, Read::Pin, Read::Cache]);
    assert_eq!((of(9, 70).write, of(9, 71).write), (Write::Through, Write::Back));
    let error = Policy::parse(text).unwrap_err().to_string();
    assert!(error.contains("policy:2:9") && error.contains("anna"), "{error}");
}

#[test]
fn files_that_never_go_to_the_pool_are_not_named_by_a_job_that_ends() {
    for condition in ["job = \"train*\"", "profile = \"train*\""] {
        let local = |more: &str| Policy::parse(&format!("[[rule]]\n{condition}\npaths = \"tmp/**\"\n{more}\n"));
        let error = local("write = \"local\"").unwrap_err().to_string();
        assert!(error.contains("policy:4:9") && error.contains("after a job has ended"), "{error}");
        let text = format!("[[rule]]\n{condition}\npaths = \"tmp/**\"\nflush = \"on-close\"\nwrite = \"local\"\n");
        let mut replaced = Vec::new();
        let context = Context { pool_url: "", accounts: &NoAccounts };
        let stored = Policy::compile_stored(&text.as_str().into(), &context, |error| replaced.push(error.to_string()));
        let path = PoolPath::parse("tmp/f").unwrap();
        let job = JobFacts { name: "train".into(), profile: Some("train".into()) };
        let decided = stored.unwrap().decide(&FileFacts { jobs: &[job], ..FileFacts::of_path(&path) });
        assert_eq!((decided.write, decided.flush()), (Write::Back, FlushPolicy::Manual));
        assert!(replaced.len() == 1 && replaced[0].contains("policy:5:9"), "{replaced:?}");
        assert!(local("write = \"around\"").is_ok());
    }
    assert!(Policy::parse("[[rule]]\npaths = \"tmp/**\"\nwrite = \"local\"\n").is_ok());
}

#[test]
fn what_holds_for_all_paths_is_known_without_a_path() {
    let policy = |text: &str| Policy::parse(text).unwrap();
    let plain = policy("[default]\nflush = \"manual\"\n[observer]\nat-work = \"always\"");
    assert_eq!(plain.uniform().map(|policy| policy.flush()), Some(FlushPolicy::Manual));
    assert!(plain.observes_always && plain.needed() == NeededFacts::default());
    assert_eq!(plain.shortest_idle(), Duration::ZERO);
    assert!(!policy("[observer]\nat-work = \"needed\"").observes_always);
    let ruled = policy("[default]\nflush = \"idle:9s\"\n[[rule]]\npaths = [\"x\"]\nflush = \"idle:3s\"\n");
    assert_eq!((ruled.shortest_idle(), ruled.uniform()), (Duration::from_secs(3), None));
    let late = policy("[default]\nflush = \"idle:9s\"\n[[rule]]\npaths = [\"x\"]\nflush-deadline = \"2s\"\n");
    assert_eq!(late.shortest_idle(), Duration::from_secs(2));
    let immutable = Policy::immutable().default;
    assert_eq!(immutable.consistency, Consistency::Immutable);
    assert_eq!(immutable.metadata_ttl.as_secs(), 31_536_000);
}

#[test]
fn wakeups_may_be_bounded_or_not() {
    let of = |text: &str| Policy::parse(text).unwrap().wakeup_latency;
    assert_eq!(of(""), Some(Duration::ZERO));
    assert_eq!(of("[cpu]\nwakeup-latency = \"2us\""), Some(Duration::from_micros(2)));
    assert_eq!(of("[cpu]\nwakeup-latency = \"any\""), None);
}

#[test]
fn directories_may_set_what_the_site_allows() {
    let policy = Policy::parse("[allow]\nsettings = [\"flush\", \"read\"]\n").unwrap();
    assert!(policy.uniform().is_none());
    let parsed = |value: &str| {
        let parsed = DirectoryPolicy::parse(value.as_bytes())?;
        policy.check_directory(&parsed).map(|()| parsed)
    };
    let mine = parsed("flush = \"on-close\"").unwrap();
    assert!(parsed("flush = \"idle:36500d\"").is_ok());
    let path = PoolPath::parse("d").unwrap();
    let mut verdict = policy.explain(&FileFacts::of_path(&path));
    mine.apply_to(&mut verdict, &path);
    assert_eq!(verdict.policy.flush(), FlushPolicy::OnClose);
    assert_eq!(verdict.origins[SettingName::Flush as usize], Origin::Directory { path });
    for (value, needle) in [
        ("write = \"local\"", "does not allow `write` here; it allows flush, read"),
        ("flsh = \"manual\"", "did you mean `flush`?"),
        ("flush", "1:"),
        ("paths = \"x\"", "no `paths`"),
        ("flush = \"idle:18446744073709s\"", "at most 36500d"),
        (&format!("flush = \"manual\" # {}", "x".repeat(DIRECTORY_POLICY_MAX)), "at most 4096 bytes"),
    ] {
        let error = parsed(value).unwrap_err().to_string();
        assert!(error.contains(needle) && error.starts_with(DIRECTORY_POLICY_XATTR), "{error}");
    }
    let longest = format!("flush = \"manual\" # {}", "x".repeat(DIRECTORY_POLICY_MAX));
    assert!(parsed(&longest[..DIRECTORY_POLICY_MAX]).is_ok());
}

#[test]
fn a_close_may_wait_if_any_setting_says_so() {
    let may = |text: &str| Policy::parse(text).unwrap().may_flush_on_close();
    for waits in [
        "[default]\nflush = \"on-close\"\n",
        "[default]\nwrite = \"through\"\n",
        "[[rule]]\nsize = \"1MiB..\"\nflush = \"on-close\"\n",
        "[[rule]]\njob = \"train*\"\nwrite = \"around\"\n",
        "[allow]\nsettings = [\"flush\"]\n",
        "[allow]\nsettings = [\"write\"]\n",
    ] {
        assert!(may(waits), "{waits}");
    }
    for never in [
        "",
        "[default]\nflush = \"manual\"\n[[rule]]\npaths = \"a\"\nwrite = \"local\"\n[allow]\nsettings = [\"read\"]\n",
    ] {
        assert!(!may(never), "{never}");
    }
}

fn lines(old: &Policy, new: &Policy) -> Vec<String> {
    old.differences(new).iter().map(ToString::to_string).collect()
}

#[test]
fn differences_name_each_setting_and_rule() {
    let old = Policy::parse(
        "[[rule]]\nname = \"a\"\npaths = \"a/**\"\nread = \"pin\"\n[[rule]]\nname = \"b\"\npaths = \"b\"\nread = \"pin\"\n",
    );
    let new = Policy::parse(
        "[default]\nflush = \"manual\"\n[space]\nevictor = \"lru\"\n[[rule]]\nname = \"a\"\npaths = \"a/**\"\nread = \"bypass\"\n\
         [[rule]]\npaths = \"c\"\nwrite = \"local\"\n",
    );
    let (old, new) = (old.unwrap(), new.unwrap());
    assert_eq!(
        lines(&old, &new),
        [
            "space.evictor: gittins -> lru",
            "default flush: idle:5s -> manual",
            "rule a: read = pin -> read = bypass",
            "removed: rule b (read = pin)",
            "added: rule paths = \"c\" (write = local)",
        ]
    );
    assert!(new.differences(&new).is_empty());
    let swapped = |first: &str, second: &str| {
        let rule = |name: &str| format!("[[rule]]\nname = \"{name}\"\npaths = \"{name}\"\nread = \"pin\"\n");
        Policy::parse(&(rule(first) + &rule(second))).unwrap()
    };
    assert_eq!(swapped("a", "b").differences(&swapped("b", "a")).len(), 1);
}

#[test]
fn errors_name_the_place_the_setting_and_what_is_allowed() {
    for (text, place, needle) in [
        ("[default]\nflush = \"soon\"", "2:9", "on-close"),
        ("[default]\nflush = \"every:1ms\"", "2:9", "at least 1s"),
        ("[default]\nconsistency = \"ttl:x\"", "2:15", "duration"),
        ("[default]\nconsistency = \"ttl:18446744073709s\"", "2:15", "at most 36500d"),
        ("[default]\nflush = \"idle:18446744073709s\"", "2:9", "at most 36500d"),
        ("[default]\nflush = \"every:36501d\"", "2:9", "at most 36500d"),
        ("[default]\nflush-deadline = \"584542y\"", "2:18", "at most 36500d"),
        ("[default]\nmetadata-ttl = \"18446744073709551615s\"", "2:16", "at most 36500d"),
        ("[pool]\ndeadline = \"1000y\"", "2:12", "at most 36500d"),
        ("[[quota]]\nuser = \"1\"\ngrace = \"1000y\"", "3:9", "at most 36500d"),
        ("[default]\nflsh = \"manual\"", "2:1", "did you mean `flush`?"),
        ("[default]\nreadahead = \"much\"", "2:13", "size"),
        ("[default]\nwrite = 3", "2:9", "text in quotes"),
        ("[defaults]\nflush = \"manual\"", "1:2", "did you mean `default`?"),
        ("[[rule]]\nflush = \"manual\"", "2:9", "paths"),
        ("[[rule]]\npaths = \"x\"", "2:9", "makes no setting"),
        ("[[rule]]\npaths = []\nflush = \"manual\"", "2:9", "empty"),
        ("[[rule]]\npaths = \"a{b\"\nflush = \"manual\"", "2:9", "paths"),
        ("[[rule]]\npath = \"a\"\nflush = \"manual\"", "2:1", "did you mean `paths`?"),
        ("[[rule]]\ntype = \"dir\"\nflush = \"manual\"", "2:8", "directory"),
        ("[[rule]]\nsize = \"1GiB\"\nflush = \"manual\"", "2:8", "range"),
        ("[[rule]]\nowner = \"nobody-here\"\nflush = \"manual\"", "2:9", "no user"),
        ("[[rule]]\nstorage-pool = 2\nflush = \"manual\"", "2:16", "storage-pool"),
        ("rule = 3", "1:8", "[[rule]]"),
        ("[cpu]\nwakeup-latency = \"soon\"", "2:18", "wakeup-latency"),
        ("[shares]\ndirty = 0", "2:9", "dirty"),
        ("[shares]\nopen-files = 1.5", "2:14", "at most 1"),
        ("[space]\nhigh-watermark = 0.5\nlow-watermark = 0.6", "3:17", "low-watermark"),
        ("[space]\nlow-watermark = 0.0", "2:17", "low-watermark"),
        ("[space]\nevictor = \"lrru\"", "2:11", "did you mean `lru`?"),
        ("[write-back]\nschedule = [\"22-6 1MiB\"]", "2:12", "22:00-06:00"),
        ("[write-back]\nrate = \"0B\"", "2:8", "manual"),
        ("[write-back]\nrequests = \"many\"", "2:12", "100/s"),
        ("[allow]\nsettings = \"flsh\"", "2:12", "did you mean `flush`?"),
        ("[default\nflush = 3", "1:9", ""),
    ] {
        let error = Policy::parse(text).unwrap_err();
        let shown = error.to_string();
        assert!(shown.contains(needle) && shown.starts_with(&format!("policy:{place}: ")), "{text}: {shown}");
        assert!(error.is(forebay_backends::ErrorKind::InvalidInput));
    }
}
