//! Compares two policies, for operators.

use crate::{Policy, PolicyRule, SettingName};

impl Policy {
    /// Returns what differs between this policy and a newer one: a line for each setting of the mount, of the default
    /// and of a rule. Rules are recognised by their name, or else by their conditions.
    pub fn differences(&self, new: &Self) -> Vec<String> {
        let mut lines = Vec::new();
        for (name, before, after) in
            self.mount_settings().into_iter().zip(new.mount_settings()).map(|(a, b)| (a.0, a.1, b.1))
        {
            if before != after {
                lines.push(format!("{name}: {before} -> {after}"));
            }
        }
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

    fn mount_settings(&self) -> Vec<(&'static str, String)> {
        let mount = &self.mount;
        let time = |time: std::time::Duration| humantime::format_duration(time).to_string();
        let allowed: Vec<&str> = mount.allowed.iter().map(|name| name.key()).collect();
        vec![
            ("space.high-watermark", mount.space.high_watermark.to_string()),
            ("space.low-watermark", mount.space.low_watermark.to_string()),
            ("space.evictor", mount.evictor.clone()),
            ("shares.dirty", mount.shares.dirty.to_string()),
            ("shares.open-files", mount.shares.open_files.to_string()),
            ("shares.requests", mount.shares.requests.to_string()),
            ("pool.deadline", time(mount.pool_deadline)),
            ("pool.retry", time(mount.pool_retry)),
            ("write-back", mount.write_back.to_string()),
            ("quotas", mount.quotas.to_string()),
            ("cpu.wakeup-latency", mount.wakeup_latency.map_or_else(|| "any".into(), time)),
            ("prefetch.jobs", mount.prefetch.jobs.to_string()),
            ("prefetch.online", mount.prefetch.online.to_string()),
            ("observer.at-work", if mount.observes_always { "always" } else { "needed" }.into()),
            ("tiers", format!("{:?}", mount.tiers.iter().map(|tier| &tier.name).collect::<Vec<_>>())),
            ("allow.settings", format!("[{}]", allowed.join(", "))),
            ("storage-pools", format!("{:?}", mount.storage_pool_names)),
        ]
    }
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
