//! The verifier on faulty programs.

use crate::program_support::evidence::check;
use crate::program_support::sample::Sample;
use std::collections::BTreeMap;
use warplink::program::{Diagnostic, Parameters, Program, verify};

const STREAMS: usize = 2;

fn parameters(list: &[(&str, i64)]) -> Parameters {
    list.iter()
        .map(|&(name, value)| (name.to_owned(), value))
        .collect()
}

mod faulty {
    use super::*;
    use crate::faulty_texts::{check_refusals, header, in_folder};

    /// The first diagnostic of `program`, which may run eagerly.
    fn first(program: &Program, world: usize) -> Option<Diagnostic> {
        match verify(program, world, STREAMS, &parameters(&[("n", 8)])) {
            Ok(report) => report.eager_only,
            Err(diagnostics) => {
                for diagnostic in &diagnostics {
                    println!("{} × {world}: {diagnostic}", program.name);
                    assert!(diagnostic.ranks().iter().all(|rank| *rank < world));
                }
                diagnostics.into_iter().next()
            }
        }
    }

    #[test]
    fn each_is_refused_for_its_violation() {
        check_refusals("faulty-programs", 100, first);
    }

    /// The interpreter finds the deadlock, the order that is left open, or the rule that is broken, in
    /// all of them that it can play.
    #[test]
    fn each_is_shown_to_be_wrong() {
        let (mut classes, mut wrong) = (BTreeMap::new(), Vec::new());
        for (name, text) in in_folder("faulty-programs") {
            for world in header(&text, "world") {
                let sample = Sample {
                    text: text.clone(),
                    program: Program::parse(&text).unwrap(),
                    world: world.parse().unwrap(),
                    streams: STREAMS,
                    parameters: parameters(&[("n", 8)]),
                    changes: 1,
                };
                if sample.world > 4 {
                    continue;
                }
                match check(&sample) {
                    Ok(shown) => *classes.entry(shown.class).or_insert(0) += 1,
                    Err(how) => wrong.push(format!("{name} × {world}: {how}")),
                }
            }
        }
        println!("{classes:#?}");
        assert!(wrong.is_empty(), "{}", wrong.join("\n"));
        assert!(!classes.contains_key("accepted"), "{classes:?}");
    }
}

mod signals {
    use super::*;

    /// The verdict on a program for 3 ranks and what shows it.
    fn shown(text: &str) -> Result<String, String> {
        let sample = Sample {
            program: Program::parse(text).unwrap(),
            text: text.to_owned(),
            world: 3,
            streams: STREAMS,
            parameters: parameters(&[("n", 8)]),
            changes: 1,
        };
        check(&sample).map(|shown| shown.class)
    }

    /// As [`shown`], of a program with two transfers in each direction and these statements.
    fn shown_with_two(statements: &str) -> Result<String, String> {
        shown(&format!(
            "program p(n) {{
                input A: f32[n]
                output C: f32[n]
                allocate R: f32[2, n]
                let next = (rank + 1) % world
                let previous = (rank - 1) % world
                share {{
                    s1 = send A to next tag 1 via get
                    r1 = receive R[0] from previous tag 1 via get
                    s2 = send A to next tag 2 via get
                    r2 = receive R[1] from previous tag 2 via get
                }}
                {statements}
                C = sum(R[0], R[1])
            }}"
        ))
    }

    /// The diagnostic of a program that posts two transfers in each direction on a stream of the pool, does
    /// `between` on the caller's, and posts them again there.
    fn again(between: &str) -> Result<String, String> {
        let text = format!(
            "set_stream pool(0)
                synchronize caller
                post s1, s2, r1, r2
                set_stream caller
                {between}
                post s1, s2, r1, r2
                wait s1, s2, r1, r2
                synchronize pool(0)"
        );
        shown_with_two(&text)
    }

    /// Data of a group is there when one of its copies is known to be done; a transfer is posted again behind
    /// a wait for itself, or what its stream did next.
    #[test]
    fn a_transfer_is_posted_again_when_its_last_post_is_known_to_be_over() {
        for between in ["wait r1", "wait r2", "wait r1, s1, s2", "wait s1, s2, r2"] {
            assert_eq!(
                again(between),
                Ok("refused, lost-signal".to_owned()),
                "{between}"
            );
        }
        for between in [
            "wait r1, r2",
            "wait r2; wait r1",
            "synchronize pool(0)",
            "set_stream pool(1); synchronize pool(0); set_stream caller; synchronize pool(1)",
            "set_stream pool(1); synchronize caller; wait r1, r2; set_stream caller; synchronize pool(1)",
            "set_stream pool(0); wait s1, s2; set_stream caller; wait r1; synchronize pool(0)",
        ] {
            let between = between.replace(';', "\n");
            let class = again(&between).unwrap();
            assert!(class.starts_with("accepted"), "{class}: {between}");
        }
    }

    /// Streams order a run's first post behind the last of the run before, whether or not the caller waited for it.
    #[test]
    fn a_stream_may_order_the_next_run_behind_the_last_post() {
        let program = |before: &str| {
            let text = format!(
                "program p(n) {{
                    input A: f32[n]
                    output C: f32[n]
                    allocate R: f32[2, n]
                    share {{
                        s1 = send A to (rank + 1) % world tag 1 via put
                        r1 = receive R[0] from (rank - 1) % world tag 1 via put
                        s2 = send A to (rank + 1) % world tag 2 via put
                        r2 = receive R[1] from (rank - 1) % world tag 2 via put
                    }}
                    set_stream pool(0)
                    synchronize caller
                    set_stream pool(1)
                    synchronize caller
                    {before}
                    post s1
                    set_stream caller
                    post r1
                    set_stream pool(1)
                    wait s1
                    set_stream pool(0)
                    synchronize pool(1)
                    post s1, s2
                    set_stream caller
                    synchronize pool(1)
                    wait r1
                    post r1, r2
                    wait r1, r2, s2
                    C = sum(R[0], R[1])
                }}"
            );
            shown(&text)
        };
        assert_eq!(program(""), Ok("refused, lost-signal".to_owned()));
        let found = program("synchronize pool(0)").unwrap();
        assert!(found.starts_with("accepted"), "{found}");
    }

    /// A stream that waited for a transfer posts it first in the next run, even if the caller does not wait for the stream.
    #[test]
    fn a_stream_may_wait_for_the_last_post_itself() {
        for (wait, expected) in [
            ("", "refused, lost-signal"),
            ("wait r2", "refused, unjoined"),
            ("wait r1", "refused, unjoined"),
            (
                "wait r1\nset_stream caller\nsynchronize pool(0)",
                "accepted",
            ),
        ] {
            let text = format!(
                "set_stream pool(0)
                    synchronize caller
                    post s1, r1
                    set_stream pool(1)
                    synchronize caller
                    wait s1, r1
                    post s1, s2, r1, r2
                    set_stream pool(0)
                    {wait}
                    set_stream caller
                    wait s1, s2, r2"
            );
            let class = shown_with_two(&text).unwrap();
            assert!(class.starts_with(expected), "{class}: {wait}");
        }
    }

    /// A stream that knows a later post on the stream of a transfer's last one has neither waited for that transfer nor
    /// synchronized with the stream, as it must before it posts it again.
    #[test]
    fn a_wait_for_another_transfer_is_not_enough_to_post_again() {
        let text = "set_stream pool(1)
            synchronize caller
            post s2, r2
            set_stream pool(0)
            synchronize caller
            wait s2, r2
            post s1, r1
            set_stream pool(1)
            wait s1, r1
            post s1, s2, r1, r2
            set_stream caller
            synchronize pool(0)
            wait s1, s2, r2";
        let expected = "refused, rule: posts again without waiting";
        assert_eq!(shown_with_two(text), Ok(expected.to_owned()));
    }

    /// A run's last post on the caller's stream is over when the next begins.
    #[test]
    fn a_transfer_may_be_posted_last_on_the_callers_stream() {
        let text = "program p(n) {
            input A: f32[n]
            output C: f32[n]
            share {
                s = send A to (rank + 1) % world via get
                r = receive C from (rank - 1) % world via get
            }
            set_stream pool(0)
            synchronize caller
            post s, r
            set_stream caller
            wait s, r
            synchronize pool(0)
            post s, r
            wait s
        }";
        let class = shown(text).unwrap();
        assert!(class.starts_with("accepted"), "{class}");
    }

    /// A peer's signal about one copy of a group implies that the peer has received all announcements of the group.
    #[test]
    fn a_peers_copy_says_that_its_group_was_announced() {
        let text = "set_stream pool(0)
            synchronize caller
            post s1, s2
            set_stream caller
            post r1, r2
            wait s1
            post s2
            post r2
            wait s2
            synchronize pool(0)";
        let class = shown_with_two(text).unwrap();
        assert!(class.starts_with("accepted"), "{class}");
    }
}
