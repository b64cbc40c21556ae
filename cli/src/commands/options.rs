//! The options of `-o`, as mount(8) and fstab hand them over.

use forebay_overlay::control::{Failure, mounts};

use crate::args::Mount;
use crate::values;

pub const ALLOW_OTHER: &str = "allow_other";

/// What concerns mount(8), systemd or nobody.
const IGNORED: [&str; 19] = [
    "rw",
    "defaults",
    "auto",
    "noauto",
    "user",
    "nouser",
    "users",
    "owner",
    "group",
    "nofail",
    "_netdev",
    "mand",
    "nomand",
    "nonempty",
    "exec",
    "atime",
    "async",
    "default_permissions",
    "diratime",
];

/// Moves the options of `-o` into the arguments that they stand for, and returns those for the mount itself.
pub fn apply(args: &mut Mount) -> Result<Vec<String>, Failure> {
    let mut kernel = Vec::new();
    for option in std::mem::take(&mut args.options).iter().flat_map(|o| o.split(',')).filter(|o| !o.is_empty()) {
        let (key, value) = option.split_once('=').unwrap_or((option, ""));
        let bad = |e: &dyn std::fmt::Display| Failure::usage(format!("mount option `{option}`: {e}"));
        match key {
            "fast" => args.fast.extend(value.split(':').map(Into::into)),
            "limit" => args.limit = Some(value.parse().map_err(|e| bad(&e))?),
            "memory" => args.memory = Some(value.parse().map_err(|e| bad(&e))?),
            "config" => args.config = Some(value.into()),
            "policy" => args.policy = Some(value.into()),
            "throttle" => args.throttle = Some(values::pace(value).map_err(|e| bad(&e))?),
            // For tests: what is there when the kernel has not all that the observer can use.
            "mask_hooks" => args.mask_hooks.extend(value.split(':').map(str::to_owned)),
            "threads" => args.threads = Some(value.parse().map_err(|e| bad(&e))?),
            "ro" => args.read_only = true,
            "immutable" => args.immutable = true,
            ALLOW_OTHER => kernel.push(key.to_string()),
            _ if mounts::is_option(key) => kernel.push(key.to_string()),
            _ if IGNORED.contains(&key) || key.starts_with("x-") || key.starts_with("comment") => {}
            _ => {
                return Err(Failure::usage(format!("mount option `{option}` is not known")).remedy(
                    "fast=DIR[:DIR], limit=, policy=, config=, throttle=RATE:LATENCY, memory=, threads=, ro, immutable, allow_other",
                ));
            }
        }
    }
    Ok(kernel)
}

pub fn allow_other(kernel_options: &[String]) -> bool {
    kernel_options.iter().any(|o| o == ALLOW_OTHER)
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::args::{Cli, Command};

    fn mount(options: &str) -> Mount {
        match Cli::parse_from(["forebay", "mount", "/p", "/m", "-o", options]).command {
            Command::Mount(mount) => mount,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn options_stand_for_arguments() {
        let mut args =
            mount("rw,_netdev,x-systemd.automount,fast=/a:/b,limit=5G,throttle=1MB/s:2ms,ro,allow_other,noexec");
        assert_eq!(apply(&mut args).unwrap(), ["allow_other", "noexec"]);
        assert_eq!((args.fast.len(), args.read_only, args.immutable), (2, true, false));
        assert!(args.throttle.is_some() && args.limit.is_some());
    }

    #[test]
    fn an_unknown_option_is_refused_by_name() {
        let failure = apply(&mut mount("speed=11")).unwrap_err();
        assert!(failure.what.contains("speed=11"), "{failure}");
    }
}
