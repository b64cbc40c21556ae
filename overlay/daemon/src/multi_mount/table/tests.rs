use super::*;
use forebay_policy::{Consistency, FileFacts, FlushPolicy};

fn common() -> MountConfig {
    MountConfig {
        pool: String::new(),
        mountpoint: "/mnt/all".into(),
        fast: vec!["/nvme".into()],
        limit_bytes: Some(7 << 30),
        policy: None,
        read_only: false,
        immutable: false,
        allow_other: true,
        throttle: None,
        threads: None,
        memory_bytes: None,
        metrics: None,
        kernel_options: Vec::new(),
        peers: None,
        mask_hooks: Vec::new(),
        accounts: Default::default(),
        origin: None,
    }
}

fn read_text(text: &str) -> Result<Vec<NamedPool>, Failure> {
    parse(text, Path::new("/etc/forebay.toml"), &common())
}

#[test]
fn a_pool_has_what_it_says_and_else_what_is_said_for_all() {
    let pools = read_text(
        "[[pool]]\nname = \"home\"\nurl = \"nfs://server/home\"\n\
         [[pool]]\nname = \"sets\"\nurl = \"sets\"\nfast = [\"/ssd/a\", \"b\"]\nlimit = \"1GiB\"\nmemory = \"64MiB\"\n\
         threads = 2\nread-only = true\n",
    )
    .unwrap();
    assert_eq!(pools.iter().map(|p| p.name.as_str()).collect::<Vec<_>>(), ["home", "sets"]);
    let (home, sets) = (&pools[0].config, &pools[1].config);
    let expected = MountConfig {
        pool: "nfs://server/home".into(),
        mountpoint: "/mnt/all/home".into(),
        fast: vec!["/nvme/home".into()],
        ..common()
    };
    assert_eq!(*home, expected);
    let expected = MountConfig {
        pool: "/etc/sets".into(),
        mountpoint: "/mnt/all/sets".into(),
        fast: vec!["/ssd/a".into(), "/etc/b".into()],
        limit_bytes: Some(1 << 30),
        memory_bytes: Some(64 << 20),
        threads: Some(2),
        read_only: true,
        ..common()
    };
    assert_eq!(*sets, expected);
}

#[test]
fn the_policy_beside_the_pools_is_that_of_each() {
    let pools = read_text(
        "[default]\nflush = \"on-close\"\n[[rule]]\npaths = [\"tmp/**\"]\nflush = \"manual\"\n\
         [[pool]]\nname = \"a\"\nurl = \"/a\"\ndeadline = \"3s\"\n\
         [[pool]]\nname = \"b\"\nurl = \"/b\"\nimmutable = true\n",
    )
    .unwrap();
    let policy = |at: usize| policy_files::compile(pools[at].config.policy.as_ref().unwrap(), "").unwrap();
    let path = |text: &str| forebay_backends::PoolPath::parse(text).unwrap();
    for policy in [policy(0), policy(1)] {
        assert_eq!(policy.decide(&FileFacts::of_path(&path("x"))).flush(), FlushPolicy::OnClose);
        assert_eq!(policy.decide(&FileFacts::of_path(&path("tmp/x"))).flush(), FlushPolicy::Manual);
    }
    assert_eq!(policy(0).pool_deadline.as_secs(), 3);
    assert_ne!(policy(1).pool_deadline.as_secs(), 3);
    assert_eq!(policy(0).decide(&FileFacts::of_path(&path("x"))).consistency, Consistency::CloseToOpen);
    assert_eq!(policy(1).decide(&FileFacts::of_path(&path("x"))).consistency, Consistency::Immutable);
}

#[test]
fn without_any_policy_there_is_no_text_of_one() {
    assert_eq!(read_text("[[pool]]\nname = \"a\"\nurl = \"/a\"\n").unwrap()[0].config.policy, None);
}

#[test]
fn what_is_wrong_is_named_with_the_file_and_the_table_and_what_to_do() {
    let pool = |rest: &str| format!("[[pool]]\nname = \"a\"\nurl = \"/a\"\n{rest}\n");
    let named = |name: &str| format!("[[pool]]\nname = {name:?}\nurl = \"/a\"\n");
    let (second, long) = (format!("{}{}", named("a"), named("a")), "x".repeat(256));
    for (text, words) in [
        ("", &["no [[pool]]"][..]),
        ("[[pool]\n", &["line 1"]),
        ("[pool]\ndeadline = \"3s\"\n", &["no [[pool]]"]),
        ("pool = [1]\n", &["[[pool]] 1"]),
        ("[[pool]]\nurl = \"/a\"\n", &["[[pool]] 1", "name"]),
        ("[[pool]]\nname = \"a\"\n", &["[[pool]] 1 (\"a\")", "url"]),
        (&pool("colour = \"red\""), &["[[pool]] 1 (\"a\")", "colour", "read-only"]),
        (&pool("limit = \"much\""), &["limit = \"much\"", "500G"]),
        (&pool("limit = 5"), &["limit"]),
        (&pool("threads = 0"), &["threads"]),
        (&pool("deadline = \"soon\""), &["deadline", "soon"]),
        (&pool("policy = \"/none.toml\""), &["/none.toml"]),
        (&format!("[defult]\n{}", pool("")), &["defult"]),
        (&named(""), &["is empty"]),
        (&named("."), &["itself"]),
        (&named(".."), &["above"]),
        (&named("a/b"), &["slash"]),
        (&named("a\nb"), &["control character"]),
        (&named(".forebay~x"), &[".forebay~"]),
        (&named(&long), &["255"]),
        (&second, &["[[pool]] 2 (\"a\")", "another pool has the name"]),
        ("[[pool]]\nname = \"a\"\nurl = \"ftp://host/a\"\n", &["ftp://", "s3://"]),
        ("[[pool]]\nname = \"a\"\nurl = \"\"\n", &["url is empty"]),
    ] {
        let failure = read_text(text).expect_err(text);
        let said = failure.to_string();
        assert_eq!(failure.kind, super::super::super::FailureKind::Usage, "{said}");
        assert!(said.contains("/etc/forebay.toml"), "{said}");
        for word in words {
            assert!(said.contains(word), "`{word}` is missing: {said}");
        }
    }
}

#[test]
fn limits_and_fast_directories_are_needed() {
    let text = "[[pool]]\nname = \"a\"\nurl = \"/a\"\n";
    for (common, word) in [
        (MountConfig { limit_bytes: None, ..common() }, "--limit"),
        (MountConfig { fast: Vec::new(), ..common() }, "--fast"),
    ] {
        let said = parse(text, Path::new("/f"), &common).unwrap_err().to_string();
        assert!(said.contains("(\"a\")") && said.contains(word), "{said}");
    }
}
