//! Memory, streams and contexts of others: segments of several physical pieces, as PyTorch's
//! expandable segments are, default streams, and a context that the application made.

use super::common::{from_first, kind, open_device, processes, share_gpus, threads, values, world};
use super::{MIB, eventually, shared_mappings};
use std::sync::Arc;
use std::time::Duration;
use warplink::device::{Priority, Segment, Stream};
use warplink::memory::Region;
use warplink::p2p::{Protocol, TransferRequest};
use warplink::{Communicator, DeviceKind, ErrorKind};

/// Bytes of a piece; GPUs take no shorter ones.
const PIECE: usize = 2 * MIB;

/// The driver's handles of the legacy default stream and of the calling thread's.
const LEGACY: [u64; 2] = [0, 1];
const PER_THREAD: u64 = 2;

/// A region of `bytes` at `offset` of a segment, which it holds.
fn region_in(
    comm: &Communicator,
    segment: &Arc<dyn Segment>,
    offset: usize,
    bytes: usize,
) -> Region {
    let address = segment.address() + offset as u64;
    // SAFETY: the segment has memory there, and is held by the borrowed slice.
    let slice = unsafe {
        comm.device()
            .borrow(address, bytes, Arc::new(segment.clone()))
    };
    comm.register(&slice.unwrap()).unwrap()
}

/// Rank 0 sends its region to rank 1's, by `protocol`: one of the two maps the other's.
fn send(comm: &Communicator, region: &Region, protocol: Protocol, stream: &Stream, round: usize) {
    let peer = 1 - comm.rank();
    let wanted = values(0, round, region.bytes());
    let request = match comm.rank() {
        0 => {
            region.upload(&wanted).unwrap();
            TransferRequest::send(region, peer, 5)
        }
        _ => TransferRequest::receive(region, peer, 5),
    };
    comm.once(&[request.with_protocol(protocol)], stream)
        .unwrap();
    comm.synchronize(stream).unwrap();
    assert!(region.download().unwrap() == wanted, "round {round}");
    comm.barrier().unwrap();
}

fn segments_of_pieces(comm: &Communicator) {
    let stream = comm.create_stream(Priority::Normal).unwrap();
    let segment = comm.device().reserve_segment(8 * PIECE).unwrap();
    (0..3).for_each(|_| segment.grow(PIECE).unwrap());
    assert_eq!(segment.bytes(), 3 * PIECE);
    let whole = region_in(comm, &segment, 0, 3 * PIECE);
    let middle = region_in(comm, &segment, PIECE / 2 + 24, 2 * PIECE);
    let last = region_in(comm, &segment, 2 * PIECE + 8, PIECE / 4);
    for (round, protocol) in [Protocol::Get, Protocol::Put].into_iter().enumerate() {
        for region in [&whole, &middle, &last] {
            send(comm, region, protocol, &stream, round);
        }
    }
    // A range that has grown is another registration, which is mapped anew.
    segment.grow(PIECE).unwrap();
    let longer = region_in(comm, &segment, PIECE / 2, 3 * PIECE);
    assert_ne!(longer.generation(), middle.generation());
    assert_ne!(longer.generation(), whole.generation());
    for (round, protocol) in [Protocol::Get, Protocol::Put].into_iter().enumerate() {
        send(comm, &longer, protocol, &stream, 2 + round);
        send(comm, &whole, protocol, &stream, 4 + round);
    }
    let device = comm.device();
    // SAFETY: nothing is made of it: it passes the end of the memory.
    let past = unsafe { device.borrow(segment.address(), 5 * PIECE, Arc::new(segment.clone())) };
    assert_eq!(past.unwrap_err().kind(), ErrorKind::InvalidArgument);
}

#[test]
fn memory_of_several_pieces_is_shared_and_may_grow() {
    processes(world(2), |comm| {
        comm.barrier().unwrap();
        let before = shared_mappings();
        segments_of_pieces(comm);
        comm.release_idle().unwrap();
        comm.barrier().unwrap();
        // All that is left are pages of signals.
        eventually(
            "segments are unmapped",
            || shared_mappings() <= before + 2,
            || format!("{before}, then {}", shared_mappings()),
        );
        comm.barrier().unwrap();
    });
}

#[test]
fn memory_of_several_pieces_is_shared_among_threads() {
    threads(world(2), segments_of_pieces);
}

#[test]
fn a_segment_is_kept_while_a_peer_maps_it() {
    processes(world(2), |comm| {
        let segment = comm.device().reserve_segment(2 * PIECE).unwrap();
        (0..2).for_each(|_| segment.grow(PIECE).unwrap());
        let region = region_in(comm, &segment, 0, 2 * PIECE);
        let is_held = {
            let segment = Arc::downgrade(&segment);
            move || segment.strong_count() > 0
        };
        drop(segment);
        let peer = 1 - comm.rank();
        let handle = comm.export_handle(&region, peer).unwrap();
        let handles = comm.all_gather_bytes(&handle).unwrap();
        let remote = comm.open_handle(peer, &handles[peer]).unwrap();
        comm.barrier().unwrap();
        drop(region);
        std::thread::sleep(Duration::from_millis(50));
        assert!(is_held(), "freed under a peer's mapping");
        comm.barrier().unwrap();
        drop(remote);
        eventually("the segment is freed", || !is_held(), String::new);
        comm.barrier().unwrap();
    });
}

#[test]
fn default_streams_can_be_borrowed() {
    if kind() == DeviceKind::Host {
        // SAFETY: it is refused.
        let refused = unsafe { open_device().borrow_stream(PER_THREAD, Arc::new(())) };
        assert_eq!(refused.unwrap_err().kind(), ErrorKind::Unsupported);
        return;
    }
    processes(world(2), |comm| {
        let region = comm.alloc(MIB).unwrap();
        for (round, raw) in [LEGACY[0], LEGACY[1], PER_THREAD].into_iter().enumerate() {
            // SAFETY: default streams are valid as long as their context.
            let stream = unsafe { comm.device().borrow_stream(raw, Arc::new(())) }.unwrap();
            for protocol in [Protocol::Get, Protocol::Put] {
                send(comm, &region, protocol, &stream, round);
            }
            // The handle means another stream on another thread, which may still ask about this one.
            std::thread::scope(|scope| {
                let elsewhere = scope.spawn(|| {
                    let filled = stream.fill(region.slice(0..8).unwrap(), 1);
                    (filled, comm.synchronize(&stream))
                });
                let (filled, synchronized) = elsewhere.join().unwrap();
                synchronized.unwrap();
                match raw {
                    PER_THREAD => {
                        assert_eq!(filled.unwrap_err().kind(), ErrorKind::InvalidArgument);
                    }
                    _ => filled.unwrap(),
                }
            });
        }
        comm.barrier().unwrap();
    });
}

#[test]
fn a_context_of_the_application_stays_current() {
    use cudarc::driver::sys;
    if kind() == DeviceKind::Host {
        return;
    }
    processes(world(2), |comm| {
        let (mut device, mut own) = (0, std::ptr::null_mut());
        // Where ranks share GPUs, each sees its own alone.
        let ordinal = if share_gpus() { 0 } else { comm.rank() as i32 };
        // SAFETY: both are output parameters for one value each.
        let made = unsafe {
            let found = sys::cuDeviceGet(&mut device, ordinal);
            assert_eq!(found, sys::CUresult::CUDA_SUCCESS);
            sys::cuCtxCreate_v4(&mut own, std::ptr::null_mut(), 0, device)
        };
        assert_eq!(made, sys::CUresult::CUDA_SUCCESS);
        let is_current = || {
            let mut current = std::ptr::null_mut();
            // SAFETY: `current` is an output parameter for one context.
            unsafe { sys::cuCtxGetCurrent(&mut current) };
            current == own
        };
        let stream = comm.create_stream(Priority::Normal).unwrap();
        for (round, protocol) in [Protocol::Get, Protocol::Put].into_iter().enumerate() {
            let region = comm.alloc(MIB).unwrap();
            send(comm, &region, protocol, &stream, round);
            assert!(is_current(), "another context is left current");
        }
        comm.trim(comm.deadline()).unwrap();
        assert!(is_current(), "another context is left current");
        let mut theirs = std::ptr::null_mut();
        // SAFETY: `theirs` is an output parameter for one stream; the own context is current.
        unsafe { sys::cuStreamCreate(&mut theirs, 1) };
        // SAFETY: the stream is valid until it is destroyed below.
        let refused = unsafe {
            comm.device()
                .borrow_stream(theirs as usize as u64, Arc::new(()))
        };
        let error = refused.unwrap_err();
        super::common::assert_says(&error, &["borrow a stream", "another context"]);
        // SAFETY: both were made above, and nothing uses them any more.
        unsafe {
            sys::cuStreamDestroy_v2(theirs);
            sys::cuCtxDestroy_v2(own);
        }
        comm.barrier().unwrap();
    });
}

/// The driver must not be asked about a stream that its owner may have destroyed.
#[test]
fn a_borrowed_stream_may_be_destroyed_once_it_was_given_back() {
    use cudarc::driver::sys;
    if kind() == DeviceKind::Host {
        return;
    }
    processes(world(2), |comm| {
        const DONE: sys::CUresult = sys::CUresult::CUDA_SUCCESS;
        let region = comm.alloc(MIB).unwrap();
        // More than what used something is remembered of.
        for round in 0..8 {
            let mut theirs = std::ptr::null_mut();
            // SAFETY: making a stream leaves the primary context current; `theirs` is an output parameter.
            let made = unsafe {
                drop(comm.create_stream(Priority::Normal).unwrap());
                sys::cuStreamCreate(&mut theirs, 1)
            };
            assert_eq!(made, DONE);
            // SAFETY: the stream is valid until it is destroyed below, when it was given back.
            let borrowed = unsafe {
                comm.device()
                    .borrow_stream(theirs as usize as u64, Arc::new(()))
            };
            let borrowed = borrowed.unwrap();
            send(comm, &region, Protocol::Put, &borrowed, round);
            borrowed.begin_capture().unwrap();
            let refused = borrowed.give_back().unwrap_err();
            assert_eq!(refused.kind(), ErrorKind::InvalidArgument);
            drop(borrowed.end_capture().unwrap());
            // It was left borrowed.
            send(comm, &region, Protocol::Get, &borrowed, round);
            borrowed
                .fill(region.slice(0..8).unwrap(), round as u8)
                .unwrap();
            std::thread::scope(|scope| {
                let twice = [(); 2].map(|()| scope.spawn(|| borrowed.give_back()));
                for given_back in twice {
                    given_back.join().unwrap().unwrap();
                }
            });
            // SAFETY: the stream was given back, and records nothing.
            assert_eq!(unsafe { sys::cuStreamDestroy_v2(theirs) }, DONE);
            let refused = borrowed.fill(region.slice(0..8).unwrap(), 1).unwrap_err();
            assert!(refused.to_string().contains("given back"), "{refused}");
            assert!(!borrowed.is_capturing().unwrap());
            comm.synchronize(&borrowed).unwrap();
        }
    });
}

/// Asking a stream that records a graph, or what is in it, ends the recording.
#[test]
fn a_capture_of_the_application_is_left_alone() {
    use cudarc::driver::sys;
    if kind() == DeviceKind::Host {
        return;
    }
    processes(world(2), |comm| {
        const DONE: sys::CUresult = sys::CUresult::CUDA_SUCCESS;
        let (mut context, mut theirs) = (std::ptr::null_mut(), std::ptr::null_mut());
        // SAFETY: a call of the library has made the GPU's primary context current on this thread or leaves
        // it so; both are output parameters for one value each.
        let made = unsafe {
            drop(comm.create_stream(Priority::Normal).unwrap());
            assert_eq!(sys::cuCtxGetCurrent(&mut context), DONE);
            sys::cuStreamCreate(&mut theirs, 1)
        };
        assert_eq!(made, DONE);
        assert!(!context.is_null(), "no context is current");
        // SAFETY: the stream is valid until it is destroyed below.
        let borrowed = unsafe {
            comm.device()
                .borrow_stream(theirs as usize as u64, Arc::new(()))
        };
        let borrowed = borrowed.unwrap();
        let own = comm.create_stream(Priority::Normal).unwrap();
        for (round, protocol) in [Protocol::Get, Protocol::Put].into_iter().enumerate() {
            let used = comm.alloc(MIB).unwrap();
            send(comm, &used, protocol, &borrowed, round);
            let request = from_first(comm, &used, 6);
            let transfers = comm.exchange(&[request.with_protocol(protocol)]).unwrap();
            transfers[0].post(&borrowed).unwrap();
            transfers[0].wait(&borrowed).unwrap();
            // SAFETY: the stream is valid and records nothing.
            let begun = unsafe {
                sys::cuStreamBeginCapture_v2(
                    theirs,
                    sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED,
                )
            };
            assert_eq!(begun, DONE);
            // What the stream used is let go of, looked after and used again meanwhile.
            drop((transfers, used));
            for round in 0..10 {
                let region = comm.alloc(MIB).unwrap();
                send(comm, &region, protocol, &own, round);
                std::thread::sleep(Duration::from_millis(20));
            }
            comm.release_idle().unwrap();
            let mut graph = std::ptr::null_mut();
            // SAFETY: `graph` is an output parameter for one graph; this thread began the capture.
            let ended = unsafe { sys::cuStreamEndCapture(theirs, &mut graph) };
            assert_eq!(ended, DONE, "the capture was spoiled");
            assert!(!graph.is_null());
            // SAFETY: the graph is this test's, and nothing was made from it.
            assert_eq!(unsafe { sys::cuGraphDestroy(graph) }, DONE);
            comm.synchronize(&borrowed).unwrap();
            comm.barrier().unwrap();
        }
        drop(borrowed);
        // SAFETY: made above, and no work is in it any more.
        unsafe { sys::cuStreamDestroy_v2(theirs) };
        comm.barrier().unwrap();
    });
}
