//! docs/POLICY.md says what the code does.

use super::super::*;
use super::super::{conditions::CONDITIONS, quotas, sections::SECTIONS};

fn text() -> String {
    std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/POLICY.md")).unwrap()
}

/// Returns the rows of the table with this heading, without the markup of their cells.
fn table(heading: &str) -> Vec<Vec<String>> {
    let text = text();
    let lines = text.lines().skip_while(|line| !line.starts_with(heading)).skip(2);
    let rows = lines.take_while(|line| line.starts_with('|'));
    rows.map(|row| row.trim_matches('|').split(" | ").map(|cell| cell.trim().replace('`', "")).collect()).collect()
}

fn keys(cell: &str) -> Vec<String> {
    cell.split(", ").map(|key| key.trim_matches(['[', ']']).to_owned()).collect()
}

#[test]
fn every_setting_is_described_with_its_values_and_its_default() {
    let rows = table("| setting |");
    let names: Vec<&str> = rows.iter().map(|row| row[0].as_str()).collect();
    assert_eq!(names, SettingName::ALL.map(SettingName::key));
    for (row, name) in rows.iter().zip(SettingName::ALL) {
        assert_eq!((row[1].as_str(), row[2].clone()), (name.values(), PathPolicy::default().value(name)), "{name}");
    }
}

#[test]
fn every_condition_and_section_is_described() {
    let described = |heading: &str| table(heading).iter().flat_map(|row| keys(&row[0])).collect::<Vec<_>>();
    let sorted = |mut names: Vec<String>| {
        names.sort();
        names
    };
    let known = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect::<Vec<_>>();
    assert_eq!(sorted(described("| condition |")), sorted(known(&CONDITIONS)));
    assert_eq!(sorted(described("| section |")), sorted(known(&SECTIONS)));
    assert_eq!(described("| key of `[[quota]]` |"), quotas::KEYS);
}

/// What each recipe decides: a path, and some settings of it.
#[test]
fn recipes_decide_what_they_promise() {
    let text = text();
    let recipes = text.split("## Recipes").nth(1).unwrap();
    let recipes: Vec<&str> = recipes.split("```toml").skip(1).map(|part| part.split("```").next().unwrap()).collect();
    let expected = [
        ("scratch/a/b", "write=local flush=manual"),
        ("run/7/ckpt/step-1", "flush=job-end flush-deadline=30m priority=low"),
        ("datasets/a/b", "consistency=immutable read=pin metadata-ttl=1day"),
        ("results/a", "write=through flush=on-close priority=high"),
        ("a/b.log", "flush=every:10s priority=high"),
        ("raw/a", "read=bypass readahead=64MiB"),
        ("home/anna/a", "metadata-ttl=2s flush=idle:1s conflict=keep-both"),
        ("home/anna/.cache/pip/x", "flush=idle:10m conflict=ours priority=low"),
        ("data/a", "consistency=ttl:1h metadata-ttl=1h"),
        ("project/x/a", "flush=idle:1m"),
    ];
    assert_eq!(recipes.len(), expected.len());
    for (recipe, (path, settings)) in recipes.iter().zip(expected) {
        let policy = Policy::parse(recipe).unwrap_or_else(|e| panic!("{e}: {recipe}"));
        let path = PoolPath::parse(path).unwrap();
        let old = Some(Duration::from_secs(100 * 86_400));
        let decided = policy.decide(&FileFacts { size: 20 << 30, written_ago: old, ..FileFacts::of_path(&path) });
        for (key, value) in settings.split(' ').filter_map(|word| word.split_once('=')) {
            let name = SettingName::ALL.into_iter().find(|name| name.key() == key).unwrap();
            let is = if key == "flush" { decided.flush().to_string() } else { decided.value(name) };
            assert_eq!(is, value, "{key} of {path} in {recipe}");
        }
        let other = PoolPath::parse("elsewhere/a").unwrap();
        assert_eq!(policy.decide(&FileFacts::of_path(&other)), PathPolicy::default(), "{recipe}");
    }
}

#[test]
fn the_example_of_quotas_is_right() {
    struct Everybody;
    impl Accounts for Everybody {
        fn uid(&self, name: &str) -> Option<u32> {
            Some(1000 + name.len() as u32)
        }
        fn gid(&self, _name: &str) -> Option<u32> {
            Some(50)
        }
    }
    let text = text();
    let part = text.split("## Quotas").nth(1).unwrap();
    let example = part.split("```toml").nth(1).unwrap().split("```").next().unwrap();
    let policy = Policy::compile(&example.into(), &Context { pool_url: "", accounts: &Everybody }).unwrap();
    let of = |subject| policy.quotas.limits_of(subject);
    let (anna, other) = (of(QuotaSubject::User(1004)), of(QuotaSubject::User(7)));
    assert_eq!((anna.bytes, anna.files, other.bytes), (None, Some(1_000_000), Some(200 << 30)));
    let group = of(QuotaSubject::Group(50));
    assert_eq!((group.soft_bytes, group.bytes, group.grace.as_secs()), (Some(500 << 30), Some(800 << 30), 1800));
}
