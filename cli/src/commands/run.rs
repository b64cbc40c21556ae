//! `forebay run`

use std::ffi::OsString;

use forebay_overlay::control::Failure;
use forebay_overlay::control::child::Stage;
use forebay_overlay::jobs::{JobRequest, Members};

use crate::args;
use crate::output::Output;
use crate::registration::{self, Registration};

/// Runs the command, whatever becomes of the registration, and returns what to exit with.
pub fn run(args: args::Run, output: &Output) -> Result<u8, Failure> {
    let (program, arguments) = args.command.split_first().ok_or_else(|| Failure::usage("there is no command"))?;
    let stage = Stage::set().map_err(|e| Failure::io("cannot run commands", &e))?;
    let request = JobRequest {
        id: registration::name(args.job),
        command: line(&args.command),
        invocation: Some(registration::invocation(&args.command)),
        prefetch: !args.no_prefetch,
        members: Members::Caller,
    };
    let registered = registration::mounts(args.mount.as_deref())
        .and_then(|entries| Registration::new(entries, &request, output))
        .inspect_err(|failure| output.note(format!("forebay: the command runs unobserved: {failure}")))
        .ok();
    let ended = stage.run(std::process::Command::new(program).args(arguments));
    if let Some(registered) = registered {
        registered.end(output);
    }
    Ok(ended.unwrap_or_else(|(code, error)| {
        output.note(format!("forebay: {}: {error}", program.display()));
        code
    }))
}

/// A command as one line of text.
fn line(command: &[OsString]) -> String {
    registration::invocation(command).words.join(" ")
}
