//! CPU affinity of the proxy's thread.

use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

/// Pins the calling thread to those of `cpus` that the process may use, if any: its affinity may be restricted
/// (`taskset`).
pub(super) fn pin(cpus: &[usize]) {
    let pinned = sched_getaffinity(None).and_then(|allowed| {
        let mut set = CpuSet::new();
        let known = cpus.iter().filter(|cpu| **cpu < CpuSet::MAX_CPU);
        let usable = known.filter(|cpu| allowed.is_set(**cpu));
        usable.for_each(|cpu| set.set(*cpu));
        match set.count() {
            0 => Ok(()),
            _ => sched_setaffinity(None, &set),
        }
    });
    if let Err(error) = pinned {
        tracing::debug!(%error, "the proxy runs on any CPU");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The allowed CPUs of a thread pinned to `first` and then to `second`.
    fn pinned(first: &[usize], second: &[usize]) -> Vec<usize> {
        let (first, second) = (first.to_vec(), second.to_vec());
        let thread = std::thread::spawn(move || {
            pin(&first);
            pin(&second);
            let allowed = sched_getaffinity(None).unwrap();
            (0..CpuSet::MAX_CPU)
                .filter(|cpu| allowed.is_set(*cpu))
                .collect()
        });
        thread.join().unwrap()
    }

    #[test]
    fn a_proxy_runs_near_its_device_and_where_its_process_may() {
        let all = pinned(&[], &[]);
        let (first, last) = (all[0], all[all.len() - 1]);
        assert_eq!(pinned(&[], &[first]), [first]);
        // CPUs outside the process's affinity are ignored; if none is left, the thread's affinity does not change.
        assert_eq!(pinned(&[first], &all), [first]);
        let elsewhere = all.iter().copied().filter(|cpu| *cpu != last);
        assert_eq!(pinned(&[last], &elsewhere.collect::<Vec<_>>()), [last]);
        assert_eq!(pinned(&[], &[CpuSet::MAX_CPU + 1]), all);
    }
}
