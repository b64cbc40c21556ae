use super::*;

fn words(line: &str) -> Invocation {
    let words = line.split(' ').filter(|w| !w.is_empty()).map(Into::into).collect();
    Invocation { user: 1000, words, ..Invocation::default() }
}

fn signature(line: &str) -> String {
    words(line).signature().as_str().to_owned()
}

#[test]
fn what_changes_from_run_to_run_is_masked() {
    assert_eq!(
        signature("python3 train.py --epochs=10 --rate=1e-3 data/part-0042"),
        "1000 - python3 train.py --epochs=# --rate=# data/part-#"
    );
    assert_eq!(signature("/opt/x/solve7 -n 4 in/2024-01-17.nc"), "1000 - solve# -n # in/#-#-#.nc");
    assert_eq!(signature("sort ab/cd12ef34a9"), "1000 - sort ab/~");
    assert_eq!(signature(""), "1000 - -");
}

#[test]
fn wrappers_are_looked_through() {
    let plain = signature("python3 train.py 7");
    for wrapped in [
        "srun -n 4 --mem=4G python3 train.py 7",
        "env A=B C=D python3 train.py 7",
        "time nice -n 5 numactl -N 0 python3 train.py 7",
        "mpirun -np 16 --bind-to core /usr/bin/python3 -u train.py 7",
        "timeout -k 5 3600 nohup python3 ./dir/train.py 7",
        "apptainer exec --bind a:b image.sif python3 train.py 7",
        "taskset 0xff -- python3 train.py 7",
    ] {
        let got = signature(wrapped).replace(" -u", "");
        assert_eq!(got, plain, "{wrapped}");
    }
    assert_eq!(signature("time"), "1000 - time");
}

#[test]
fn scripts_are_named_for_interpreters() {
    assert_eq!(signature("python3.11 -W ignore -m pkg.mod --x 3"), "1000 - python3.11 -mpkg.mod -W ignore -m --x #");
    assert_eq!(
        signature("java -Xmx4g -jar lib/app-1.2.jar in"),
        "1000 - java app-#.#.jar -Xmx4g -jar in".replace("4g", "#g")
    );
    assert_eq!(signature("bash /x/job_17.sh 17"), "1000 - bash job_#.sh #");
    assert_eq!(signature("python3 -c print(1)"), signature("python3 -c print(2)"));
    assert_ne!(signature("python3 -c print(1)"), signature("python3 -c exit(1)"));
    assert_ne!(signature("bash -euc cat(1)"), signature("bash -euc tac(1)"));
    assert_eq!(signature("bash -e -u 7.sh"), signature("bash -e -u 8.sh"));
    assert!(signature("bash -e -u x.sh").as_str().ends_with("bash x.sh -e -u"), "{:?}", signature("bash -e -u x.sh"));
}

#[test]
fn a_glob_of_any_length_is_one_argument() {
    let line = |n: usize| format!("cat {}", (0..n).map(|i| format!("part-{i}")).collect::<Vec<_>>().join(" "));
    assert_eq!(signature(&line(3)), signature(&line(3000)));
    let long: String = (0..100).map(|i| format!(" {}", "x".repeat(i))).collect();
    assert!(signature(&format!("cat{long}")).len() <= SIGNATURE_BYTES_MAX);
    assert!(signature(&"ä".repeat(5000)).len() <= SIGNATURE_BYTES_MAX);
}

#[test]
fn identifiers_are_eight_digits_and_differ() {
    let (one, other) = (words("a 1").signature(), words("b 1").signature());
    assert_eq!(one.id().len(), 8);
    assert_ne!(one.id(), other.id());
}

#[test]
fn near_jobs_are_similar_and_other_programs_are_not() {
    let near = |a: &str, b: &str| words(a).signature().similarity(&words(b).signature());
    assert_eq!(near("python3 a.py 1", "python3 a.py 2"), 1.0);
    assert_eq!(near("python3 a.py", "python3 b.py"), 0.0);
    assert_eq!(near("sort x", "cat x"), 0.0);
    let added = near("python3 a.py --x=1 --y=2", "python3 a.py --x=1 --y=2 --fast");
    let other = near("python3 a.py --x=1 --y=2", "python3 a.py in out");
    assert!(added > other && other > 0.0 && added < 1.0, "{added} {other}");
}

fn at(line: &str, place: ParameterPlace, number: u16, unit: Unit) -> Option<i64> {
    let of = words(line).parameters();
    of.at(&Parameter { place, number, unit, value: 0, width: 0 })
}

#[test]
fn parameters_are_numbers_and_dates_by_place() {
    let line = "srun -n 4 python3 train.py --day=2024-01-17 data/part-0042 20240117 2024011703 0.5 202401";
    assert_eq!(at(line, ParameterPlace::Argument(2), 0, Unit::Day), Some(19_739));
    assert_eq!(at(line, ParameterPlace::Argument(2), 2, Unit::Count), Some(17));
    assert_eq!(at(line, ParameterPlace::Argument(3), 0, Unit::Count), Some(42));
    assert_eq!(at(line, ParameterPlace::Argument(4), 0, Unit::Day), Some(19_739));
    assert_eq!(at(line, ParameterPlace::Argument(5), 0, Unit::Hour), Some(19_739 * 24 + 3));
    assert_eq!(at(line, ParameterPlace::Argument(6), 0, Unit::Count), None);
    assert_eq!(at(line, ParameterPlace::Argument(7), 0, Unit::Month), Some(2024 * 12));
    let array = Invocation { array_index: Some(7), ..words("x") };
    let like = Parameter { place: ParameterPlace::ArrayIndex, number: 0, unit: Unit::Count, value: 0, width: 0 };
    assert_eq!(array.parameters().at(&like), Some(7));
    let many = words(&format!("x {}", "1 ".repeat(5000)));
    assert_eq!(many.parameters().len(), PARAMETERS_MAX);
}

/// The stored example of an invocation has the same signature.
#[test]
fn what_is_looked_at_is_bounded() {
    let words = |n: usize, len: usize| (0..n).map(|at| format!("{at}{}", "ä".repeat(len))).collect::<Vec<_>>();
    for words in [words(5000, 1), words(3, 5000)] {
        let whole = Invocation { words, ..Invocation::default() };
        let bounded = whole.bounded().into_owned();
        assert!(bounded != whole && bounded.bounded().into_owned() == bounded);
        assert_eq!(bounded.signature(), whole.signature());
    }
}
