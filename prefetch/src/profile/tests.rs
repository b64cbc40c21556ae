use super::*;

fn run_of(line: &str) -> Invocation {
    Invocation { user: 1, words: line.split(' ').map(Into::into).collect(), ..Invocation::default() }
}

#[test]
fn a_profile_of_no_runs_expects_nothing() {
    let job = run_of("a b");
    assert!(Profile::new(&job).predict(&job).is_empty());
}
