//! The functions of `warplink.h`, called from Rust: ranks are threads of this process.

#![allow(clippy::unwrap_used)]

#[path = "../../warplink/tests/common/network.rs"]
mod network;
#[path = "../../warplink/tests/common/stopwatch.rs"]
mod stopwatch;

use network::has_network;
use std::ffi::{CStr, CString, c_void};
use std::mem::zeroed;
use std::ptr::null;
use std::sync::Barrier;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;
use std::time::Duration;
use stopwatch::Stopwatch;
use warplink::ErrorKind;
use warplink::channel::Transport;
use warplink_c::block::*;
use warplink_c::block_channel::*;
use warplink_c::buffer::*;
use warplink_c::channel::*;
use warplink_c::handles::*;
use warplink_c::job::*;
use warplink_c::kernel::*;
use warplink_c::memory::*;
use warplink_c::status::*;
use warplink_c::stream::*;
use warplink_c::types::*;

const TAG: u64 = 5;

fn last_error() -> String {
    // SAFETY: the text ends with a zero and is valid until the thread's next failure.
    let text = unsafe { CStr::from_ptr(warplink_last_error()) };
    text.to_str().unwrap().to_owned()
}

#[track_caller]
fn ok(status: Status) {
    assert_eq!(status, Status::SUCCESS, "{}", last_error());
}

#[track_caller]
fn fails(status: Status, expected: Status, text: &str) {
    let error = last_error();
    assert_eq!(status, expected, "{error}");
    assert!(error.contains(text), "'{error}' does not say '{text}'");
}

/// Value that `call` stores to its output.
#[track_caller]
fn made<T>(call: impl FnOnce(*mut T) -> Status) -> T {
    let mut place = std::mem::MaybeUninit::uninit();
    ok(call(place.as_mut_ptr()));
    // SAFETY: the call succeeded, so it wrote the output.
    unsafe { place.assume_init() }
}

/// Runs `body` as two ranks, with `seconds` for waits, and leaves as it says.
fn ranks_until(seconds: f64, body: impl Fn(Comm, i32) + Sync, leave: impl Fn(Comm) + Sync) {
    // SAFETY: the pointers are null, or places for what is written.
    let id = made(|id| unsafe { warplink_unique_id_create(null(), 0, id) });
    thread::scope(|scope| {
        for rank in 0..2 {
            let (body, leave, id) = (&body, &leave, &id);
            scope.spawn(move || {
                let mut options = warplink_options_default();
                options.device = c"host".as_ptr();
                options.timeout = seconds;
                // SAFETY: as above.
                let comm =
                    made(|comm| unsafe { warplink_init_from_id(comm, 2, id, rank, &options) });
                body(comm, rank);
                leave(comm);
            });
        }
    });
}

fn ranks(body: impl Fn(Comm, i32) + Sync) {
    ranks_until(30.0, body, |comm| ok(warplink_destroy(comm)));
}

fn alloc(comm: Comm, bytes: usize) -> Region {
    // SAFETY: a place for a region.
    made(|region| unsafe { warplink_alloc(comm, bytes, region) })
}

fn stream(comm: Comm) -> Stream {
    // SAFETY: a place for a stream.
    made(|stream| unsafe { warplink_stream_create(comm, stream) })
}

fn span(region: Region, offset: u64, bytes: u64) -> Span {
    Span {
        region,
        offset,
        bytes,
    }
}

fn upload(region: Region, words: &[u64]) {
    let target = span(region, 0, size_of_val(words) as u64);
    // SAFETY: as many bytes as the span has.
    ok(unsafe { warplink_upload(target, words.as_ptr().cast()) });
}

fn download<const N: usize>(region: Region) -> [u64; N] {
    let mut words = [0; N];
    // SAFETY: as many bytes as the span has.
    ok(unsafe { warplink_download(words.as_mut_ptr().cast(), span(region, 0, 8 * N as u64)) });
    words
}

/// The kernel of the host device with this body.
fn host_kernel(
    comm: Comm,
    body: unsafe extern "C-unwind" fn(*mut c_void) -> i32,
    user: *mut c_void,
) -> Kernel {
    let kernel = HostKernel {
        name: c"body".as_ptr(),
        body: Some(body),
        user,
    };
    // SAFETY: zero is none for all of its members.
    let mut source: ModuleSource = unsafe { zeroed() };
    source.host_kernels = &kernel;
    source.host_kernel_count = 1;
    // SAFETY: a whole source, and a place for a module.
    let module = made(|module| unsafe { warplink_module_load(comm, &source, module) });
    // SAFETY: a text, and a place for a kernel.
    let kernel = made(|kernel| unsafe { warplink_kernel_get(module, c"body".as_ptr(), kernel) });
    ok(warplink_module_free(module));
    kernel
}

fn launch(kernel: Kernel, stream: Stream, blocks: u32, arguments: &[Argument]) -> Status {
    let shape = Shape {
        blocks,
        threads: 1,
        shared_bytes: 0,
        together: 0,
    };
    // SAFETY: the length is that of the arguments.
    unsafe { warplink_launch(kernel, stream, shape, arguments.as_ptr(), arguments.len()) }
}

fn at(offset: u64) -> At {
    At { region: 0, offset }
}

/// Declares a connection to the other of two ranks.
fn declare(comm: Comm, rank: i32, region: Region, transport: Option<Transport>) {
    // SAFETY: no network devices are named.
    ok(unsafe {
        warplink_connect(
            comm,
            1 - rank,
            TAG,
            region,
            transport.map_or(0, |transport| transport as i32),
            null(),
        )
    });
}

/// Connects the two ranks, with 64 bytes each.
fn connect(comm: Comm, rank: i32, transport: Option<Transport>) -> Region {
    let region = alloc(comm, 64);
    upload(region, &[0; 8]);
    declare(comm, rank, region, transport);
    ok(warplink_setup(comm));
    region
}

/// Uses the calls of a block on one channel: what it reads must be what the peer put. Argument 1 is the rank.
unsafe extern "C-unwind" fn every_call(_user: *mut c_void) -> i32 {
    let steps = || -> Result<(), Status> {
        let check = |status| match status {
            Status::SUCCESS => Ok(()),
            status => Err(status),
        };
        let (mut rank, mut index, mut blocks, mut factor) = (0, 9, 9, 0.0);
        let mut arrived = 0;
        // SAFETY: places for what is written, or null where that is allowed; lengths are those of the places.
        unsafe {
            check(warplink_block_u64(1, &mut rank))?;
            check(warplink_block_index(&mut index, &mut blocks))?;
            check(warplink_block_index(
                std::ptr::null_mut(),
                std::ptr::null_mut(),
            ))?;
            check(warplink_block_f64(2, &mut factor))?;
            assert_eq!((index, blocks, factor), (0, 1, 2.5));
            let mut signed = 0;
            check(warplink_block_i64(4, &mut signed))?;
            assert_eq!(signed, -7);
            let mut word = 100 + rank;
            check(warplink_block_store(0, at(0), (&raw const word).cast(), 8))?;
            check(warplink_block_put(0, at(8), at(0), 8))?;
            check(warplink_block_signal(0))?;
            check(warplink_block_flush(0))?;
            check(warplink_block_wait_until(0, 1))?;
            while arrived == 0 {
                check(warplink_block_poll(0, &mut arrived))?;
            }
            check(warplink_block_load(0, (&raw mut word).cast(), at(8), 8))?;
            assert_eq!(word, 100 + 1 - rank);
            // The peer's own word, fetched.
            check(warplink_block_get(0, at(16), at(0), 8))?;
            check(warplink_block_flush(0))?;
            check(warplink_block_load(0, (&raw mut word).cast(), at(16), 8))?;
            assert_eq!(word, 100 + 1 - rank);
            check(warplink_block_put_with_signal(0, at(24), at(0), 8))?;
            check(warplink_block_put_with_signal_and_flush(
                0,
                at(32),
                at(0),
                8,
            ))?;
            check(warplink_block_wait(0))?;
            check(warplink_block_wait(0))?;
            // A region as an argument.
            check(warplink_block_load(3, (&raw mut word).cast(), at(0), 8))?;
            word += 1;
            check(warplink_block_store(3, at(8), (&raw const word).cast(), 8))?;
        }
        Ok(())
    };
    steps().err().map_or(0, Status::number)
}

#[test]
fn blocks_of_host_kernels_make_calls_on_a_channel_of_any_transport() {
    let mut transports = vec![None, Some(Transport::Direct), Some(Transport::Proxied)];
    if has_network() {
        transports.push(Some(Transport::Network));
    }
    for transport in transports {
        ranks(|comm, rank| {
            let region = connect(comm, rank, transport);
            let own = alloc(comm, 24);
            upload(own, &[0, 41, 0]);
            let (stream, kernel) = (
                stream(comm),
                host_kernel(comm, every_call, std::ptr::null_mut()),
            );
            let arguments = [
                warplink_argument_channel(comm, 1 - rank, TAG),
                warplink_argument_u32(rank.cast_unsigned()),
                warplink_argument_f64(2.5),
                warplink_argument_region(own, 8),
                warplink_argument_i32(-7),
            ];
            ok(launch(kernel, stream, 1, &arguments));
            ok(warplink_stream_synchronize(stream));
            let peer = 100 + 1 - rank as u64;
            assert_eq!(download::<5>(region)[1..], [peer; 4]);
            assert_eq!(download::<3>(own), [0, 41, 42]);
            ok(warplink_barrier(comm));
        });
    }
}

/// Puts past the end of the peer's region.
unsafe extern "C-unwind" fn put_too_far(_user: *mut c_void) -> i32 {
    warplink_block_put(0, at(60), at(0), 8).number()
}

/// Fails without a call that failed.
unsafe extern "C-unwind" fn give_77(user: *mut c_void) -> i32 {
    // SAFETY: the test gave this pointer.
    unsafe { &*user.cast::<AtomicU32>() }.fetch_add(1, Ordering::Relaxed);
    77
}

#[test]
fn what_a_host_kernel_returns_is_the_error_of_its_stream() {
    ranks(|comm, rank| {
        connect(comm, rank, Some(Transport::Direct));
        let channel = warplink_argument_channel(comm, 1 - rank, TAG);
        let kernel = host_kernel(comm, put_too_far, std::ptr::null_mut());
        let failing = stream(comm);
        ok(launch(kernel, failing, 1, &[channel]));
        fails(
            warplink_stream_synchronize(failing),
            ErrorKind::InvalidArgument.into(),
            "8 bytes from offset 60 pass the end of region 0 of the peer",
        );
        let runs = AtomicU32::new(0);
        let kernel = host_kernel(comm, give_77, (&raw const runs).cast_mut().cast());
        let failing = stream(comm);
        ok(launch(kernel, failing, 3, &[]));
        fails(
            warplink_stream_synchronize(failing),
            ErrorKind::InvalidArgument.into(),
            "the kernel returned 77",
        );
        assert_eq!(runs.load(Ordering::Relaxed), 3);
    });
}

#[test]
fn what_belongs_to_another_communicator_is_refused() {
    ranks(|outer, rank| {
        let (foreign, foreign_stream) = (alloc(outer, 64), stream(outer));
        ranks(|comm, inner_rank| {
            let invalid = |status| {
                fails(
                    status,
                    ErrorKind::InvalidArgument.into(),
                    "another communicator",
                )
            };
            let peer = 1 - inner_rank;
            // SAFETY: no network devices are named.
            invalid(unsafe { warplink_connect(comm, peer, TAG, foreign, 0, null()) });
            let own = connect(comm, inner_rank, Some(Transport::Direct));
            let (to, from) = (span(own, 0, 8), span(foreign, 0, 8));
            invalid(warplink_copy(to, from, foreign_stream));
            let own_stream = stream(comm);
            invalid(warplink_write(comm, peer, TAG, at(0), from, own_stream));
            invalid(warplink_write(comm, peer, TAG, at(0), to, foreign_stream));
            invalid(warplink_stream_wait(foreign_stream, comm, peer, TAG, 1));
            invalid(warplink_launched(comm, foreign_stream));
            // SAFETY: a place for a buffer.
            let status = unsafe { warplink_register_buffer(comm, foreign, &mut zeroed()) };
            invalid(status);
            let kernel = host_kernel(comm, put_too_far, std::ptr::null_mut());
            let region = warplink_argument_region(foreign, 0);
            invalid(launch(kernel, own_stream, 1, &[region]));
            invalid(launch(kernel, foreign_stream, 1, &[]));
        });
        assert!(rank < 2);
        ok(warplink_barrier(outer));
    });
}

#[test]
fn a_setup_that_fails_can_be_tried_again() {
    let leave = |comm| ok(warplink_destroy(comm));
    let gave_up = Barrier::new(2);
    ranks_until(
        1.0,
        |comm, rank| {
            let region = alloc(comm, 64);
            declare(comm, rank, region, None);
            if rank == 0 {
                let started = Stopwatch::start();
                fails(warplink_setup(comm), ErrorKind::Timeout.into(), "peer 1");
                assert_eq!(warplink_last_error_peer(), 1);
                assert!(started.elapsed() < Duration::from_secs(10));
            }
            // Rank 1 comes when rank 0 has given up.
            gave_up.wait();
            // Until the peers have met again, each has a second.
            while warplink_setup(comm) != Status::SUCCESS {
                fails(
                    ErrorKind::Timeout.into(),
                    ErrorKind::Timeout.into(),
                    "timed out",
                );
            }
            // SAFETY: a place for a channel.
            made(|channel| unsafe { warplink_channel_get(comm, 1 - rank, TAG, channel) });
        },
        leave,
    );
}

#[test]
fn transports_that_differ_are_an_error_on_both_ranks() {
    ranks(|comm, rank| {
        let transport = [Some(Transport::Direct), Some(Transport::Proxied)][rank as usize];
        declare(comm, rank, alloc(comm, 64), transport);
        fails(warplink_setup(comm), ErrorKind::Mismatch.into(), "");
        assert_eq!(warplink_last_error_peer(), 1 - rank);
    });
}

#[test]
fn an_abort_reaches_the_peer_with_its_reason() {
    let reason = CString::new("the grid is wrong").unwrap();
    let leave = |comm| assert_ne!(warplink_destroy(comm), Status::SUCCESS);
    ranks_until(
        30.0,
        |comm, rank| {
            if rank == 0 {
                // SAFETY: a text.
                ok(unsafe { warplink_abort(comm, reason.as_ptr()) });
                let mut word = 0_u64;
                assert_ne!(warplink_barrier(comm), Status::SUCCESS);
                // SAFETY: a place for no bytes.
                let gathered = unsafe { warplink_all_gather(comm, (&raw mut word).cast(), 0) };
                assert_ne!(gathered, Status::SUCCESS);
                let region = alloc(comm, 64);
                declare(comm, rank, region, None);
                assert_ne!(warplink_setup(comm), Status::SUCCESS);
                // SAFETY: a text.
                ok(unsafe { warplink_abort(comm, reason.as_ptr()) });
                return;
            }
            fails(
                warplink_barrier(comm),
                ErrorKind::PeerLost.into(),
                "the grid is wrong",
            );
            assert_eq!(warplink_last_error_peer(), 0);
        },
        leave,
    );
}

#[test]
fn setups_and_teardowns_leave_no_entries_behind() {
    // Entries are numbered in the low half of a handle.
    let entry = |region: Region| {
        // SAFETY: a handle is one number.
        let id: u64 = unsafe { std::mem::transmute(region) };
        id & 0xffff_ffff
    };
    let (rounds, each) = (20, 10);
    let highest = std::sync::atomic::AtomicU64::new(0);
    for _ in 0..rounds {
        ranks(|comm, rank| {
            connect(comm, rank, Some(Transport::Proxied));
            for _ in 0..each {
                highest.fetch_max(entry(alloc(comm, 64)), Ordering::Relaxed);
            }
        });
    }
    // Other tests of this process have entries as well, but not thousands.
    let highest = highest.load(Ordering::Relaxed);
    assert!(
        highest < rounds * each,
        "entry {highest} of {rounds} rounds"
    );
}

#[test]
fn made_up_handles_are_refused_by_every_function() {
    // SAFETY: handles are numbers, of which any is allowed; pointers are null, which is refused or not looked at.
    unsafe {
        for id in [
            0_u64,
            1,
            u64::MAX,
            0x0100_0000_0000_ffff,
            0x0200_0001_0000_ffff,
        ] {
            let comm: Comm = std::mem::transmute(id);
            let region: Region = std::mem::transmute(id);
            let stream: Stream = std::mem::transmute(id);
            let buffer: Buffer = std::mem::transmute(id);
            let module: Module = std::mem::transmute(id);
            let kernel: Kernel = std::mem::transmute(id);
            let mut place = 0_u64;
            let place: *mut u64 = &mut place;
            let own = span(region, 0, 0);
            let refused = [
                warplink_rank(comm, place.cast()),
                warplink_size(comm, place.cast()),
                warplink_all_gather(comm, place.cast(), 0),
                warplink_barrier(comm),
                warplink_destroy(comm),
                warplink_abort(comm, c"".as_ptr()),
                warplink_alloc(comm, 8, place.cast()),
                warplink_register(comm, place.cast(), 8, place.cast()),
                warplink_region_free(region),
                warplink_region_address(region, place.cast()),
                warplink_region_bytes(region, place.cast()),
                warplink_upload(own, place.cast()),
                warplink_download(place.cast(), own),
                warplink_copy(own, own, stream),
                warplink_stream_create(comm, place.cast()),
                warplink_stream_borrow(comm, place.cast(), place.cast()),
                warplink_stream_destroy(stream),
                warplink_stream_raw(stream, place.cast()),
                warplink_stream_synchronize(stream),
                warplink_stream_wait(stream, comm, 0, 0, 0),
                warplink_connect(comm, 0, 0, region, 0, null()),
                warplink_setup(comm),
                warplink_channel_get(comm, 0, 0, place.cast()),
                warplink_channel_get_all(comm, place.cast(), 0, place.cast()),
                warplink_launched(comm, stream),
                warplink_write(comm, 0, 0, at(0), own, stream),
                warplink_read(comm, 0, 0, own, at(0), stream),
                warplink_proxy_launch(comm),
                warplink_proxy_stop(comm),
                warplink_register_buffer(comm, region, place.cast()),
                warplink_buffer_number(buffer, 0, 0, place.cast()),
                warplink_registered_write(buffer, 0, own, stream),
                warplink_buffer_free(buffer),
                warplink_module_load(comm, null(), place.cast()),
                warplink_module_free(module),
                warplink_kernel_get(module, c"".as_ptr(), place.cast()),
                warplink_kernel_free(kernel),
                launch(kernel, stream, 1, &[]),
            ];
            for (number, status) in refused.into_iter().enumerate() {
                let expected = [ErrorKind::InvalidArgument, ErrorKind::Closed].map(Status::from);
                assert!(
                    expected.contains(&status),
                    "call {number}, {id:#x}: {status:?}"
                );
            }
        }
    }
}
