//! `forebay slurm bb`: what `burst_buffer.lua` runs in the controller.
//!
//! What a call prints is for Slurm: `check`, `data-in` and `pre-run` print the reason why a job cannot run, on standard
//! output.

use std::fmt::Write;
use std::io::{ErrorKind, Read};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use forebay_daemon::{Failure, FailureKind};
use forebay_slurm::directives::{self, SCRIPT_BYTES_MAX, StagingRequest};
use forebay_slurm::exchange::{Exchange, ExchangedRequest, MissingResults, NodeProgress, NodeReport};
use forebay_slurm::outcome::{JobOutcome, array_index_of, array_job_of, outcome_of};
use forebay_system::mounts;

use crate::args::{BurstBufferCommand, ExchangedJobArgs};
use crate::exit::Exit;
use crate::output::Output;
use crate::values::shown;

/// How often the reports of nodes are looked for.
const PAUSE: Duration = Duration::from_millis(200);
/// How long slurmctld may take to show a job, in seconds.
const SHOW_SECS: &str = "5";
/// The name of the pool, which `pool=` of a directive gives.
const POOL: &str = "forebay";

pub fn run(command: &BurstBufferCommand, output: &Output) -> Result<Exit, Failure> {
    match command {
        BurstBufferCommand::Check { script } => Ok(match request(script)? {
            Ok(_) => Exit::Done,
            Err(reason) => refused(&reason, output),
        }),
        BurstBufferCommand::DataIn { job, script } => data_in(job, script, output),
        BurstBufferCommand::PreRun { job } => pre_run(job, output),
        BurstBufferCommand::DataOut { job, wait } => data_out(job, *wait, output),
        BurstBufferCommand::Teardown { job, hurry, wait } => {
            if let Some(exchange) = Exchange::open(&job.exchange.exchange)? {
                if *hurry {
                    give_up(&exchange, &job.job, *wait)?;
                }
                exchange.remove(&job.job)?;
            }
            Ok(Exit::Done)
        }
        BurstBufferCommand::Pools { capacity } => {
            let pool = serde_json::json!({ "id": POOL, "quantity": capacity.as_u64(), "granularity": 1 });
            output.line(serde_json::json!({ "pools": [pool] }).to_string());
            Ok(Exit::Done)
        }
        BurstBufferCommand::Status { exchange, forget, no_reasons } => {
            status(&exchange.exchange, forget.as_deref(), *no_reasons, output)
        }
    }
}

fn refused(reason: &str, output: &Output) -> Exit {
    output.line(format!("forebay: {reason}"));
    Exit::Incomplete
}

/// Returns what a script asks for, or the reason why that is not possible.
fn request(script: &Path) -> Result<Result<Option<StagingRequest>, String>, Failure> {
    let mut text = Vec::new();
    let file = std::fs::File::open(script).map_err(|e| Failure::given(script.display(), &e))?;
    file.take(SCRIPT_BYTES_MAX).read_to_end(&mut text).map_err(|e| Failure::given(script.display(), &e))?;
    Ok(directives::parse(&String::from_utf8_lossy(&text)).map_err(|error| error.to_string()))
}

fn data_in(job: &ExchangedJobArgs, script: &Path, output: &Output) -> Result<Exit, Failure> {
    let record = shown_job(&job.job).unwrap_or_default();
    let script = array_script(script, &record).unwrap_or_else(|| script.to_owned());
    let staging = match request(&script)? {
        Ok(staging) => staging.unwrap_or_default(),
        Err(reason) => return Ok(refused(&reason, output)),
    };
    if let Some(path) = staging.stage_in.iter().chain(staging.copy_in.iter().map(|copy| &copy.path)).find(is_missing) {
        return Ok(refused(&format!("{} does not exist", shown(path)), output));
    }
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    // A prolog is not told.
    let array_index = array_index_of(&record);
    let attempt = format!("{:x}-{:x}", now.as_micros(), std::process::id());
    Exchange::create(&job.exchange.exchange)?
        .put_request(&job.job, &ExchangedRequest { attempt, staging, array_index })?;
    Ok(Exit::Done)
}

/// Returns the script of an array if the one that Slurm names is missing: Slurm 24.11 names one of the task, but keeps
/// one for all tasks.
fn array_script(script: &Path, shown: &str) -> Option<PathBuf> {
    let array = array_job_of(shown).filter(|_| !script.exists())?;
    let state = script.ancestors().nth(3)?;
    Some(state.join(format!("hash.{}/job.{array}/script", array % 10)))
}

/// Returns what Slurm shows of a job. `None`: it does not answer.
fn shown_job(job: &str) -> Option<String> {
    let mut command = std::process::Command::new("timeout");
    let answer = command.args([SHOW_SECS, "scontrol", "--oneliner", "show", "job", job]).output().ok()?;
    answer.status.success().then(|| String::from_utf8_lossy(&answer.stdout).into_owned())
}

/// Tells the nodes of a job that its results may be given up, and waits until they have ended the job.
///
/// Slurm also calls the teardown of a pending job that is cancelled a hurried one: such a job has nothing on any node.
fn give_up(exchange: &Exchange, job: &str, wait: Duration) -> Result<(), Failure> {
    let Some(request) = exchange.request(job)? else { return Ok(()) };
    let is_out = |report: &NodeReport| !report.progress.is_over() && report.progress != NodeProgress::StageInFailed;
    if !exchange.reports(job, &request.attempt)?.iter().any(is_out) {
        return keep_missing(exchange, job, &exchange.reports(job, &request.attempt)?);
    }
    exchange.put_outcome(job, &request.attempt, JobOutcome::GivenUp)?;
    let is_over = |report: &NodeReport| report.progress.is_over();
    let (reports, _) = wait_for_reports(exchange, job, &request.attempt, wait, is_over, |_| Ok(()))?;
    keep_missing(exchange, job, &reports)
}

/// Keeps the reasons why results are not in the pool.
fn keep_missing(exchange: &Exchange, job: &str, reports: &[NodeReport]) -> Result<(), Failure> {
    let reasons = reasons(reports, NodeProgress::ResultsMissing);
    match reasons.is_empty() {
        true => Ok(()),
        false => exchange.keep(&MissingResults { job: job.to_owned(), reasons }),
    }
}

/// Tells the nodes how a job ended, as soon as they all have seen its last process end.
fn tell_outcome(exchange: &Exchange, job: &str, attempt: &str, reports: &[NodeReport]) -> Result<(), Failure> {
    let nodes = reports.iter().map(|report| report.nodes).max().unwrap_or(1);
    let has_ended = |report: &&NodeReport| report.progress == NodeProgress::Ended || report.progress.is_over();
    let waits = reports.iter().any(|report| report.progress == NodeProgress::Ended);
    if !waits || reports.iter().filter(has_ended).count() < nodes || exchange.outcome(job, attempt)?.is_some() {
        return Ok(());
    }
    match shown_job(job).as_deref().and_then(outcome_of) {
        Some(outcome) => exchange.put_outcome(job, attempt, outcome),
        None => Ok(()),
    }
}

/// Returns whether a path is surely missing: it lies in a mount of this machine, and has no wildcard.
fn is_missing(path: &&String) -> bool {
    let ours = mounts::list()
        .unwrap_or_default()
        .into_iter()
        .any(|mount| Path::new(path).starts_with(&mount.mountpoint) && mounts::is_ours(&mount.mountpoint));
    let is_plain = !path.contains(['*', '?', '[']);
    let found = || std::fs::symlink_metadata(path);
    ours && is_plain && found().is_err_and(|error| error.kind() == ErrorKind::NotFound)
}

/// Returns what all nodes of a job have reported, as soon as it is enough, or when the time is up.
fn wait_for_reports(
    exchange: &Exchange,
    job: &str,
    attempt: &str,
    wait: Duration,
    is_enough: impl Fn(&NodeReport) -> bool,
    meanwhile: impl Fn(&[NodeReport]) -> Result<(), Failure>,
) -> Result<(Vec<NodeReport>, bool), Failure> {
    let until = Instant::now() + wait;
    loop {
        let reports = exchange.reports(job, attempt)?;
        meanwhile(&reports)?;
        let nodes = reports.iter().map(|report| report.nodes).max().unwrap_or(1);
        let is_whole = reports.iter().filter(|report| is_enough(report)).count() >= nodes;
        let has_failed = reports.iter().any(|report| report.progress == NodeProgress::StageInFailed);
        if is_whole || has_failed || Instant::now() >= until {
            return Ok((reports, is_whole));
        }
        std::thread::sleep(PAUSE);
    }
}

fn reasons(reports: &[NodeReport], progress: NodeProgress) -> Vec<String> {
    let all = reports.iter().filter(|report| report.progress == progress);
    all.flat_map(|report| report.reasons.iter().map(move |why| format!("{}: {why}", report.node))).collect()
}

/// Slurm runs the prologs of a job when this has ended, so it cannot wait for them.
fn pre_run(job: &ExchangedJobArgs, output: &Output) -> Result<Exit, Failure> {
    let exchange = Exchange::open(&job.exchange.exchange)?;
    Ok(match exchange.map(|exchange| exchange.request(&job.job)).transpose()?.flatten() {
        Some(_) => Exit::Done,
        None => refused("the exchange directory has no request of the job", output),
    })
}

/// Returns `Incomplete` if the job did not run, because its stage-in failed, if no node has seen what it asks for, or if
/// results are not in the pool. These are kept.
fn data_out(job: &ExchangedJobArgs, wait: Duration, output: &Output) -> Result<Exit, Failure> {
    let Some(exchange) = Exchange::open(&job.exchange.exchange)? else { return Ok(Exit::Done) };
    let Some(request) = exchange.request(&job.job)? else { return Ok(Exit::Done) };
    let asks = request.staging.needs_staging() || !request.staging.stage_out.is_empty();
    if !asks && exchange.reports(&job.job, &request.attempt)?.is_empty() {
        // slurmd runs no prolog for a job that returns to its node at once.
        return Ok(Exit::Done);
    }
    let is_over = |report: &NodeReport| report.progress.is_over();
    let tell = |reports: &[NodeReport]| tell_outcome(&exchange, &job.job, &request.attempt, reports);
    let (reports, is_whole) = wait_for_reports(&exchange, &job.job, &request.attempt, wait, is_over, tell)?;
    let failed = reports.iter().any(|report| report.progress == NodeProgress::StageInFailed);
    if failed {
        let reasons = reasons(&reports, NodeProgress::StageInFailed);
        return Ok(refused(
            &format!("stage-in failed, and the job did not run: {}", shown(&reasons.join("; "))),
            output,
        ));
    }
    if reports.is_empty() {
        // It has no scratch directory on any node, so it left nothing that could be looked after.
        let exchange = job.exchange.exchange.display();
        let what = format!("no node has reported: the job has run nowhere, or its nodes do not see {exchange}");
        return Ok(refused(&what, output));
    }
    let mut reasons = reasons(&reports, NodeProgress::ResultsMissing);
    if !is_whole {
        let over = reports.iter().filter(|report| report.progress.is_over()).count();
        reasons.push(format!("{over} epilogs have reported their write-back within {} s", wait.as_secs()));
    }
    if reasons.is_empty() {
        return Ok(Exit::Done);
    }
    let exit = refused(&format!("not in the pool: {}", shown(&reasons.join("; "))), output);
    exchange.keep(&MissingResults { job: job.job.clone(), reasons })?;
    Ok(exit)
}

fn status(dir: &Path, forget: Option<&str>, no_reasons: bool, output: &Output) -> Result<Exit, Failure> {
    let Some(exchange) = Exchange::open(dir)? else {
        return Err(Failure::new(FailureKind::Missing, format!("{} does not exist", dir.display()))
            .remedy("no job with directives has run; --exchange names another directory"));
    };
    if let Some(job) = forget {
        exchange.forget(job)?;
        return Ok(Exit::Done);
    }
    let mut text = String::new();
    for job in exchange.jobs()? {
        let Some(request) = exchange.request(&job)? else { continue };
        let reports = exchange.reports(&job, &request.attempt)?;
        if output.json {
            output.json(&serde_json::json!({ "job": job, "request": request.staging, "nodes": reports }));
            continue;
        }
        let _ = writeln!(text, "job {job}: {}", if reports.is_empty() { "no node has reported" } else { "" }.trim());
        for report in reports {
            let progress = serde_json::to_value(report.progress).unwrap_or_default();
            let why = if no_reasons { String::new() } else { report.reasons.join("; ") };
            let _ = writeln!(text, "  {}: {} {}", report.node, progress.as_str().unwrap_or_default(), shown(&why));
        }
    }
    for missing in exchange.missing()? {
        match output.json {
            true => output.json(&missing),
            false if no_reasons => _ = writeln!(text, "job {}: results are not in the pool", missing.job),
            false => _ = writeln!(text, "job {}: not in the pool: {}", missing.job, shown(&missing.reasons.join("; "))),
        }
    }
    if !output.json {
        output.line(if text.is_empty() { "no job has directives" } else { text.trim_end() });
    }
    Ok(Exit::Done)
}
