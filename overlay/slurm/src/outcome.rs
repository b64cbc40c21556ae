//! How a job ended.
//!
//! A node does not know it: to an epilog, a job that was cancelled or that reached its time limit has the same status as
//! one that succeeded. The controller knows it when all processes of the job are gone.

use serde::{Deserialize, Serialize};

/// What the controller tells the nodes of a job about its end.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum JobOutcome {
    /// The script of the job ended with exit code 0.
    Succeeded,
    Failed,
    /// The job was cancelled by `scancel --hurry`: its results may be given up.
    GivenUp,
}

/// Reads the outcome from the output of `scontrol -o show job`. Returns `None` if it has none.
pub fn outcome_of(shown: &str) -> Option<JobOutcome> {
    let (code, signal) = field(shown, "ExitCode")?.split_once(':')?;
    let (code, signal): (u32, u32) = (code.parse().ok()?, signal.parse().ok()?);
    Some(if code == 0 && signal == 0 { JobOutcome::Succeeded } else { JobOutcome::Failed })
}

/// Reads the number of a task in its array. `None`: the job is no task of an array.
pub fn array_index_of(shown: &str) -> Option<u64> {
    field(shown, "ArrayTaskId")?.parse().ok()
}

/// Reads the number of the array that a task belongs to. `None`: the job is no task of an array.
pub fn array_job_of(shown: &str) -> Option<u64> {
    field(shown, "ArrayJobId")?.parse().ok()
}

fn field<'a>(shown: &'a str, name: &str) -> Option<&'a str> {
    shown.split_whitespace().find_map(|word| word.strip_prefix(name)?.strip_prefix('='))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_job_succeeds_if_its_script_does() {
        let shown = |code: &str| format!("JobId=7 ArrayJobId=6 ArrayTaskId=12 DerivedExitCode=1:0 ExitCode={code} A=b");
        assert_eq!(outcome_of(&shown("0:0")), Some(JobOutcome::Succeeded));
        assert_eq!(outcome_of(&shown("3:0")), Some(JobOutcome::Failed));
        assert_eq!(outcome_of(&shown("0:15")), Some(JobOutcome::Failed), "cancelled, or the time limit");
        for code in ["", "0", "x:0"] {
            assert_eq!(outcome_of(&shown(code)), None);
        }
        assert_eq!(outcome_of("slurm_load_jobs error: Invalid job id specified"), None);
        assert_eq!((array_index_of(&shown("0:0")), array_job_of(&shown("0:0"))), (Some(12), Some(6)));
        assert_eq!((array_index_of("JobId=7"), array_index_of("ArrayTaskId=1-20")), (None, None));
    }
}
