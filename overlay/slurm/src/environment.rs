//! What Slurm tells a prolog and an epilog of a job.

use forebay_api::Failure;
use forebay_prefetch::signature::Invocation;

/// Returns the name that Forebay gives to a Slurm job.
pub fn job_name(number: &str) -> String {
    format!("slurm-{number}")
}

/// A job, as the environment of a prolog describes it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SlurmJob {
    /// Its number.
    pub id: String,
    pub uid: u32,
    pub account: Option<String>,
    pub work_dir: String,
    pub comment: String,
    /// How often it was requeued.
    pub requeues: u64,
    /// Its number in an array, if that is known.
    pub array_index: Option<u64>,
    /// The status of its script, as `wait(2)` returns it. Only an epilog has it, and 0 also stands for a job that Slurm
    /// ends before its script has ended.
    pub wait_status: Option<u32>,
}

impl SlurmJob {
    /// Reads the job from variables of the environment.
    ///
    /// # Errors
    /// Usage: a variable that every prolog and epilog has is missing.
    pub fn of(variable: impl Fn(&str) -> Option<String>) -> Result<Self, Failure> {
        let given = |name: &str| variable(name).filter(|value| !value.is_empty());
        let id = given("SLURM_JOB_ID").filter(|id| id.bytes().all(|b| b.is_ascii_digit()));
        let uid = given("SLURM_JOB_UID").and_then(|uid| uid.parse().ok());
        let (Some(id), Some(uid)) = (id, uid) else {
            return Err(Failure::usage("SLURM_JOB_ID and SLURM_JOB_UID are not set, or are no numbers")
                .remedy("slurmd sets them for Prolog= and Epilog= of slurm.conf; `forebay job` works without Slurm"));
        };
        Ok(Self {
            id,
            uid,
            account: given("SLURM_JOB_ACCOUNT"),
            work_dir: given("SLURM_JOB_WORK_DIR").unwrap_or_default(),
            comment: given("SLURM_JOB_COMMENT").unwrap_or_default(),
            requeues: given("SLURM_JOB_RESTART_COUNT").and_then(|count| count.parse().ok()).unwrap_or(0),
            array_index: given("SLURM_ARRAY_TASK_ID").and_then(|index| index.parse().ok()),
            wait_status: given("SLURM_JOB_EXIT_CODE").and_then(|status| status.parse().ok()),
        })
    }

    /// The name of its allocation: also the name that `forebay run` and `stage` use inside the job.
    pub fn allocation(&self) -> String {
        job_name(&self.id)
    }

    /// Returns what makes two jobs the same job again. A prolog knows neither the script nor its arguments. So jobs of
    /// one user and one working directory are runs of one job, unless their comments differ in more than numbers: the
    /// words of the comment are the arguments. The first word stands for the program, and has no slash, since only the
    /// last component of a program's path counts.
    pub fn invocation(&self) -> Invocation {
        self.as_program(format!("slurm{}", self.work_dir.replace('/', ":")))
    }

    /// Returns what makes two jobs with `profile=NAME` the same job again: the user and the name, whatever their
    /// directories are.
    pub fn named_invocation(&self, name: &str) -> Invocation {
        // The numbers in a program's name do not count, but they do count in this name.
        let digits: u64 =
            name.bytes().fold(0xcbf2_9ce4_8422_2325, |hash, b| (hash ^ u64::from(b)).wrapping_mul(0x100_0000_01b3));
        let letters: String = (0..8).map(|at| char::from(b'a' + (digits >> (at * 8)) as u8 % 26)).collect();
        let mark = if name.bytes().any(|b| b.is_ascii_digit()) { format!("@{letters}") } else { String::new() };
        self.as_program(format!("slurm@{name}{mark}"))
    }

    fn as_program(&self, program: String) -> Invocation {
        let arguments = self.comment.split_whitespace().map(str::to_owned);
        Invocation {
            user: self.uid,
            account: self.account.clone(),
            words: std::iter::once(program).chain(arguments).collect(),
            array_index: self.array_index,
        }
    }
}

/// The node of a job that a prolog or an epilog runs on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct JobNode {
    pub name: String,
    /// How many nodes the job has.
    pub nodes: usize,
}

impl JobNode {
    /// Reads the node from variables of the environment. `host` is the name of the machine.
    pub fn of(variable: impl Fn(&str) -> Option<String>, host: &str) -> Self {
        let given = |name: &str| variable(name).filter(|value| !value.is_empty());
        let host = host.split('.').next().unwrap_or_default();
        Self {
            name: given("SLURMD_NODENAME").unwrap_or_else(|| host.to_owned()),
            // Slurm 22.05 gives the list of nodes to hooks under its older name.
            nodes: ["SLURM_JOB_NODELIST", "SLURM_NODELIST"]
                .into_iter()
                .find_map(given)
                .map_or(1, |list| count_hosts(&list)),
        }
    }
}

/// Returns how many names a list of Slurm has, such as `n[1-3,07],login`; 1 at least.
fn count_hosts(list: &str) -> usize {
    let (mut all, mut names, mut depth) = (0_usize, 1_usize, 0_usize);
    let mut ranges = String::new();
    for c in list.chars().chain([',']) {
        match c {
            '[' => depth += 1,
            ']' => {
                depth = depth.saturating_sub(1);
                names = names.saturating_mul(ranges.split(',').map(count_range).fold(0, usize::saturating_add));
                ranges.clear();
            }
            ',' if depth == 0 => {
                all = all.saturating_add(names);
                names = 1;
            }
            c if depth > 0 => ranges.push(c),
            _ => {}
        }
    }
    all.max(1)
}

fn count_range(range: &str) -> usize {
    let ends = range.split_once('-').and_then(|(first, last)| Some((first.parse().ok()?, last.parse().ok()?)));
    ends.map_or(1, |(first, last): (usize, usize)| last.saturating_sub(first).saturating_add(1))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn job(variables: &[(&str, &str)]) -> Result<SlurmJob, Failure> {
        SlurmJob::of(|name| variables.iter().find(|(known, _)| *known == name).map(|(_, value)| (*value).to_owned()))
    }

    #[test]
    fn a_job_is_read_from_the_environment_of_a_prolog() {
        let variables = [
            ("SLURM_JOB_ID", "17"),
            ("SLURM_JOB_UID", "1000"),
            ("SLURM_JOB_WORK_DIR", "/data/a/run-3"),
            ("SLURM_JOB_COMMENT", "train day=4"),
        ];
        let job = job(&variables).unwrap();
        assert_eq!((job.allocation().as_str(), job.uid), ("slurm-17", 1000));
        assert_eq!(job.invocation().signature().as_str(), "1000 - slurm:data:a:run-# train day=#");
    }

    #[test]
    fn what_no_prolog_has_is_refused() {
        assert!(job(&[("SLURM_JOB_UID", "1")]).is_err());
        assert!(job(&[("SLURM_JOB_ID", "1")]).is_err());
        assert!(job(&[("SLURM_JOB_ID", "1 2"), ("SLURM_JOB_UID", "1")]).is_err());
        assert!(job(&[("SLURM_JOB_ID", ""), ("SLURM_JOB_UID", "1")]).is_err());
    }

    #[test]
    fn jobs_of_two_directories_are_two_jobs() {
        let of = |dir: &str| {
            let variables = [("SLURM_JOB_ID", "1"), ("SLURM_JOB_UID", "1"), ("SLURM_JOB_WORK_DIR", dir)];
            job(&variables).unwrap().invocation().signature()
        };
        assert_eq!(of("/a/x").similarity(&of("/a/y")), 0.0);
        assert_eq!(of("/a/7"), of("/a/8"));
    }

    #[test]
    fn jobs_of_one_name_are_one_job_whatever_their_directory_is() {
        let of = |dir: &str, name: &str| {
            let variables = [("SLURM_JOB_ID", "1"), ("SLURM_JOB_UID", "1"), ("SLURM_JOB_WORK_DIR", dir)];
            job(&variables).unwrap().named_invocation(name).signature()
        };
        assert_eq!(of("/a/x", "train").as_str(), "1 - slurm@train");
        assert_eq!(of("/a/x", "resnet50"), of("/b/y", "resnet50"));
        assert_eq!(of("/a", "resnet50").similarity(&of("/a", "resnet101")), 0.0);
        assert_eq!(of("/a", "train").similarity(&of("/a", "test")), 0.0);
    }

    #[test]
    fn the_nodes_of_a_job_are_counted() {
        for (list, count) in [("n1", 1), ("n[1-3,07],login", 5), ("r[1-2]n[1-4]", 8), ("a,b,c", 3), ("n[", 1), ("", 1)]
        {
            assert_eq!(count_hosts(list), count, "{list}");
        }
        let node = JobNode::of(|name| (name == "SLURM_JOB_NODELIST").then(|| "n[0-1]".into()), "n1.site.org");
        assert_eq!(node, JobNode { name: "n1".into(), nodes: 2 });
        let node = JobNode::of(|name| (name == "SLURM_NODELIST").then(|| "n[0-2]".into()), "n1");
        assert_eq!(node.nodes, 3, "Slurm 22.05");
    }
}
