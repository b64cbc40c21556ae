//! Finds the Slurm job of a thread: by the ancestor that runs the step of the job.
//!
//! A prolog runs before any process of the job, so it can name none. Each step of a job has a process `slurmstepd`, of
//! which the tasks of the step are descendants, and whose title has the number of the job: `slurmstepd: [7.batch]`.

use std::fs;

use forebay_system::process::{name_and_owner, process_and_parent};

use crate::attribution::climb;

/// The name of the program that runs a step.
const STEP_PROGRAM: &str = "slurmstepd";

/// Returns the process of the step that a thread belongs to, and the number of the step's job.
///
/// Only ancestors are examined: the kernel needs locks of a process to read its title, and the process of the thread
/// may hold them while it waits for an answer.
pub fn step_of(thread: u32) -> Option<(u32, String)> {
    let (_, parent) = process_and_parent(thread)?;
    climb(parent, step, process_and_parent)
}

/// Returns a process and the number of its job, if it runs a step. Any user can give a process this title, but not this
/// owner.
fn step(process: u32) -> Option<(u32, String)> {
    name_and_owner(process).filter(|(name, owner)| name == STEP_PROGRAM && *owner == 0)?;
    let title = fs::read(format!("/proc/{process}/cmdline")).ok()?;
    Some((process, job_in(&String::from_utf8_lossy(&title))?))
}

/// Returns the number of the job in the title of a step.
fn job_in(title: &str) -> Option<String> {
    let (_, step) = title.split_once('[')?;
    let digits: String = step.chars().take_while(char::is_ascii_digit).collect();
    (!digits.is_empty()).then_some(digits)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_title_of_a_step_names_its_job() {
        assert_eq!(job_in("slurmstepd: [123.batch]\0").as_deref(), Some("123"));
        assert_eq!(job_in("slurmstepd: [7.0]").as_deref(), Some("7"));
        assert_eq!(job_in("slurmstepd: [45+1.extern]").as_deref(), Some("45"));
        assert_eq!(job_in("slurmstepd: [x.0]"), None);
        assert_eq!(job_in("slurmstepd"), None);
    }

    #[test]
    fn a_process_without_a_step_belongs_to_no_job() {
        assert_eq!(step_of(std::process::id()), None);
    }
}
