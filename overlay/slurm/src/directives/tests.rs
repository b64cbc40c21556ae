use proptest::prelude::*;

use super::*;

fn good(lines: &str) -> StagingRequest {
    parse(&format!("#!/bin/bash\n#SBATCH -n 1\n{lines}\necho\n")).unwrap().unwrap()
}

#[track_caller]
fn refused(lines: &str, words: &[&str]) {
    let error = parse(&format!("#!/bin/bash\n{lines}\n")).unwrap_err().to_string();
    for word in words {
        assert!(error.contains(word), "{error} does not say `{word}`");
    }
}

fn copy(path: &str, scratch: &str, kind: Option<SourceKind>) -> ScratchCopy {
    ScratchCopy { path: path.into(), scratch: scratch.into(), kind }
}

#[test]
fn a_script_without_directives_asks_for_nothing() {
    for script in ["", "#!/bin/sh\necho\n", "#DWARF debugging\n", "#SBATCH --comment=#DW\n", "echo\n#DW jobdw\n"] {
        assert_eq!(parse(script), Ok(None), "{script:?}");
    }
}

#[test]
fn a_missing_space_is_named() {
    refused("#DWfb stage_in=/a", &["line 2", "space"]);
    refused("#DWstage_in source=/a destination=$DW_JOB_STRIPED/a", &["space"]);
}

#[test]
fn datawarp_and_rabbit_have_one_meaning() {
    let datawarp = good(
        "#DW jobdw type=scratch capacity=10GiB access_mode=striped pool=forebay\n\
         #DW stage_in type=directory source=/d/in destination=$DW_JOB_STRIPED/in\n\
         #DW stage_out type=file source=${DW_JOB_STRIPED}/out/a destination=/d/a",
    );
    assert_eq!(datawarp.scratch_bytes, Some(10 << 30));
    assert_eq!(datawarp.copy_in, [copy("/d/in", "in", Some(SourceKind::Directory))]);
    assert_eq!(datawarp.copy_out, [copy("/d/a", "out/a", Some(SourceKind::File))]);
    let rabbit = good(
        "#DW fb scratch=10GiB\n#DW copy_in source=/d/in destination=$FOREBAY_JOB_DIR/in\n\
         #DW copy_out source=$DW_JOB_PRIVATE destination=/d/a",
    );
    assert_eq!((rabbit.copy_in, rabbit.copy_out), (vec![copy("/d/in", "in", None)], vec![copy("/d/a", "", None)]));
}

#[test]
fn options_of_fb_may_repeat() {
    let request = good("#DW fb stage_in=/d/a stage_in=/d/b* profile=none\n#DW fb stage_out=/d/o lease=2h when=always");
    assert_eq!(request.stage_in, ["/d/a", "/d/b*"]);
    assert_eq!(request.stage_out, ["/d/o"]);
    assert_eq!((&request.profile, request.lease_secs, request.scratch_bytes), (&ProfileUse::None, Some(7200), None));
    assert!(request.needs_staging());
    assert!(!good("#DW fb profile=auto").needs_staging());
}

#[test]
fn a_line_goes_on_behind_a_backslash() {
    assert_eq!(good("#DW fb \\\n#DW stage_in=/a \\\n#DW  stage_in=/b").stage_in, ["/a", "/b"]);
    assert_eq!(good("#DW fb stage_in=/a/\\\n#DWb").stage_in, ["/a/"], "another mark");
}

#[test]
fn sizes_are_those_of_slurm() {
    for (text, bytes) in
        [("1", 1), ("2k", 2048), ("2KB", 2000), ("3MiB", 3 << 20), ("1g", 1 << 30), ("1TB", 10u64.pow(12))]
    {
        assert_eq!(good(&format!("#DW fb scratch={text}")).scratch_bytes, Some(bytes), "{text}");
    }
    for text in ["", "0", "-1", "G", "1X", "1GiBs", "1ä", "99999999999P", "1.5G"] {
        refused(&format!("#DW fb scratch={text}"), &["line 2", "no size", "100GiB"]);
    }
}

#[test]
fn an_error_names_the_line_and_what_was_meant() {
    refused("#SBATCH -n 1\n#DW jodbw capacity=1G", &["line 3", "`jodbw`", "did you mean `jobdw`?"]);
    refused("#DW jobdw type=scratch capactiy=1G", &["line 2", "`capactiy`", "`capacity`"]);
    refused("#DW jobdw type=scratch", &["capacity=SIZE"]);
    refused("#DW jobdw capacity=1G type=cache", &["type=cache", "type=scratch"]);
    refused("#DW jobdw capacity=1G access_mode=stripped", &["access_mode=striped"]);
    refused("#DW fb stagein=/a", &["`stage_in`"]);
    refused("#DW fb stage_in", &["NAME=VALUE"]);
    refused("#DW fb stage_in=a", &["no absolute path"]);
    refused("#DW fb stage_in=/a/../b", &["`..`"]);
    refused("#DW fb stage_in=$HOME/x", &["variable"]);
    refused("#DW fb lease=soon", &["no duration", "12h"]);
    refused("#DW fb", &["needs an option"]);
    refused("#DW", &["directive is missing"]);
    refused("#DW xyzzy", &["one of jobdw"]);
    refused("#DW fb profile=auto\necho\n#DW fb profile=none", &["line 4", "first command"]);
}

#[test]
fn copies_lie_between_the_scratch_directory_and_the_outside() {
    let with = |line: &str| format!("#DW fb scratch=1G\n{line}");
    refused(&with("#DW copy_in source=/a destination=/b"), &["line 3", "$DW_JOB_STRIPED"]);
    refused(&with("#DW copy_in source=$DW_JOB_STRIPED/a destination=$DW_JOB_STRIPED/b"), &["not inside"]);
    refused(&with("#DW copy_in source=/a destination=$DW_JOB_STRIPED/../b"), &["`..`"]);
    refused(&with("#DW copy_in source=/a destination=$DW_JOB_STRIPPED/b"), &["did you mean $DW_JOB_STRIPED?"]);
    refused(&with("#DW stage_out source=$DW_JOB_STRIPED/a"), &["destination=PATH"]);
    refused(&with("#DW stage_in type=list source=/l destination=$DW_JOB_STRIPED/b"), &["type=list"]);
    refused(&with("#DW jobdw capacity=1G"), &["one scratch directory"]);
    refused("#DW copy_out source=$DW_JOB_STRIPED/a destination=/a", &["line 2", "no scratch directory", "jobdw"]);
}

#[test]
fn what_is_shown_as_a_view_is_staged() {
    let request = good("#DW fb view=/data/in lease=2h\n#DW fb stage_in=/data/more");
    assert_eq!((request.views.as_slice(), request.stage_in.len()), (&["/data/in".to_owned()][..], 2));
    refused("#DW fb view=/data/*.in", &["line 2", "no pattern"]);
    refused("#DW fb view=data", &["line 2"]);
    refused("#DW view path=/data", &["fb view=PATH"]);
}

#[test]
fn what_is_not_there_yet_is_refused() {
    refused("#DW fb policy=fast", &["not there yet"]);
}

#[test]
fn results_of_a_failed_job_are_a_choice() {
    let results = "#DW fb scratch=1G\n#DW copy_out source=$DW_JOB_STRIPED destination=/a\n";
    assert!(good(&format!("{results}#DW fb when=success")).needs_outcome());
    assert!(!good(&format!("{results}#DW fb when=always")).needs_outcome());
    assert!(!good("#DW fb when=success").needs_outcome(), "nothing is committed");
    refused("#DW fb when=succes", &["line 2", "when=success"]);
}

#[test]
fn a_profile_may_have_a_name() {
    assert_eq!(good("#DW fb profile=resnet50").profile, ProfileUse::Named("resnet50".into()));
    for name in ["", "5", "a/b", "a:b", "\u{e4}", &"x".repeat(65)] {
        refused(&format!("#DW fb profile={name}"), &["line 2", "is no name"]);
    }
}

#[test]
fn persistent_directories_have_the_words_of_datawarp() {
    let request = good(
        "#DW create_persistent name=set capacity=1GiB access_mode=private type=scratch pool=forebay\n\
         #DW persistentdw name=old\n#DW destroy_persistent name=old",
    );
    let set = PersistentDir { name: "set".into(), bytes: 1 << 30, access: DirectoryAccess::Private };
    let persistent = &request.persistent;
    assert_eq!((persistent.create.as_slice(), persistent.uses.as_slice()), (&[set][..], &["old".to_owned()][..]));
    assert_eq!(persistent.destroy, ["old"]);
    assert!(request.needs_staging() && !good("#DW destroy_persistent name=old").needs_staging());
    refused("#DW create_persistent name=set", &["line 2", "capacity=SIZE"]);
    refused("#DW create_persistent capacity=1G", &["name=NAME"]);
    refused("#DW create_persistent name=a-b capacity=1G", &["variable"]);
    refused("#DW persistentdw name=a\n#DW persistentdw name=a", &["line 3", "already"]);
    refused("#DW persistentdw name=a capacity=1G", &["create_persistent"]);
    refused("#DW persistentdw nane=a", &["did you mean `name`?"]);
    refused(
        "#DW fb scratch=1G\n#DW stage_in source=/a destination=$DW_PERSISTENT_STRIPED_set/a",
        &["line 3", "in the script"],
    );
}

#[test]
fn a_request_survives_as_json() {
    let request = good("#DW fb scratch=1G stage_in=/a profile=none\n#DW copy_in source=/a destination=$DW_JOB_STRIPED");
    let text = serde_json::to_string(&request).unwrap();
    assert_eq!(serde_json::from_str::<StagingRequest>(&text).unwrap(), request);
}

proptest! {
    #[test]
    fn no_script_makes_it_panic(script in ".*") {
        let _ = parse(&script);
        let _ = parse(&format!("#DW {script}"));
    }

    #[test]
    fn no_line_of_known_words_makes_it_panic(
        lines in prop::collection::vec(
            (prop::sample::select(DIRECTIVES.to_vec()), prop::sample::select(OPTIONS.to_vec()), "\\PC{0,12}"), 0..6)
    ) {
        let lines: Vec<String> =
            lines.iter().map(|(directive, option, value)| format!("#DW {directive} {option}={value}\\")).collect();
        let _ = parse(&lines.join("\n"));
    }
}
