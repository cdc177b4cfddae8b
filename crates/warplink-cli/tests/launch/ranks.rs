//! Environment of the ranks of `warplink launch`, and handling of their output.

use crate::common::{
    assert_contains, launch, launch_with, sorted_lines, stderr, stdout, succeeded, warplink,
};

#[test]
fn each_rank_learns_its_place() {
    let output = launch(
        3,
        r#"echo "$WARPLINK_RANK/$WARPLINK_WORLD $WARPLINK_LOCAL_RANK $RANK/$WORLD_SIZE $LOCAL_RANK/$LOCAL_WORLD_SIZE" \
                "$MASTER_ADDR ${MASTER_PORT:+port} $CUDA_DEVICE_MAX_CONNECTIONS""#,
    );
    succeeded(&output);
    let expected = [0, 1, 2].map(|r| format!("[rank {r}] {r}/3 {r} {r}/3 {r}/3 127.0.0.1 port 32"));
    assert_eq!(sorted_lines(&output), expected);
}

#[test]
fn the_ranks_share_one_id_that_differs_between_launches() {
    let ids = |output: std::process::Output| {
        let text = stdout(&output);
        let mut ids: Vec<_> = text
            .lines()
            .map(|line| line.split(' ').next_back().unwrap().to_owned())
            .collect();
        ids.dedup();
        assert_eq!(ids.len(), 1, "{text}");
        ids.remove(0)
    };
    let first = ids(launch(2, "echo $WARPLINK_ID"));
    assert!(
        first.parse::<warplink::bootstrap::UniqueId>().is_ok(),
        "{first}"
    );
    assert_ne!(first, ids(launch(2, "echo $WARPLINK_ID")));
}

#[test]
fn variables_of_the_caller_are_kept() {
    let script =
        r#"echo "$CUDA_DEVICE_MAX_CONNECTIONS $MASTER_ADDR $MASTER_PORT $NCCL_NVLS_ENABLE""#;
    let output = warplink(&["launch", "-n", "1", "--", "sh", "-c", script])
        .env("CUDA_DEVICE_MAX_CONNECTIONS", "8")
        .env("MASTER_ADDR", "localhost")
        .env("MASTER_PORT", "29500")
        .env("NCCL_NVLS_ENABLE", "0")
        .output()
        .unwrap();
    assert_eq!(stdout(&output), "[rank 0] 8 localhost 29500 0\n");
}

#[test]
fn variables_may_name_their_rank() {
    let options = [
        "--env",
        "A=x y=z",
        "--env",
        "CUDA_VISIBLE_DEVICES={local_rank}",
        "--device",
        "host",
    ];
    let output = launch_with(
        &options,
        2,
        r#"echo "$A $CUDA_VISIBLE_DEVICES $WARPLINK_DEVICE""#,
    );
    assert_eq!(
        sorted_lines(&output),
        ["[rank 0] x y=z 0 host", "[rank 1] x y=z 1 host"]
    );
}

#[test]
fn streams_stay_apart_and_partial_lines_arrive() {
    let output = launch(1, "printf 'out\\npart'; printf 'err' >&2");
    assert_eq!(stdout(&output), "[rank 0] out\n[rank 0] part\n");
    assert_eq!(stderr(&output), "[rank 0] err\n");
}

#[test]
fn bytes_pass_unchanged() {
    let output = launch(1, "printf 'a\\377\\000\\033b\\r\\n'");
    assert_eq!(output.stdout, b"[rank 0] a\xff\x00\x1bb\r\n");
}

#[test]
fn lines_of_different_ranks_do_not_mix() {
    let script =
        "i=0; while [ $i -lt 400 ]; do printf 'a%s' $RANK; printf 'b%s\\n' $RANK; i=$((i+1)); done";
    let output = launch(4, script);
    let mut counts = [0; 4];
    for line in stdout(&output).lines() {
        let rank: usize = line["[rank ".len()..][..1].parse().unwrap();
        assert_eq!(line, format!("[rank {rank}] a{rank}b{rank}"));
        counts[rank] += 1;
    }
    assert_eq!(counts, [400; 4]);
}

#[test]
fn standard_input_is_empty() {
    assert_eq!(stdout(&launch(2, "cat")), "");
}

#[test]
fn json_has_standard_output_to_itself() {
    let here = tempfile::tempdir().unwrap();
    let process = here.path().join("process");
    let output = launch_with(
        &["--json"],
        2,
        &format!(
            // Rank 0 has ended before its peer fails.
            "echo noise; if [ $RANK = 0 ]; then echo $$ > {0}.part; mv {0}.part {0}; exit 0; fi
            until [ -e {0} ]; do sleep 0.01; done
            first=/proc/$(cat {0})/status
            until [ ! -e $first ] || grep -q 'State:.Z' $first; do sleep 0.01; done; exit 7",
            process.display()
        ),
    );
    assert_eq!(output.status.code(), Some(7));
    let result: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(
        (&result["exit_code"], &result["first_failure"]),
        (&7.into(), &1.into())
    );
    assert_eq!(
        (&result["ranks"][0]["code"], &result["ranks"][1]["code"]),
        (&0.into(), &7.into())
    );
    assert_contains(&stderr(&output), &["[rank 0] noise"]);
}

#[test]
fn a_closed_output_ends_the_ranks() {
    let script = format!(
        "{} launch -n 2 -- sh -c 'while echo again; do :; done' | head -n 1",
        env!("CARGO_BIN_EXE_warplink")
    );
    let output = std::process::Command::new("sh")
        .args(["-c", &script])
        .output()
        .unwrap();
    assert!(stdout(&output).ends_with("again\n"));
}

#[test]
fn wrong_arguments_are_refused_before_anything_starts() {
    for args in [
        &["launch"][..],
        &["launch", "-n", "2"],
        &["launch", "-n", "0", "--", "true"],
        &["launch", "-n", "x", "--", "true"],
        &["launch", "-n", "100000", "--", "true"],
        &["launch", "--device", "tpu", "--", "true"],
        &["launch", "--env", "NOVALUE", "--", "true"],
        &["launch", "--env", "WARPLINK_RANK=1", "--", "true"],
        &["launch", "--grace", "-1", "--", "true"],
        &["no-such-command"],
        &[],
    ] {
        let output = warplink(args).output().unwrap();
        assert_eq!(
            output.status.code(),
            Some(2),
            "{args:?}: {}",
            stderr(&output)
        );
        assert!(stdout(&output).is_empty() && !stderr(&output).is_empty());
    }
}

#[test]
fn a_program_that_is_not_there_is_said_once() {
    for (program, code, message) in [
        ("no-such-program", 127, "'no-such-program' was not found"),
        ("/", 126, "'/' is not an executable file"),
    ] {
        let output = warplink(&["launch", "-n", "3", "--", program])
            .output()
            .unwrap();
        assert_eq!(output.status.code(), Some(code));
        assert_eq!(
            stderr(&output).matches(message).count(),
            1,
            "{}",
            stderr(&output)
        );
    }
}

#[test]
fn help_shows_examples() {
    for args in [&["--help"][..], &["launch", "--help"]] {
        let output = warplink(args).output().unwrap();
        assert!(
            output.status.success()
                && stdout(&output).contains("warplink launch -n 4 -- ./my-program")
        );
    }
}
