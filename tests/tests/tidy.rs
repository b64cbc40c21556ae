//! Checks that reviewers would otherwise repeat.

#[path = "tidy/engine_order.rs"]
mod engine_order;

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The most lines that a source file may have. A longer one has a second idea in it.
const LINES_MAX: usize = 600;

/// The crates of this workspace that each crate may depend on.
const ARROWS: [(&str, &[&str]); 19] = [
    ("backends", &[]),
    ("ebpf", &[]),
    ("prefetch", &[]),
    ("overlay/cluster", &[]),
    ("overlay/system", &["backends"]),
    ("overlay/policy", &["backends", "prefetch"]),
    ("overlay/api", &["backends", "cluster", "prefetch", "system"]),
    ("overlay/slurm", &["api", "prefetch"]),
    ("overlay/cache", &["backends", "system"]),
    ("overlay/catalog", &["api", "backends", "cache", "prefetch", "system"]),
    ("overlay/engine", &["api", "backends", "cache", "catalog", "policy", "prefetch", "system"]),
    ("overlay/jobs", &["api", "backends", "cache", "catalog", "ebpf", "engine", "policy", "prefetch", "system"]),
    ("overlay/fuse", &["backends", "engine", "jobs"]),
    ("overlay/serve", &["api", "backends", "engine", "policy", "system"]),
    ("overlay/peers", &["api", "backends", "cluster", "engine", "serve"]),
    (
        "overlay/daemon",
        &[
            "api", "backends", "cache", "ebpf", "engine", "fuse", "jobs", "peers", "policy", "prefetch", "serve",
            "system",
        ],
    ),
    ("cli", &["api", "backends", "cluster", "daemon", "prefetch", "serve", "slurm", "system"]),
    ("tests", &["api", "backends", "daemon", "ebpf", "engine", "prefetch", "system"]),
    ("benches", &["backends", "ebpf", "policy", "prefetch"]),
];

/// Libraries that one crate hides from the other crates.
const OWNED: [(&str, &[&str]); 4] = [
    ("rocksdb", &["overlay/catalog"]),
    ("io-uring", &["overlay/cache", "tests"]),
    ("fuser", &["overlay/fuse", "tests"]),
    ("aya", &["ebpf"]),
];

/// The folders in which the name of a type stands for one type.
const ONE_NAME_EACH: [&str; 5] = ["backends/", "cli/", "ebpf/", "overlay/", "prefetch/"];

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().to_owned()
}

/// Returns every file that git tracks, with its text, except files that are not text.
fn tracked() -> Vec<(String, String)> {
    let listed = Command::new("git").args(["ls-files", "-z"]).current_dir(root()).output().unwrap();
    assert!(listed.status.success(), "git ls-files: {}", String::from_utf8_lossy(&listed.stderr));
    let names = String::from_utf8(listed.stdout).unwrap();
    let read = |name: &str| Some((name.to_owned(), fs::read_to_string(root().join(name)).ok()?));
    let files: Vec<_> = names.split('\0').filter(|n| !n.is_empty()).filter_map(read).collect();
    assert!(files.len() > 100, "only {} files are tracked", files.len());
    files
}

fn sources() -> Vec<(String, String)> {
    tracked().into_iter().filter(|(name, _)| name.ends_with(".rs")).collect()
}

/// Returns the part of a source file that ships: the part before its tests.
fn shipped(text: &str) -> &str {
    let end = text.find("#[cfg(test)]\nmod tests").unwrap_or(text.len());
    &text[..end]
}

fn is_test_code(name: &str) -> bool {
    name.starts_with("tests/") || name.starts_with("benches/") || name.contains("/tests") || name.contains("tests.rs")
}

#[test]
fn crates_depend_only_along_the_arrows() {
    let crates: BTreeMap<_, _> = ARROWS.into_iter().collect();
    let workspace = fs::read_to_string(root().join("Cargo.toml")).unwrap();
    let members = workspace.lines().filter_map(|line| line.strip_prefix("    \"")?.strip_suffix("\","));
    assert_eq!(members.collect::<BTreeSet<_>>(), crates.keys().copied().collect(), "each crate has its arrows");
    for (name, allowed) in &crates {
        let manifest = fs::read_to_string(root().join(name).join("Cargo.toml")).unwrap();
        for line in manifest.lines() {
            let Some(dependency) = line.strip_prefix("forebay-") else { continue };
            let dependency = dependency.split(['.', ' ', '=']).next().unwrap();
            assert!(allowed.contains(&dependency), "{name} depends on {dependency}: no such arrow");
        }
    }
    for (foreign, owners) in OWNED {
        for name in crates.keys().filter(|name| !owners.contains(name)) {
            let manifest = fs::read_to_string(root().join(name).join("Cargo.toml")).unwrap();
            assert!(!manifest.lines().any(|l| l.starts_with(foreign)), "{name} must not know {foreign}");
        }
    }
}

#[test]
fn files_fit_in_the_head() {
    for (name, text) in sources() {
        let lines = text.lines().count();
        assert!(lines <= LINES_MAX, "{name} has {lines} lines: look for the second idea in it");
    }
}

/// Returns the name of the type that a line declares.
fn declared_type(line: &str) -> Option<&str> {
    let line = line.trim_start();
    let item = match line.strip_prefix("pub") {
        Some(rest) => rest.strip_prefix('(').map_or(rest, |rest| rest.split_once(") ").map_or("", |(_, item)| item)),
        None => line,
    };
    let item = item.trim_start().trim_start_matches("unsafe ");
    let rest = ["struct ", "enum ", "trait ", "union "].iter().find_map(|keyword| item.strip_prefix(keyword))?;
    rest.split(|c: char| !c.is_alphanumeric() && c != '_').next().filter(|name| !name.is_empty())
}

/// Types of unit tests are left out: they are read only beside what they test.
#[test]
fn a_type_has_a_name_of_its_own() {
    let mut places: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for (file, text) in sources() {
        let is_unit_test = file.contains("/src/") && is_test_code(&file);
        if is_unit_test || !ONE_NAME_EACH.iter().any(|folder| file.starts_with(folder)) {
            continue;
        }
        for (number, line) in shipped(&text).lines().enumerate() {
            if let Some(name) = declared_type(line) {
                places.entry(name.to_owned()).or_default().push(format!("{file}:{}", number + 1));
            }
        }
    }
    assert!(places.len() > 700, "only {} types were found", places.len());
    let shared: Vec<_> = places.iter().filter(|(_, places)| places.len() > 1).collect();
    let list: Vec<_> = shared.iter().map(|(name, places)| format!("{name}: {}", places.join(", "))).collect();
    assert!(list.is_empty(), "these names stand for several types each:\n{}", list.join("\n"));
}

#[test]
fn nothing_is_left_unfinished() {
    let marks = [concat!("FIX", "ME"), concat!("XX", "X:"), concat!("todo", "!("), concat!("unimplemented", "!(")];
    for (name, text) in sources() {
        for mark in marks {
            assert!(!text.contains(mark), "{name} contains {mark}");
        }
        assert!(!text.contains(concat!("#[", "ignore")), "{name} skips a test in silence");
    }
}

#[test]
fn errors_are_values_where_the_program_runs() {
    for (name, text) in sources().into_iter().filter(|(name, _)| !is_test_code(name)) {
        if name.starts_with("backends/src/conformance") {
            continue;
        }
        for (number, line) in shipped(&text).lines().enumerate() {
            let code = line.trim_start();
            if code.starts_with("//") {
                continue;
            }
            let bad = code.contains(".unwrap()") || code.contains(".expect(\"");
            assert!(!bad, "{name}:{}: {code}", number + 1);
        }
    }
}

/// A change of the catalog that goes past these is visible in memory although it may not have been written.
#[test]
fn the_engine_changes_the_catalog_in_few_places() {
    let sources = sources();
    let writers = sources.iter().filter(|(name, text)| {
        name.starts_with("overlay/engine/src/") && !is_test_code(name) && shipped(text).contains("catalog.batch()")
    });
    let writers: Vec<_> = writers.map(|(name, _)| name.trim_start_matches("overlay/engine/src/")).collect();
    // `fsck.rs` removes records that belong to no inode; `lib.rs` makes the root; `load.rs` gives up content before its
    // node is in memory; `commit.rs` makes the records of a tree, which a `Txn` writes together with its name; `absent.rs`
    // runs before there are nodes; `parts.rs` lists parts that belong to no inode yet, or no more.
    let expected = [
        "fsck.rs",
        "handles/spill/parts.rs",
        "inode_change.rs",
        "lib.rs",
        "node/load.rs",
        "scratch/commit.rs",
        "tiers/absent.rs",
        "txn.rs",
    ];
    assert_eq!(writers, expected);
}

#[test]
fn no_path_of_a_machine_is_in_the_tree() {
    let homes = [concat!("/ro", "ot/"), concat!("/wo", "rk/"), concat!("/ho", "me/")];
    for (name, text) in tracked() {
        for home in homes {
            let found = text.lines().find(|line| line.contains(home));
            assert!(found.is_none(), "{name}: {}", found.unwrap_or_default());
        }
    }
}

/// A page quotes a source file by the end of its path, without `src`: `engine/txn.rs`.
#[test]
fn source_files_that_pages_and_comments_name_exist() {
    let files: Vec<String> = tracked().into_iter().map(|(name, _)| format!("/{name}")).collect();
    let short: Vec<String> = files.iter().map(|name| name.replace("/src/", "/")).collect();
    let is_path = |word: &str| {
        let allowed = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || "_/.".contains(c);
        word.ends_with(".rs") && word.contains('/') && word.chars().all(allowed)
    };
    let mut seen = 0;
    for (name, text) in tracked().into_iter().filter(|(name, _)| name.ends_with(".md") || name.ends_with(".rs")) {
        let quoted = text.lines().filter(|line| name.ends_with(".md") || line.trim_start().starts_with("//"));
        for path in quoted.flat_map(|line| line.split('`').skip(1).step_by(2)).filter(|word| is_path(word)) {
            seen += 1;
            let end = format!("/{path}");
            let exists = files.iter().chain(&short).any(|file| file.ends_with(&end));
            assert!(exists, "{name} names {path}, which does not exist");
        }
    }
    assert!(seen > 40, "only {seen} paths were found");
}

#[test]
fn every_sentence_of_the_semantics_has_a_test() {
    assert!(numbered_sentences_have_tests("SEMANTICS") >= 30);
}

#[test]
fn quotes_of_promises_are_in_the_documents() {
    let one_line = |text: &str| text.split_whitespace().collect::<Vec<_>>().join(" ");
    let mut quotes = 0;
    for page in ["SEMANTICS", "SECURITY"] {
        let document = one_line(&fs::read_to_string(root().join(format!("docs/{page}.md"))).unwrap());
        for (name, text) in sources() {
            let comments = text.lines().filter_map(|line| line.trim_start().strip_prefix("//"));
            let comments =
                one_line(&comments.map(|line| line.trim_start_matches(['/', '!'])).collect::<Vec<_>>().join(" "));
            for rest in comments.split(&format!("{page} ")).skip(1) {
                let digits = rest.trim_start_matches(|c: char| c.is_ascii_digit());
                let Some(quote) = digits.strip_prefix(": \"").filter(|_| digits.len() < rest.len()) else { continue };
                let quote = quote.split('"').next().unwrap().trim_end_matches('.');
                quotes += 1;
                assert!(document.contains(quote), "{name} quotes {page}, which does not say: {quote}");
            }
        }
    }
    assert!(quotes > 60, "only {quotes} quotes were found");
}

#[test]
fn every_sentence_on_security_has_a_test() {
    assert!(numbered_sentences_have_tests("SECURITY") >= 4);
}

/// Checks that the sentences of a page of docs are numbered from 1, and that a test quotes the number of each. Returns
/// how many there are.
fn numbered_sentences_have_tests(page: &str) -> usize {
    let text = fs::read_to_string(root().join(format!("docs/{page}.md"))).unwrap();
    let mut numbers = Vec::new();
    for line in text.lines() {
        let Some((number, _)) = line.split_once(". ") else { continue };
        if let Ok(number) = number.parse::<u32>() {
            numbers.push(number);
        }
    }
    let mut sorted = numbers.clone();
    sorted.dedup();
    assert_eq!(sorted, (1..=numbers.len() as u32).collect::<Vec<_>>(), "numbers must count up from 1");
    let quotes: String = sources().into_iter().map(|(_, text)| text).collect();
    let mut missing = Vec::new();
    let count = numbers.len();
    for number in numbers {
        let quoted = [":", ",", " ", "\n", "\""].iter().any(|end| {
            quotes.contains(&format!("{page} {number}{end}")) || quotes.contains(&format!(", {number}{end} of {page}"))
        });
        if !quoted {
            missing.push(number);
        }
    }
    assert!(missing.is_empty(), "no test quotes {page} {missing:?}");
    count
}
