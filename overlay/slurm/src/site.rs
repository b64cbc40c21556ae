//! Checks what `scontrol show config` tells of a site.

use std::collections::BTreeMap;

/// The least time that Slurm must give a prolog: its own 20 s, 3 s for a sign of life, 5 s for a report in the exchange
/// directory, and the start of a program.
const HOOK_SECS: u64 = 30;

/// Something in the configuration of a site that keeps jobs from being staged.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Finding {
    pub what: String,
    pub remedy: String,
}

/// The configuration of a site.
#[derive(Debug, Clone, Default)]
pub struct Site(BTreeMap<String, Vec<String>>);

impl Site {
    /// Reads the output of `scontrol show config`. Since Slurm 23.11, a setting with several values has a line for each:
    /// `Prolog[0]`.
    pub fn parse(shown: &str) -> Self {
        let mut settings: BTreeMap<String, Vec<String>> = BTreeMap::new();
        for (name, value) in shown.lines().filter_map(|line| line.split_once('=')) {
            let name = name.trim().split('[').next().unwrap_or_default().to_owned();
            let value = value.trim();
            if value != "(null)" && !value.is_empty() {
                settings.entry(name).or_default().push(value.to_owned());
            }
        }
        Self(settings)
    }

    /// Returns the values of a setting; none if it is not set.
    pub fn values(&self, name: &str) -> &[String] {
        self.0.get(name).map_or(&[], Vec::as_slice)
    }

    /// Returns whether jobs can use `#DW` directives.
    pub fn has_directives(&self) -> bool {
        self.values("BurstBufferType").join(",").contains("burst_buffer/lua")
    }

    /// Returns the path of a file in the directory of `slurm.conf`.
    fn beside_configuration(&self, file: &str) -> String {
        let conf = self.values("SLURM_CONF").first().map_or("/etc/slurm/slurm.conf", String::as_str);
        format!("{}/{file}", conf.rsplit_once('/').map_or("/etc/slurm", |(dir, _)| dir))
    }

    fn seconds(&self, name: &str) -> Option<u64> {
        self.values(name).first()?.split_whitespace().next()?.parse().ok()
    }

    /// Returns what is wrong. `text` reads the scripts that a setting names, which may be a glob; `None`: none can be
    /// read.
    pub fn findings(&self, text: impl Fn(&str) -> Option<String>) -> Vec<Finding> {
        let mut findings = Vec::new();
        let mut finding = |what: String, remedy: &str| findings.push(Finding { what, remedy: remedy.into() });
        for (setting, call, costs) in [
            ("Prolog", "forebay slurm prolog", "nothing is staged"),
            ("Epilog", "forebay slurm epilog", "nothing is learned, and leases stay"),
            ("TaskProlog", "forebay slurm task-prolog", "tasks do not get FOREBAY_MOUNT"),
        ] {
            let scripts = self.values(setting);
            if scripts.is_empty() {
                finding(format!("{setting}= is not set: {costs}"), "forebay slurm install");
            } else if !scripts.iter().filter_map(|script| text(script)).any(|text| text.contains(call)) {
                let what = format!("{setting}={} does not run `{call}`: {costs}", scripts.join(","));
                finding(what, &format!("add `{call}` to it"));
            }
        }
        let flags = self.values("PrologFlags").join(",");
        if !flags.split(',').any(|flag| ["Alloc", "Contain", "X11"].contains(&flag.trim())) {
            finding(
                "PrologFlags= lacks Alloc: a node stages only when its first step starts".into(),
                "PrologFlags=Alloc",
            );
        }
        // A site without directives has none of this.
        for (file, call) in [("burst_buffer.lua", "\"slurm\", \"bb\""), ("burst_buffer.conf", "Directive=DW")] {
            if self.has_directives() && !text(&self.beside_configuration(file)).is_some_and(|text| text.contains(call))
            {
                finding(
                    format!(
                        "BurstBufferType=burst_buffer/lua is set, and {file} beside slurm.conf is not that of Forebay"
                    ),
                    &format!("copy {file} there from the directory with the scripts"),
                );
            }
        }
        // 65534 stands for no limit.
        for setting in ["PrologEpilogTimeout", "BatchStartTimeout"] {
            if let Some(seconds) = self.seconds(setting).filter(|seconds| (1..HOOK_SECS).contains(seconds)) {
                finding(
                    format!("{setting}={seconds} is shorter than a prolog that waits for a pool"),
                    &format!("{setting}={HOOK_SECS}"),
                );
            }
        }
        findings
    }
}

/// The lines of `slurm.conf` for `#DW` directives, which a site may leave out.
pub const DIRECTIVE_LINES: &str = "BurstBufferType=burst_buffer/lua\nRequeueExitHold=79\n";

/// Returns the lines of `slurm.conf` for scripts in a directory.
pub fn lines(scripts: &str) -> String {
    format!(
        "Prolog={scripts}/prolog\nEpilog={scripts}/epilog\nTaskProlog={scripts}/task-prolog\nPrologFlags=Alloc\n\
         PrologEpilogTimeout={HOOK_SECS}\nBatchStartTimeout={HOOK_SECS}\n"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn whats(shown: &str, text: impl Fn(&str) -> Option<String>) -> Vec<String> {
        Site::parse(shown).findings(text).into_iter().map(|finding| finding.what).collect()
    }

    #[test]
    fn the_lines_that_are_printed_are_found_to_be_good() {
        let shown = lines("/s").replace('=', " = ");
        let call = |script: &str| script.strip_prefix("/s/").map(|name| format!("exec forebay slurm {name}"));
        assert_eq!(whats(&shown, call), Vec::<String>::new());
    }

    #[test]
    fn what_is_missing_is_named() {
        let shown = "Prolog                  = /site/prolog\nEpilog = (null)\nTaskProlog =\n\
                     PrologFlags = (null)\nPrologEpilogTimeout = 65534\nBatchStartTimeout       = 10 sec\n";
        let found = whats(shown, |_| Some("true".into()));
        assert_eq!(found.len(), 5, "{found:?}");
        for (found, word) in
            found.iter().zip(["/site/prolog", "Epilog= is not", "TaskProlog= is not", "Alloc", "StartTimeout=10"])
        {
            assert!(found.contains(word), "{found}");
        }
    }

    #[test]
    fn the_plugin_is_checked_where_it_is_used() {
        let shown = format!("{}{DIRECTIVE_LINES}SLURM_CONF=/c/slurm.conf\n", lines("/s")).replace('=', " = ");
        let call = |script: &str| match script {
            "/c/burst_buffer.lua" => Some("{ \"slurm\", \"bb\", call }".to_owned()),
            "/c/burst_buffer.conf" => Some("Directive=DW".to_owned()),
            _ => script.strip_prefix("/s/").map(|name| format!("exec forebay slurm {name}")),
        };
        assert_eq!(whats(&shown, call), Vec::<String>::new());
        assert_eq!(whats(&shown, |script| call(script).filter(|_| script.starts_with("/s/"))).len(), 2);
        assert!(!Site::parse(&lines("/s")).has_directives());
    }

    #[test]
    fn one_of_several_prologs_is_enough() {
        let shown = "Prolog[0] = /a\nProlog[1] = /b/*\nPrologFlags = Alloc,Contain\n";
        let text = |script: &str| (script == "/b/*").then(|| "forebay slurm prolog".to_owned());
        assert!(!whats(shown, text).iter().any(|what| what.starts_with("Prolog")));
    }
}
