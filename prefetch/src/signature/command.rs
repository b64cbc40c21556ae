//! Finds the program that a command line runs: behind wrappers, and with the script for an interpreter.

use super::shape;

/// The most nested wrappers that are skipped.
const WRAPPERS_MAX: usize = 8;

/// A program that runs another one.
struct Wrapper {
    name: &'static str,
    /// Options whose value is the next word.
    with_value: &'static [&'static str],
    /// Its own operands before the command.
    operands: usize,
}

const fn wrapper(name: &'static str, with_value: &'static [&'static str], operands: usize) -> Wrapper {
    Wrapper { name, with_value, operands }
}

const MPI: &[&str] = &[
    "-n",
    "-np",
    "--np",
    "-c",
    "-N",
    "-npernode",
    "-ppn",
    "-H",
    "-host",
    "--host",
    "-hosts",
    "-hostfile",
    "--hostfile",
    "-machinefile",
    "-f",
    "-x",
    "-wdir",
    "--map-by",
    "--bind-to",
    "--rank-by",
    "-map-by",
    "-bind-to",
    "-env",
    "-genv",
];
const SRUN: &[&str] = &[
    "-n",
    "-N",
    "-c",
    "-p",
    "-t",
    "-A",
    "-J",
    "-w",
    "-x",
    "-C",
    "-G",
    "-D",
    "-o",
    "-e",
    "-i",
    "-d",
    "-m",
    "-q",
    "-r",
    "-M",
    "-T",
    "-L",
    "-K",
    "--ntasks",
    "--nodes",
    "--cpus-per-task",
    "--partition",
    "--time",
    "--account",
    "--gres",
    "--job-name",
    "--nodelist",
    "--mem",
    "--mpi",
    "--qos",
    "--output",
    "--error",
    "--gpus",
    "--export",
    "--jobid",
];
const CONTAINER: &[&str] = &["-B", "--bind", "-H", "--home", "--env", "--pwd", "-W", "-o", "--overlay"];

const WRAPPERS: [Wrapper; 22] = [
    wrapper("env", &["-u", "-C", "--unset", "--chdir"], 0),
    wrapper("time", &["-f", "-o"], 0),
    wrapper("nice", &["-n"], 0),
    wrapper("ionice", &["-c", "-n"], 0),
    wrapper("chrt", &[], 1),
    wrapper("taskset", &[], 1),
    wrapper("numactl", &["-N", "-m", "-C", "-i", "-p"], 0),
    wrapper("stdbuf", &["-i", "-o", "-e"], 0),
    wrapper("timeout", &["-k", "-s"], 1),
    wrapper("nohup", &[], 0),
    wrapper("setsid", &[], 0),
    wrapper("exec", &["-a"], 0),
    wrapper("sudo", &["-u", "-g"], 0),
    wrapper("strace", &["-e", "-o", "-s"], 0),
    wrapper("mpirun", MPI, 0),
    wrapper("mpiexec", MPI, 0),
    wrapper("mpiexec.hydra", MPI, 0),
    wrapper("orterun", MPI, 0),
    wrapper("srun", SRUN, 0),
    wrapper("ibrun", &["-n", "-o"], 0),
    wrapper("singularity", CONTAINER, 2),
    wrapper("apptainer", CONTAINER, 2),
];

/// A program that runs a script.
struct Interpreter {
    /// The name without a version.
    name: &'static str,
    /// The letters of the options whose value is the text of the script: `bash -c`, `perl -e`; a letter may end a
    /// cluster.
    text: &'static str,
    /// Options whose value is the next word.
    with_value: &'static [&'static str],
}

const fn interpreted(name: &'static str, text: &'static str, with_value: &'static [&'static str]) -> Interpreter {
    Interpreter { name, text, with_value }
}

const INTERPRETERS: [Interpreter; 13] = [
    interpreted("python", "c", &["-W", "-X", "--check-hash-based-pycs"]),
    interpreted("pypy", "c", &["-W", "-X"]),
    interpreted("perl", "eE", &["-I", "-M"]),
    interpreted("bash", "c", &["-o", "-O", "--rcfile", "--init-file"]),
    interpreted("sh", "c", &["-o"]),
    interpreted("dash", "c", &["-o"]),
    interpreted("zsh", "c", &["-o"]),
    interpreted("Rscript", "e", &[]),
    interpreted("julia", "eE", &["-t", "-p", "-J", "-L", "--project", "--threads"]),
    interpreted("node", "ep", &["-r", "--require"]),
    interpreted("ruby", "e", &["-I", "-r"]),
    interpreted("java", "", &["-cp", "-classpath", "--class-path", "-p", "--module-path"]),
    interpreted("torchrun", "", &["--nproc_per_node", "--nnodes", "--node_rank", "--master_addr", "--master_port"]),
];

impl Interpreter {
    /// Returns whether a word is an option that is followed by the script itself, such as `-c` or `-euc`.
    fn takes_text(&self, word: &str) -> bool {
        let letters = word.strip_prefix('-').filter(|letters| letters.bytes().all(|b| b.is_ascii_alphabetic()));
        letters.and_then(|letters| letters.chars().last()).is_some_and(|last| self.text.contains(last))
    }
}

pub(super) fn is_interpreter(program: &str) -> bool {
    interpreter(program).is_some()
}

fn interpreter(program: &str) -> Option<&'static Interpreter> {
    let bare = program.trim_end_matches(|c: char| c.is_ascii_digit() || c == '.' || c == '-');
    INTERPRETERS.iter().find(|interpreter| interpreter.name == bare)
}

/// A parsed command line.
pub(super) struct CommandLine<'a> {
    /// The words of the program itself; the first is its name.
    pub words: &'a [String],
    /// For an interpreter: the index of the word with the script, and the script's name in the signature.
    script: Option<(usize, String)>,
}

impl<'a> CommandLine<'a> {
    pub fn of(words: &'a [String]) -> Self {
        let words = unwrapped(words);
        let script = words.first().and_then(|program| script(file_name(program), words));
        Self { words, script }
    }

    /// Returns program, script and arguments without what changes. Consecutive arguments of one shape count as one, so
    /// that one more file in a glob does not make a new job.
    pub fn shape(&self) -> Vec<String> {
        let [program, arguments @ ..] = self.words else { return vec!["-".into()] };
        let program = file_name(program);
        let name = if is_interpreter(program) { shape::name(program) } else { shape::argument(program) };
        let mut out = vec![name];
        out.extend(self.script.iter().map(|(_, name)| name.clone()));
        let at = self.script.as_ref().map(|(at, _)| *at);
        let fixed = out.len();
        for (_, word) in (1..).zip(arguments).filter(|(number, _)| Some(*number) != at) {
            let word = shape::argument(word);
            if out.len() == fixed || out.last() != Some(&word) {
                out.push(word);
            }
        }
        out
    }
}

fn file_name(path: &str) -> &str {
    path.rsplit('/').next().unwrap_or(path)
}

fn unwrapped(mut words: &[String]) -> &[String] {
    for _ in 0..WRAPPERS_MAX {
        let Some(program) = words.first() else { break };
        let Some(wrapper) = WRAPPERS.iter().find(|w| w.name == file_name(program)) else { break };
        let inner = behind(wrapper, &words[1..]);
        if inner.is_empty() {
            break;
        }
        words = inner;
    }
    words
}

/// Returns the command that a wrapper runs: the words after its options, assignments (of `env`) and operands.
fn behind<'a>(wrapper: &Wrapper, mut words: &'a [String]) -> &'a [String] {
    let mut operands = wrapper.operands;
    while let [word, rest @ ..] = words {
        if word == "--" {
            return rest.get(operands..).unwrap_or_default();
        } else if word.starts_with('-') && word.len() > 1 {
            let skip = usize::from(wrapper.with_value.contains(&word.as_str()));
            words = rest.get(skip..).unwrap_or_default();
        } else if wrapper.name == "env" && word.contains('=') {
            words = rest;
        } else if operands > 0 {
            operands -= 1;
            words = rest;
        } else {
            break;
        }
    }
    words
}

/// Returns the script of an interpreter: its file name, `-m` with the module, or its text after `-c`.
fn script(program: &str, words: &[String]) -> Option<(usize, String)> {
    let interpreter = interpreter(program)?;
    let mut at = 1;
    while let Some(word) = words.get(at) {
        let next = words.get(at + 1);
        match (word.as_str(), next) {
            ("-m", Some(module)) if program.starts_with("py") => {
                return Some((at + 1, shape::name(&format!("-m{module}"))));
            }
            ("-jar", Some(jar)) => return Some((at + 1, shape::argument(file_name(jar)))),
            (option, Some(text)) if interpreter.takes_text(option) => {
                return Some((at + 1, shape::name(&format!("-c:{}", super::digits::masked(text)))));
            }
            (option, _) if interpreter.with_value.contains(&option) => at += 2,
            (option, _) if option.starts_with('-') && option.len() > 1 => at += 1,
            (script, _) => return Some((at, shape::argument(file_name(script)))),
        }
    }
    None
}
