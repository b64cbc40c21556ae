//! `forebay run`

use forebay_api::jobs::{JobRequest, Members};
use forebay_daemon::Failure;
use forebay_daemon::child::Subreaper;

use crate::args;
use crate::output::Output;
use crate::registration::{self, Registration};

/// Runs the command, whether or not the registration succeeds, and returns the exit code.
pub fn run(args: args::RunArgs, output: &Output) -> Result<u8, Failure> {
    let (program, arguments) = args.command.split_first().ok_or_else(|| Failure::usage("there is no command"))?;
    let stage = Subreaper::set().map_err(|e| Failure::io("cannot run commands", &e))?;
    let (id, ends_leases) = registration::name(args.job);
    let invocation = registration::invocation(&args.command);
    let request = JobRequest {
        id,
        ends_leases,
        command: invocation.words.join(" "),
        invocation: Some(invocation),
        prefetch: !args.no_prefetch,
        members: Members::Caller,
    };
    let registered = registration::mounts(args.mount.as_deref())
        .and_then(|entries| Registration::new(entries, &request, output))
        .inspect_err(|failure| output.note(format!("forebay: the command runs unobserved: {failure}")))
        .ok();
    let mut command = std::process::Command::new(program);
    command.args(arguments);
    if registered.is_some() {
        command.env(registration::JOB_VARIABLE, &request.id);
    }
    let ended = stage.run(&mut command);
    if let Some(registered) = registered {
        registered.end(false, output);
    }
    Ok(ended.unwrap_or_else(|(code, error)| {
        output.note(format!("forebay: {}: {error}", program.display()));
        code
    }))
}
