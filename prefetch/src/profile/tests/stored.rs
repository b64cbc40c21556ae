use proptest::prelude::*;

use super::*;

fn parts() -> impl Strategy<Value = Option<Parts>> {
    proptest::option::of((1_u64..1 << 40, any::<[u64; 4]>()).prop_map(|(part_bytes, bits)| Parts { part_bytes, bits }))
}

fn some_use() -> impl Strategy<Value = FileUse> {
    let path =
        prop_oneof!["[a-c]{1,3}/(part-)?[0-9]{1,6}(\\.h5)?", "[a-z]/2024-0[1-9]-[0-2][0-9]/[0-9]{1,4}", "\\PC{1,12}"];
    (path, any::<u64>(), any::<u32>(), parts()).prop_map(|(path, size_bytes, rank, parts)| FileUse {
        path,
        size_bytes,
        rank,
        parts,
    })
}

fn some_run() -> impl Strategy<Value = (Invocation, u64, Vec<FileUse>)> {
    let words = proptest::collection::vec("[a-z./=-]{0,8}[0-9]{0,18}(-[0-9]{2}){0,2}", 0..6);
    let invocation = (any::<u32>(), proptest::option::of("[a-z]{0,8}"), words, proptest::option::of(any::<u64>()));
    let invocation =
        invocation.prop_map(|(user, account, words, array_index)| Invocation { user, account, words, array_index });
    (invocation, any::<u64>(), proptest::collection::vec(some_use(), 0..40))
}

fn some_profile() -> impl Strategy<Value = Profile> {
    proptest::collection::vec(some_run(), 1..11).prop_map(|runs| {
        let mut profile = Profile::new(&runs[0].0);
        runs.into_iter().for_each(|(invocation, ended, uses)| profile.fold(&invocation, ended, uses));
        profile
    })
}

proptest! {
    #[test]
    fn what_is_stored_is_read_back(profile in some_profile()) {
        prop_assert_eq!(Profile::decode(&profile.encode()), Ok(profile));
    }

    #[test]
    fn a_document_is_read_back(profile in some_profile()) {
        // A document contains only paths below the mount; other paths are not imported.
        prop_assume!(profile.files.iter().all(|f| !f.path.starts_with('/') && !f.path.split('/').any(|n| n == "..")));
        let text = serde_json::to_string(&ProfileDocument::from(&profile)).unwrap();
        let document: ProfileDocument = serde_json::from_str(&text).unwrap();
        prop_assert_eq!(Profile::try_from(document), Ok(profile));
    }

    #[test]
    fn garbage_is_an_error(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
        let _ = Profile::decode(&bytes);
        let mut packed = vec![1];
        packed.extend(zstd::bulk::compress(&bytes, 1).unwrap());
        let _ = Profile::decode(&packed);
    }

    #[test]
    fn a_damaged_profile_is_an_error_or_a_profile(profile in some_profile(), at: prop::sample::Index, to: u8, cut: prop::sample::Index) {
        let packed = profile.encode();
        let mut content = zstd::stream::decode_all(&packed[1..]).unwrap();
        let at = at.index(content.len());
        content[at] = to;
        content.truncate(content.len().min(at + 1 + cut.index(content.len())));
        let mut damaged = vec![1];
        damaged.extend(zstd::bulk::compress(&content, 1).unwrap());
        if let Ok(read) = Profile::decode(&damaged) {
            let _ = read.predict_at(read.example(), u64::MAX);
            prop_assert_eq!(Profile::decode(&read.encode()), Ok(read));
        }
    }

    #[test]
    fn predictions_are_in_order_and_of_one_path_each(profile in some_profile(), (job, now, _) in some_run()) {
        for expected in [profile.predict(&job), profile.predict_at(&job, now)] {
            prop_assert!(expected.windows(2).all(|pair| pair[0].rank <= pair[1].rank));
            prop_assert!(expected.iter().all(|e| (0.0..=1.0).contains(&e.probability)));
            let mut paths: Vec<&str> = expected.iter().map(|e| e.path.as_str()).collect();
            paths.sort_unstable();
            prop_assert!(paths.windows(2).all(|pair| pair[0] != pair[1]));
        }
    }

    #[test]
    fn a_repeat_is_foreseen_exactly((job, _, uses) in some_run(), runs in 1_usize..12) {
        let mut profile = Profile::new(&job);
        (0..runs).for_each(|run| profile.fold(&job, at_day(run), uses.clone()));
        let mut expected: Vec<String> = profile.predict(&job).into_iter().map(|e| {
            assert!(e.probability > 0.999, "{e:?}");
            e.path
        }).collect();
        let mut used: Vec<String> = uses.into_iter().map(|u| u.path).collect();
        expected.sort_unstable();
        used.sort_unstable();
        used.dedup();
        prop_assert_eq!(expected, used);
    }
}

fn one_file() -> Profile {
    let parts = Some(Parts { part_bytes: 65_536, bits: [0b1000_1111, 0, 0, 1 << 63] });
    let used = FileUse { path: "data/part-0007".into(), size_bytes: 1 << 24, rank: 1, parts };
    let mut profile = Profile::new(&job("x --day=2024-01-17 7", []).invocation);
    profile.fold(&job("x --day=2024-01-17 7", []).invocation, 100, vec![used]);
    profile
}

#[test]
fn documents_are_readable_as_json_and_as_toml() {
    let document = ProfileDocument::from(&one_file());
    let text = toml::to_string(&document).unwrap();
    for part in ["path = \"data/part-0007\"", "parts = \"0-3,7,255\"", "runs = \"x\"", "unit = \"day\"", "argument = 1"]
    {
        assert!(text.contains(part), "{part} in {text}");
    }
    assert_eq!(Profile::try_from(toml::from_str::<ProfileDocument>(&text).unwrap()), Ok(one_file()));
}

#[test]
fn what_is_wrong_in_a_document_is_named() {
    let wrong = |change: fn(&mut ProfileDocument)| {
        let mut document = ProfileDocument::from(&one_file());
        change(&mut document);
        Profile::try_from(document).unwrap_err().field
    };
    assert_eq!(wrong(|d| d.version = 9), "version");
    assert_eq!(wrong(|d| d.files[0].path = "/etc/passwd".into()), "files[0].path");
    assert_eq!(wrong(|d| d.files[0].path = "a/../../b".into()), "files[0].path");
    assert_eq!(wrong(|d| d.files[0].path = String::new()), "files[0].path");
    assert_eq!(wrong(|d| d.files[0].runs = "xx".into()), "files[0].runs");
    assert_eq!(wrong(|d| d.files[0].runs = "-".into()), "files[0].runs");
    assert_eq!(wrong(|d| d.files[0].runs = "yes".into()), "files[0].runs");
    assert_eq!(wrong(|d| d.files[0].parts = Some("0-300".into())), "files[0].parts");
    assert_eq!(wrong(|d| d.files[0].parts = None), "files[0].parts");
    assert_eq!(wrong(|d| d.files[0].part_bytes = Some(0)), "files[0].part_bytes");
    assert_eq!(wrong(|d| d.files.push(d.files[0].clone())), "files");
    assert_eq!(wrong(|d| d.runs = vec![d.runs[0].clone(); 9]), "runs");
    assert_eq!(wrong(|d| d.runs[0].parameters = vec![d.runs[0].parameters[0].clone(); 99]), "runs[0].parameters");
    let unknown = serde_json::from_str::<ProfileDocument>(r#"{"version":1,"example":{"user":1},"fils":[]}"#);
    assert!(unknown.unwrap_err().to_string().contains("fils"));
}

#[test]
fn another_version_and_a_cut_profile_are_errors() {
    let mut bytes = one_file().encode();
    assert!(Profile::decode(&bytes[..bytes.len() - 1]).is_err());
    bytes[0] = 77;
    assert_eq!(Profile::decode(&bytes), Err(DecodeError::Version(77)));
    assert_eq!(Profile::decode(&[]), Err(DecodeError::Length));
}

/// 10^4 signatures of 10^4 files in 1 GiB leave 107 bytes for a file; the aim is a tenth of that.
#[test]
fn regular_names_take_few_bytes() {
    let of = |_| job("x", (0..10_000).map(|i| format!("data/train-{:02}/part-{i:06}.parquet", i / 1000)));
    let bytes = learnt(8, of).encode().len();
    assert!(bytes < 8 * 10_000, "{bytes} bytes for 10^4 files");
}

#[test]
fn a_file_is_forgotten_after_as_many_runs_as_are_remembered() {
    let of = |run: usize| job("x", ["always".to_owned(), format!("only-{}", ["a", "b"][usize::from(run > 0)])]);
    let has = |runs: usize| learnt(runs, of).files().any(|file| file.path == "only-a");
    assert!(has(RUNS_MAX) && !has(RUNS_MAX + 1));
    assert_eq!(learnt(20, of).runs(), RUNS_MAX);
}

/// A job whose inputs are all new each time, named by hash, must not fill its profile with files that are never used
/// again.
#[test]
fn hashes_that_one_run_used_are_forgotten_soon() {
    let of = |run: usize| {
        let hash = move |i: usize| ((run * 50 + i) as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        job("x", (0..50).map(move |i| format!("obj/{i:02x}/{:016x}", hash(i))))
    };
    let profile = learnt(8, of);
    assert!(profile.files().count() <= 50 * 5, "{} files", profile.files().count());
    assert!(profile.predict(&of(8).invocation).iter().all(|e| e.probability < STAGED_MIN));
    let same = learnt(8, |_| of(0));
    assert_eq!(same.files().count(), 50);
}

#[test]
fn sizes_of_what_is_not_used_now_are_a_sixteenth_more_at_most() {
    for bytes in [0, 1, 31, 33, 1000, 123_456_789, u64::MAX] {
        let rounded = rounded_up(bytes);
        assert!(rounded >= bytes && rounded - bytes <= bytes / 16, "{bytes}: {rounded}");
        assert_eq!(rounded_up(rounded), rounded);
    }
}

#[test]
fn a_summary_says_how_often_and_when_last() {
    let of = |run: usize| job("x", ["always".to_owned()].into_iter().chain((run == 1).then(|| "once".to_owned())));
    let profile = learnt(3, of);
    let once = profile.files().find(|file| file.path == "once").unwrap();
    assert_eq!((once.used, once.seen, once.last_seen_unix), (1, 3, at_day(1)));
    assert!(once.probability > 0.2 && once.probability < 0.5);
    assert_eq!(profile.files().next().unwrap().probability, 1.0);
    assert_eq!(profile.last_seen_unix(), at_day(2));
}

#[test]
fn what_is_used_of_a_file_is_kept_unless_it_changes_each_time() {
    let of = |bits: u64| Some(Parts { part_bytes: 4096, bits: [bits, 0, 0, 0] });
    let mut profile = Profile::new(&Invocation::default());
    let mut fold = |bits: u64| {
        let used = FileUse { path: "f".into(), size_bytes: 1 << 20, rank: 1, parts: of(bits) };
        profile.fold(&Invocation::default(), 0, vec![used]);
        profile.files().next().unwrap().parts.unwrap().bits[0]
    };
    assert_eq!(fold(0b0011), 0b0011);
    assert_eq!(fold(0b0111), 0b0111);
    assert_eq!(fold(0b0011_0011), 0b0011_0111);
    assert_eq!(fold(0b1 << 60), 1 << 60);
}

#[test]
fn bytes_of_parts_end_with_the_file() {
    let parts = Parts { part_bytes: 100, bits: [0b101, 0, 0, 1 << 63] };
    assert_eq!(parts.bytes(250), 150);
    assert_eq!(parts.bytes(100_000), 200 + 100_000 - 25_500);
    assert_eq!(parts.bytes(0), 0);
}
