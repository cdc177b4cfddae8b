//! Signals and announcements in generated kernels.

use super::{kernel, section};

/// A thread counts the signals to each rank of a step.
#[test]
fn signals_to_one_rank_come_one_after_the_other() {
    for (ranks, calls) in [
        ("1, 1", ["Places<1>"; 2].as_slice()),
        ("1, 2, 3", &["Places<3>"]),
        ("(rank + r) % world for r in 1..world", &["Places<3>"]),
    ] {
        let text = kernel(&format!("signal {ranks}\nwait {ranks}"), 0, 4).unwrap();
        let signals = text.match_indices("outbound.signal(self, ");
        let signals: Vec<&str> = signals
            .map(|(at, found)| &text[at + found.len()..])
            .collect();
        assert_eq!(signals.len(), calls.len(), "{text}");
        for (signal, call) in signals.iter().zip(calls) {
            assert!(signal.starts_with(call), "{ranks}:\n{text}");
        }
    }
}

/// A rank that announces nothing stores at the addresses that the launch knows, whichever branch the lane took before.
#[test]
fn a_lane_that_only_agrees_knows_where_tensors_are() {
    let text = "program test(n) {\n input X: bf16[n]\n output Y: bf16[n]\n scratch A: packets16 i32[2, 4, world, 4]\n \
                kernel lane in 0..4 threads 128 {\n if lane == 0 or rank == 1 { announce n with Y in A[epoch % 2][lane] }\n\
                agree n with Y in A[epoch % 2][lane]\nif reachable(Y) { Y on 1 = copy(X) }\n}\n}\n";
    for rank in 0..2 {
        let kernel = section(text, rank, 2, 1000).kernel(true).unwrap();
        let (before, agreed) = kernel.split_once("agree(self").unwrap();
        assert!(before.contains("announced[0] = true;"), "{kernel}");
        let located = "if (!announced[0]) locate_of_others(self, located[0], at.v_Y);";
        assert!(before.contains(located), "{kernel}");
        assert!(agreed.contains("plain<Bf16>(located[0].at[1]"), "{kernel}");
    }
}
