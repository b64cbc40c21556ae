//! The options of `-o`, as passed by mount(8) and fstab.

use forebay_daemon::metrics::parse_address;
use forebay_daemon::{Failure, mounts};
use rustix::mount::MountFlags;

use crate::args::MountArgs;
use crate::values;

pub const ALLOW_OTHER: &str = "allow_other";

/// Options for mount(8) or systemd, and options without a meaning for this mount.
const IGNORED: [&str; 14] = [
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
    "default_permissions",
];

/// Options that mount(8) lists for a FUSE mount when it is remounted. None of them can change.
const SUPERBLOCK: [&str; 4] = ["user_id", "group_id", "max_read", "blksize"];

/// Options that cannot be supported, and why.
const REFUSED: [(&str, &str, &str); 1] = [(
    "strictatime",
    "reads never change the access time of a FUSE mount, so it cannot be kept strictly",
    "leave it out; programs see what they see with `noatime`",
)];

/// Options for the mount itself.
#[derive(Debug, Default)]
pub struct Given {
    /// In the given order.
    pub kernel: Vec<String>,
    pub remount: bool,
    /// mount(8) listed the mount's present options in addition to the changes.
    pub listed: bool,
}

/// Moves the options of `-o` into the arguments that they stand for, and returns those for the mount itself.
pub fn apply(args: &mut MountArgs) -> Result<Given, Failure> {
    let mut given = Given::default();
    for option in std::mem::take(&mut args.options).iter().flat_map(|o| o.split(',')).filter(|o| !o.is_empty()) {
        let (key, value) = option.split_once('=').unwrap_or((option, ""));
        let bad = |e: &dyn std::fmt::Display| Failure::usage(format!("mount option `{option}`: {e}"));
        match key {
            "fast" => args.fast.extend(value.split(':').map(Into::into)),
            "limit" => args.limit = Some(value.parse().map_err(|e| bad(&e))?),
            "memory" => args.memory = Some(value.parse().map_err(|e| bad(&e))?),
            "metrics" => args.metrics = Some(parse_address(value).map_err(|e| bad(&e))?),
            "peers" => args.peers = Some(value.into()),
            "config" => args.config = Some(value.into()),
            "policy" => args.policy = Some(value.into()),
            "throttle" => args.throttle = Some(values::pace(value).map_err(|e| bad(&e))?),
            // For tests: simulates a kernel without some of the observer's hooks.
            "mask_hooks" => args.mask_hooks.extend(value.split(':').map(str::to_owned)),
            "threads" => args.threads = Some(value.parse().map_err(|e| bad(&e))?),
            "remount" => given.remount = true,
            "immutable" => args.immutable = true,
            ALLOW_OTHER => given.kernel.push(key.to_string()),
            _ if mounts::is_option(key) => given.kernel.push(key.to_string()),
            _ if IGNORED.contains(&key) || key.starts_with("x-") || key.starts_with("comment") => {}
            _ if SUPERBLOCK.contains(&key) => given.listed = true,
            _ => {
                if let Some((_, why, remedy)) = REFUSED.iter().find(|(name, ..)| *name == key) {
                    return Err(Failure::usage(format!("mount option `{option}`: {why}")).remedy(*remedy));
                }
                return Err(Failure::usage(format!("mount option `{option}` is not known")).remedy(
                    "fast=DIR[:DIR], limit=, policy=, config=, throttle=RATE:LATENCY, memory=, threads=, metrics=, peers=, ro, immutable, allow_other",
                ));
            }
        }
    }
    if given.listed && !given.remount {
        return Err(Failure::usage("the options user_id, group_id, max_read and blksize are for a remount only")
            .remedy("leave them out"));
    }
    if !given.remount {
        // The daemon handles this option: it refuses changes itself.
        let flags = mounts::changed(MountFlags::empty(), &given.kernel);
        args.read_only |= flags.contains(MountFlags::RDONLY);
        given.kernel.retain(|option| option != "ro" && option != "rw");
    }
    Ok(given)
}

pub fn allow_other(kernel_options: &[String]) -> bool {
    kernel_options.iter().any(|o| o == ALLOW_OTHER)
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::args::{Cli, Command};

    fn mount(options: &str) -> MountArgs {
        match Cli::parse_from(["forebay", "mount", "/p", "/m", "-o", options]).command {
            Command::Mount(mount) => mount,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn options_stand_for_arguments() {
        let mut args = mount(
            "rw,_netdev,x-systemd.automount,fast=/a:/b,limit=5G,throttle=1MB/s:2ms,metrics=9464,ro,allow_other,noexec",
        );
        assert_eq!(apply(&mut args).unwrap().kernel, ["allow_other", "noexec"]);
        assert_eq!((args.fast.len(), args.read_only, args.immutable), (2, true, false));
        assert!(args.throttle.is_some() && args.limit.is_some());
        assert_eq!(args.metrics, Some("127.0.0.1:9464".parse().unwrap()));
    }

    #[test]
    fn the_later_of_ro_and_rw_counts() {
        for (options, read_only) in [("ro,rw", false), ("rw,ro", true), ("rw", false)] {
            let mut args = mount(options);
            assert!(apply(&mut args).unwrap().kernel.is_empty());
            assert_eq!(args.read_only, read_only, "{options}");
        }
    }

    #[test]
    fn what_cannot_be_had_is_refused_with_the_reason() {
        let failure = apply(&mut mount("rw,strictatime")).unwrap_err();
        assert!(failure.what.contains("`strictatime`: reads never") && failure.remedy.is_some(), "{failure}");
    }

    #[test]
    fn a_remount_is_given_all_that_concerns_the_mount() {
        let given = apply(&mut mount("ro,nosuid,remount,user_id=0,max_read=1048576,allow_other")).unwrap();
        assert!(given.remount && given.listed);
        assert_eq!(given.kernel, ["ro", "nosuid", "allow_other"]);
        assert!(apply(&mut mount("ro,user_id=0")).is_err());
    }

    #[test]
    fn an_unknown_option_is_refused_by_name() {
        let failure = apply(&mut mount("speed=11")).unwrap_err();
        assert!(failure.what.contains("speed=11"), "{failure}");
    }
}
