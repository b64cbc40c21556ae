//! Compares two policies, for operators.

use std::fmt;

use crate::{Policy, PolicyRule, SettingName};

/// When a policy that is applied to a running daemon changes a setting.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TakesEffect {
    AtOnce,
    /// The daemon reads the setting only when it starts.
    AtNextMount,
}

/// One difference between two policies.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PolicyDifference {
    pub takes_effect: TakesEffect,
    line: String,
}

impl fmt::Display for PolicyDifference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.line)
    }
}

impl Policy {
    /// Returns what differs between this policy and a newer one: each setting of the mount, of the default and of a
    /// rule. Rules are recognised by their name, or else by their conditions.
    pub fn differences(&self, new: &Self) -> Vec<PolicyDifference> {
        let mut found = Vec::new();
        for ((name, takes_effect, before), (_, _, after)) in self.mount_settings().into_iter().zip(new.mount_settings())
        {
            if before != after {
                found.push(PolicyDifference { takes_effect, line: format!("{name}: {before} -> {after}") });
            }
        }
        let of_paths = self.path_differences(new).into_iter();
        found.extend(of_paths.map(|line| PolicyDifference { takes_effect: TakesEffect::AtOnce, line }));
        found
    }

    fn path_differences(&self, new: &Self) -> Vec<String> {
        let mut lines = Vec::new();
        for name in SettingName::ALL {
            let (before, after) = (self.default.value(name), new.default.value(name));
            if before != after {
                lines.push(format!("default {name}: {before} -> {after}"));
            }
        }
        let find = |policy: &Self, title: &str| policy.rules.iter().position(|rule| rule.title == title);
        for rule in &self.rules {
            match find(new, &rule.title) {
                None => lines.push(format!("removed: rule {} ({})", rule.title, rule.shown())),
                Some(at) if new.rules[at].shown() != rule.shown() => {
                    lines.push(format!("rule {}: {} -> {}", rule.title, rule.shown(), new.rules[at].shown()));
                }
                Some(_) => {}
            }
        }
        for rule in new.rules.iter().filter(|rule| find(self, &rule.title).is_none()) {
            lines.push(format!("added: rule {} ({})", rule.title, rule.shown()));
        }
        let order = |from: &Self, other: &Self| -> Vec<String> {
            let titles = from.rules.iter().map(|rule| &rule.title);
            titles.filter(|title| find(other, title).is_some()).cloned().collect()
        };
        if order(self, new) != order(new, self) {
            lines.push("the rules are in another order: where two match, the later one wins".into());
        }
        lines
    }

    fn mount_settings(&self) -> Vec<(&'static str, TakesEffect, String)> {
        use TakesEffect::{AtNextMount, AtOnce};

        let mount = &self.mount;
        let time = |time: std::time::Duration| humantime::format_duration(time).to_string();
        let allowed: Vec<&str> = mount.allowed.iter().map(|name| name.key()).collect();
        vec![
            ("space.high-watermark", AtOnce, mount.space.high_watermark.to_string()),
            ("space.low-watermark", AtOnce, mount.space.low_watermark.to_string()),
            ("space.evictor", AtNextMount, mount.evictor.clone()),
            ("shares.dirty", AtNextMount, mount.shares.dirty.to_string()),
            ("shares.open-files", AtNextMount, mount.shares.open_files.to_string()),
            ("shares.requests", AtNextMount, mount.shares.requests.to_string()),
            ("pool.deadline", AtNextMount, time(mount.pool_deadline)),
            ("pool.retry", AtNextMount, time(mount.pool_retry)),
            ("write-back", AtOnce, mount.write_back.to_string()),
            ("quotas", AtOnce, mount.quotas.to_string()),
            ("cpu.wakeup-latency", AtNextMount, mount.wakeup_latency.map_or_else(|| "any".into(), time)),
            ("prefetch.jobs", AtOnce, mount.prefetch.jobs.to_string()),
            ("prefetch.online", AtNextMount, mount.prefetch.online.to_string()),
            ("observer.at-work", AtOnce, if mount.observes_always { "always" } else { "needed" }.into()),
            ("tiers", AtNextMount, shown_or_none(mount.tiers.iter().map(ToString::to_string))),
            ("allow.settings", AtOnce, format!("[{}]", allowed.join(", "))),
            ("storage-pools", AtOnce, format!("{:?}", mount.storage_pool_names)),
        ]
    }
}

fn shown_or_none(list: impl Iterator<Item = String>) -> String {
    let list: Vec<String> = list.collect();
    if list.is_empty() { "none".into() } else { list.join(", ") }
}

impl PolicyRule {
    /// Returns the settings, as a policy file spells them.
    fn shown(&self) -> String {
        let mut policy = crate::PathPolicy::default();
        self.settings.iter().for_each(|(setting, _)| setting.apply(&mut policy));
        let settings = self.settings.iter().map(|(setting, _)| setting.name());
        settings.map(|name| format!("{name} = {}", policy.value(name))).collect::<Vec<_>>().join(", ")
    }
}
