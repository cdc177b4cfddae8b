//! Waits for ranks that live but have failed, and so never do what the others wait for: they end at once, with the error
//! of the rank that failed.

use crate::common::{Stopwatch, assert_says, at_least, threads_that_end, unchanged};
use std::time::Duration;
use warplink::channel::ConnectionRequest;
use warplink::p2p::TransferRequest;
use warplink::{Communicator, ErrorKind, Result};

/// Longest that a wait may last once the awaited rank has failed; the timeout of ranks is a minute.
const SOON: Duration = Duration::from_secs(5);

/// Until the other ranks wait.
const A_WHILE: Duration = Duration::from_millis(200);

/// A call that waits for rank 1.
type Call = fn(&Communicator) -> Result<()>;

fn exchange(comm: &Communicator) -> Result<()> {
    let region = comm.alloc(64)?;
    comm.exchange(&[TransferRequest::send(&region, 1, 0)])
        .map(drop)
}

fn connect(comm: &Communicator) -> Result<()> {
    let region = comm.alloc(64)?;
    comm.connect(&[ConnectionRequest::new(1, 0, &region)])
        .map(drop)
}

/// Calls that wait for all ranks, of which rank 1 does not call.
const CALLS: [(&str, Call); 6] = [
    ("exchange", exchange),
    ("connect", connect),
    ("stream barrier", |comm| comm.stream_barrier().map(drop)),
    ("share", |comm| {
        let region = comm.alloc(64)?;
        comm.share(&region).map(drop)
    }),
    ("collectives", |comm| comm.collectives().map(drop)),
    ("engine", |comm| comm.collective_engine().map(drop)),
];

/// Rank 2 is lost, and with it the communicator of rank 1, which lives.
#[test]
fn a_rank_whose_communicator_has_failed_by_a_loss_is_not_waited_for() {
    let Some(ranks) = at_least(3) else { return };
    for (name, call) in CALLS {
        threads_that_end(ranks, unchanged, |comm| {
            comm.barrier().unwrap();
            match comm.rank() {
                0 => {
                    let watch = Stopwatch::start();
                    let error = call(&comm).unwrap_err();
                    assert!(watch.elapsed() < SOON, "{name}: {error}");
                    assert_eq!(error.kind(), ErrorKind::PeerLost, "{name}: {error}");
                    assert_eq!(error.peer(), Some(2), "{name}: {error}");
                    assert_says(&error, &["it aborted: for the test"]);
                }
                1 => {
                    while comm.check().is_ok() {
                        std::thread::sleep(A_WHILE / 20);
                    }
                }
                _ => {
                    std::thread::sleep(A_WHILE);
                    return comm.abort("for the test");
                }
            }
            comm.survivors().unwrap().close().unwrap();
        });
    }
}

/// Rank 1 has ended the communicator, but not the job.
#[test]
fn a_rank_that_has_failed_the_communicator_is_not_waited_for() {
    let Some(ranks) = at_least(3) else { return };
    for (name, call) in CALLS {
        threads_that_end(ranks, unchanged, |comm| {
            comm.barrier().unwrap();
            if comm.rank() == 1 {
                std::thread::sleep(A_WHILE);
                comm.fail("for the test");
            } else {
                let watch = Stopwatch::start();
                let error = call(&comm).unwrap_err();
                assert!(watch.elapsed() < SOON, "{name}: {error}");
                assert_eq!(error.kind(), ErrorKind::PeerFailed, "{name}: {error}");
                assert_eq!(error.peer(), Some(1), "{name}: {error}");
                assert_says(&error, &["for the test"]);
            }
            comm.survivors().unwrap().close().unwrap();
        });
    }
}
