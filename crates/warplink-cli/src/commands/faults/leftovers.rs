//! Resources of a process: its threads, descriptors and mappings of shared memory.

use crate::process::{entries, poll};
use std::collections::BTreeMap;
use std::fs;
use std::time::Duration;

/// Time limit for released resources to disappear.
const GRACE: Duration = Duration::from_secs(3);

/// Count of each kind of resource.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct HeldResources(BTreeMap<String, usize>);

impl HeldResources {
    pub(super) fn now() -> Self {
        let mut held = BTreeMap::new();
        let mut add = |what: String| *held.entry(what).or_default() += 1;
        for task in entries("/proc/self/task") {
            let name = fs::read_to_string(task.path().join("comm")).unwrap_or_default();
            add(format!("thread {}", name.trim()));
        }
        for entry in entries("/proc/self/fd") {
            // The descriptor of the listing itself is closed by now.
            if let Ok(target) = fs::read_link(entry.path()) {
                let target = target.to_string_lossy().into_owned();
                // The numbers of sockets and pipes differ.
                let kind = target.split(":[").next().unwrap_or_default();
                add(format!("descriptor of {kind}"));
            }
        }
        let maps = fs::read_to_string("/proc/self/maps").unwrap_or_default();
        for line in maps.lines().filter(|line| line.contains("/memfd:")) {
            let name = line.split_whitespace().last().unwrap_or_default();
            add(format!("mapping of {name}"));
        }
        Self(held)
    }

    /// Resources beyond those in `self` that remain after a grace period.
    pub(super) fn wait_for_rest(&self) -> Vec<String> {
        let mut more = Vec::new();
        // Threads may still be ending, and the kernel closes their descriptors later.
        poll(GRACE, || {
            more = self.less_than(&Self::now());
            more.is_empty().then_some(())
        });
        more
    }

    fn less_than(&self, now: &Self) -> Vec<String> {
        let more = now.0.iter().filter_map(|(what, &count)| {
            let before = self.0.get(what).copied().unwrap_or(0);
            (count > before).then(|| format!("{} × {what}", count - before))
        });
        more.collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::thread;
    use std::time::Instant;

    #[test]
    fn a_descriptor_and_a_thread_that_stay_are_found() {
        let before = HeldResources::now();
        let file = fs::File::open("/dev/zero");
        let (end, ended) = std::sync::mpsc::channel::<()>();
        let thread = thread::Builder::new()
            .name("stays".into())
            .spawn(move || ended.recv());
        let until = Instant::now() + GRACE;
        let mut more = String::new();
        // Other tests run in this process, and the thread takes its name only when it runs.
        while !(more.contains("descriptor of /dev/zero") && more.contains("thread stays")) {
            assert!(Instant::now() < until, "{more}");
            more = before.less_than(&HeldResources::now()).join(", ");
        }
        drop((file, end, thread));
    }
}
