//! A routing whose memory somebody has overwritten.

use super::{Dispatched, ExpertOptions, Tokens};
use crate::bootstrap::{JoinConfig, Rendezvous, UniqueId};
use crate::device::{AllocationKind, DeviceKind, Priority};
use crate::dtype::DType;
use crate::error::{Error, ErrorKind};
use crate::{Communicator, Config};
use std::net::{IpAddr, Ipv4Addr};
use std::sync::Barrier;
use std::time::{Duration, Instant};

const RANKS: usize = 2;

const OPTIONS: ExpertOptions = ExpertOptions {
    experts: 4,
    top_k: 2,
    max_tokens: 3,
    max_rows: None,
    elements: 16,
    dtype: DType::F32,
    layout: super::RowLayout::BySource,
    overflow: super::Overflow::Drop,
    quantization: None,
    quantized_tokens: false,
};

/// Combines by a routing of which rank 1 has overwritten its own.
fn combine(comm: &Communicator, all: &Barrier) -> Result<(), Error> {
    let layer = comm.collectives()?.experts(&OPTIONS)?;
    let stream = comm.create_stream(Priority::Normal)?;
    let memory = |words: usize| {
        let memory = comm.device().allocate(4 * words, AllocationKind::Plain)?;
        comm.device().upload(&memory, &vec![0; 4 * words])?;
        Ok::<_, Error>(memory)
    };
    let rows = RANKS * OPTIONS.rows_per_peer();
    let (tokens, output) = (memory(3 * 16)?, memory(3 * 16)?);
    let (choices, weights) = (memory(3 * 2)?, memory(3 * 2)?);
    let (received, experts, counts) = (memory(rows * 16)?, memory(rows)?, memory(RANKS)?);
    let to = Dispatched::new(&received, &experts, &counts);
    let routing = layer.dispatch(&Tokens::new(&tokens, &choices), &to, &stream)?;
    comm.synchronize(&stream)?;
    all.wait();
    if comm.rank() == 1 {
        let bytes = vec![0xff; routing.places.bytes()];
        comm.device().upload(&routing.places, &bytes)?;
    }
    all.wait();
    layer.combine(&output, &received, &routing, Some(&weights), &stream)?;
    comm.synchronize(&stream)
}

#[test]
fn a_routing_that_was_overwritten_ends_the_combine_on_all_ranks() {
    let id = UniqueId::create(IpAddr::V4(Ipv4Addr::LOCALHOST), 0).unwrap();
    let all = Barrier::new(RANKS);
    std::thread::scope(|scope| {
        for rank in 0..RANKS {
            let (join, all) = (
                JoinConfig::new(Rendezvous::Id(id.clone()), rank, RANKS),
                &all,
            );
            scope.spawn(move || {
                let mut config = Config::new(join, DeviceKind::Host);
                config.timeout = Duration::from_secs(60);
                let comm = Communicator::join(&config).unwrap();
                let started = Instant::now();
                let error = combine(&comm, all).unwrap_err();
                assert!(started.elapsed() < Duration::from_secs(20), "{error}");
                all.wait();
                comm.abort("the test is over");
                let (said, expected) = (error.to_string(), "is 4294967295; expected 0 to 12");
                assert!(said.contains(expected), "{said} lacks '{expected}'");
                let kinds = [ErrorKind::PeerFailed, ErrorKind::InvalidArgument];
                assert_eq!(error.kind(), kinds[rank], "{error}");
            });
        }
    });
}
