//! How the ranks of a launch ended, and what that makes the exit code.

use crate::report::JsonError;
use signal_hook::consts::{SIGBUS, SIGFPE, SIGILL, SIGKILL, SIGSEGV};
use std::process::ExitCode;
use std::time::Duration;

/// The signals that end no rank because another one failed.
const FIRST_CAUSES: [i32; 5] = [SIGKILL, SIGSEGV, SIGBUS, SIGILL, SIGFPE];

/// How ranks ended.
#[derive(Debug)]
pub(crate) struct Outcome {
    /// By rank.
    pub(crate) exits: Vec<RankExit>,
    /// The rank whose failure is the cause of the others'.
    pub(crate) first_failure: Option<usize>,
    /// The first signal that the launcher passed on.
    pub(super) signalled: Option<i32>,
    /// What each rank wrote to standard output, where that was kept.
    pub(crate) kept: Vec<Vec<u8>>,
    /// What to exit with where no rank failed: not 0 where the launcher itself gave up.
    pub(super) otherwise: u8,
    /// Why no rank was started.
    pub(crate) error: Option<String>,
}

impl Outcome {
    /// Nothing was started.
    pub(super) fn not_started(code: u8, error: String) -> Self {
        Self {
            exits: Vec::new(),
            first_failure: None,
            signalled: None,
            kept: Vec::new(),
            otherwise: code,
            error: Some(error),
        }
    }

    /// The first line that a rank wrote, where that was kept.
    pub(crate) fn first_line(&self, rank: usize) -> Option<&[u8]> {
        let mut lines = self.kept.get(rank)?.split_inclusive(|byte| *byte == b'\n');
        lines.next().filter(|line| line.ends_with(b"\n"))
    }

    /// Of the ranks that `failed`, in the order in which they ended, the one that is the cause. What only a signal from
    /// outside or a fault of its own does to a process follows from nothing that another rank did.
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
        .or_else(|| failed.first().copied())
    }

    /// The code of the first rank that failed, 128 and the signal's number where one ended it.
    pub(crate) fn code(&self) -> u8 {
        match self.first_failure.and_then(|rank| self.exits.get(rank)) {
            Some(exit) => exit.shell_code(),
            None => self.otherwise,
        }
    }

    pub(crate) fn exit_code(&self) -> ExitCode {
        ExitCode::from(self.code())
    }

    /// Why there is no result, for machines, where no rank said it.
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

/// How one rank ended.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct RankExit {
    /// What it exited with.
    pub(crate) code: Option<i32>,
    /// The signal that ended it.
    pub(crate) signal: Option<i32>,
    /// How long it ran.
    pub(crate) after: Duration,
    /// Whether it said that it failed because another rank did.
    pub(super) follows: bool,
}

impl RankExit {
    pub(super) fn failed(&self) -> bool {
        self.code != Some(0)
    }

    fn shell_code(&self) -> u8 {
        let code = self
            .code
            .or(self.signal.map(|signal| 128 + signal))
            .unwrap_or(1);
        u8::try_from(code).unwrap_or(1)
    }

    /// Whether it ended by the signal, or with the code that says so.
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

    fn outcome(exits: &[(Option<i32>, Option<i32>)], first_failure: Option<usize>) -> Outcome {
        let exit = |&(code, signal)| RankExit {
            code,
            signal,
            ..RankExit::default()
        };
        Outcome {
            exits: exits.iter().map(exit).collect(),
            first_failure,
            signalled: None,
            kept: Vec::new(),
            otherwise: 0,
            error: None,
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
        assert_eq!(Outcome::not_started(127, String::new()).code(), 127);
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
        let text = |outcome: &Outcome| serde_json::to_string(&outcome.failure()).unwrap();
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
