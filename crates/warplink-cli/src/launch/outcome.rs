//! How the ranks of a launch exited, and the resulting exit code.

use crate::report::JsonError;
use signal_hook::consts::{SIGBUS, SIGFPE, SIGILL, SIGKILL, SIGSEGV};
use std::process::ExitCode;
use std::time::Duration;

/// Signals that are never caused by the failure of another rank. SIGABRT is not among them: programs abort themselves when
/// a peer is lost.
const FIRST_CAUSES: [i32; 5] = [SIGKILL, SIGSEGV, SIGBUS, SIGILL, SIGFPE];

/// How the ranks exited.
#[derive(Debug, Default)]
pub(crate) struct LaunchOutcome {
    /// By rank.
    pub(crate) exits: Vec<RankExit>,
    /// The rank whose failure is the root cause.
    pub(crate) first_failure: Option<usize>,
    /// The first signal that the launcher forwarded.
    pub(super) signalled: Option<i32>,
    /// Captured standard output of each rank.
    pub(crate) kept: Vec<Vec<u8>>,
    /// Exit code if no rank failed: nonzero if the launcher itself gave up.
    pub(super) otherwise: u8,
    /// Why no rank was started.
    pub(crate) error: Option<String>,
}

impl LaunchOutcome {
    /// The outcome if nothing was started.
    pub(super) fn not_started(code: u8, error: String) -> Self {
        Self {
            otherwise: code,
            error: Some(error),
            ..Self::default()
        }
    }

    /// First captured line of a rank.
    pub(crate) fn first_line(&self, rank: usize) -> Option<&[u8]> {
        let mut lines = self.kept.get(rank)?.split_inclusive(|byte| *byte == b'\n');
        // An unfinished line is what a rank that was killed had written so far, not a result.
        lines.next().filter(|line| line.ends_with(b"\n"))
    }

    /// Root cause among the ranks that `failed`, in order of exit: a rank killed from outside or by a crash
    /// is not a consequence of another rank.
    pub(super) fn cause(&self, failed: &[usize]) -> Option<usize> {
        let find = |is: fn(&RankExit) -> bool| {
            let mut failed = failed.iter().copied();
            failed.find(|rank| self.exits.get(*rank).is_some_and(is))
        };
        find(|exit| {
            exit.signal
                .is_some_and(|signal| FIRST_CAUSES.contains(&signal))
        })
        .or_else(|| find(|exit| !exit.follows))
        // All say that they follow another: the first to exit is the closest to the cause that is known.
        .or_else(|| failed.first().copied())
    }

    /// Exit code of the first rank that failed; 128 plus the signal number if killed.
    pub(crate) fn code(&self) -> u8 {
        match self.first_failure.and_then(|rank| self.exits.get(rank)) {
            Some(exit) => exit.shell_code(),
            None => self.otherwise,
        }
    }

    pub(crate) fn exit_code(&self) -> ExitCode {
        ExitCode::from(self.code())
    }

    /// The error for `--json` if no rank printed a result.
    pub(crate) fn failure(&self) -> JsonError {
        if let Some(error) = &self.error {
            return JsonError::invalid(error);
        }
        if let Some(signal) = self.signalled {
            return JsonError::new("interrupted", &format!("interrupted by {}", name(signal)));
        }
        let failed = |rank: usize| Some((rank, self.exits.get(rank)?));
        match self.first_failure.and_then(failed) {
            Some((rank, exit)) => {
                let text = format!("rank {rank} {}", exit.describe());
                JsonError::new("rank-failed", &text).with_rank(rank)
            }
            None => JsonError::new("rank-failed", "rank 0 ended without a result").with_rank(0),
        }
    }
}

/// How one rank exited.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct RankExit {
    /// Exit code.
    pub(crate) code: Option<i32>,
    /// Signal that killed it.
    pub(crate) signal: Option<i32>,
    /// Run time.
    pub(crate) after: Duration,
    /// Whether it reported that it failed because of another rank.
    pub(super) follows: bool,
}

impl RankExit {
    pub(super) fn failed(&self) -> bool {
        self.code != Some(0)
    }

    fn shell_code(&self) -> u8 {
        // As shells do, so that scripts can distinguish a signal from an exit.
        let code = self
            .code
            .or(self.signal.map(|signal| 128 + signal))
            .unwrap_or(1);
        u8::try_from(code).unwrap_or(1)
    }

    /// Whether it was killed by the signal, or exited with the corresponding code.
    pub(super) fn is_by(&self, signal: i32) -> bool {
        self.signal == Some(signal) || self.code == Some(128 + signal)
    }

    pub(super) fn describe(&self) -> String {
        match (self.code, self.signal) {
            (Some(code), _) => format!("exited with code {code}"),
            (None, Some(signal)) => format!("was ended by {} ({signal})", name(signal)),
            (None, None) => "ended in an unknown way".into(),
        }
    }
}

/// The name of a signal.
pub(super) fn name(signal: i32) -> &'static str {
    signal_hook::low_level::signal_name(signal).unwrap_or("a signal")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn outcome(
        exits: &[(Option<i32>, Option<i32>)],
        first_failure: Option<usize>,
    ) -> LaunchOutcome {
        let exit = |&(code, signal)| RankExit {
            code,
            signal,
            ..RankExit::default()
        };
        LaunchOutcome {
            exits: exits.iter().map(exit).collect(),
            first_failure,
            ..LaunchOutcome::default()
        }
    }

    #[test]
    fn the_first_failure_decides_the_code() {
        assert_eq!(outcome(&[(Some(0), None), (Some(0), None)], None).code(), 0);
        assert_eq!(
            outcome(&[(None, Some(15)), (Some(3), None)], Some(1)).code(),
            3
        );
        assert_eq!(
            outcome(&[(None, Some(9)), (Some(3), None)], Some(0)).code(),
            137
        );
        assert_eq!(LaunchOutcome::not_started(127, String::new()).code(), 127);
    }

    #[test]
    fn the_cause_is_no_consequence() {
        let follower = (Some(1), None);
        let cases = [
            (vec![(Some(3), None), (Some(4), None)], 0),
            (vec![follower, (None, Some(9))], 1),
            (vec![follower, (Some(3), None), (None, Some(11))], 2),
            (vec![follower, (None, Some(6))], 1),
            (vec![follower, follower], 0),
        ];
        for (exits, cause) in cases {
            let mut outcome = outcome(&exits, None);
            for exit in &mut outcome.exits {
                exit.follows = exit.code == Some(1);
            }
            let failed: Vec<usize> = (0..exits.len()).collect();
            assert_eq!(outcome.cause(&failed), Some(cause), "{exits:?}");
        }
    }

    #[test]
    fn a_job_without_a_result_names_its_cause() {
        let text = |outcome: &LaunchOutcome| serde_json::to_string(&outcome.failure()).unwrap();
        let mut killed = outcome(&[(None, Some(15)), (None, Some(9))], Some(1));
        assert_eq!(
            text(&killed),
            r#"{"kind":"rank-failed","message":"rank 1 was ended by SIGKILL (9)","rank":1}"#
        );
        killed.signalled = Some(2);
        assert_eq!(
            text(&killed),
            r#"{"kind":"interrupted","message":"interrupted by SIGINT"}"#
        );
    }

    #[test]
    fn an_end_is_described() {
        let exit = |code, signal| {
            RankExit {
                code,
                signal,
                ..RankExit::default()
            }
            .describe()
        };
        assert_eq!(exit(Some(3), None), "exited with code 3");
        assert_eq!(exit(None, Some(9)), "was ended by SIGKILL (9)");
    }
}
