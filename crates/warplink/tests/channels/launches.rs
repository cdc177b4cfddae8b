//! Modules, kernels and launches: what is wrong is an error.

use super::common::{assert_error, assert_says, kind, open_device, processes, threads, world};
use super::kernels::{Fixture, Kernels, Outcome, TRANSPORTS};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;
use warplink::channel::Transport;
use warplink::device::{Argument, Launch, ModuleSource, cuda};
use warplink::{Deadline, DeviceKind, ErrorKind};

#[test]
fn wrong_launches_are_errors() {
    let device = open_device();
    let kernels = Kernels::load(&device);
    let stream = device.create_stream(Default::default()).unwrap();
    let kernel = kernels.get("wait_once");
    let outcome = Outcome::new(&device);
    let error = kernel
        .launch(&stream, &Launch::new(0, 32), &[])
        .unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidArgument);

    // The closures learn of a wrong argument when they ask for it, a GPU's launch checks all.
    let wrong = [Argument::U32(1), outcome.argument()];
    for arguments in [&[][..], &wrong] {
        let error = kernel
            .launch(&stream, &Launch::new(1, 32), arguments)
            .and_then(|()| stream.synchronize(Deadline::after(Duration::from_secs(5))))
            .unwrap_err();
        let says = ["wait_once", "argument"];
        assert_error(&error, ErrorKind::InvalidArgument, &says);
        if kind() == DeviceKind::Host {
            break;
        }
    }

    // SAFETY: this source has no code.
    let loaded = unsafe { device.load_module(&ModuleSource::new("empty")) };
    let error = loaded.unwrap_err();
    let says = ["empty", "ModuleSource::with"];
    assert_error(&error, ErrorKind::Unsupported, &says);
}

/// Machine code that somebody else has compiled, with the calls of a channel in it; and what is none for this GPU.
#[test]
fn machine_code_is_loaded_and_launched() {
    if kind() == DeviceKind::Host {
        return;
    }
    const TEXT: &str = r#"
        #include <warplink/device.cuh>
        extern "C" __global__ void exchange(warplink::Channel channel, warplink::u32 *result) {
            const warplink::Status signalled = channel.signal(warplink::Block());
            const warplink::Status waited = channel.wait(warplink::Block());
            if (threadIdx.x == 0) result[0] = 5 + (warplink::u32)signalled + (warplink::u32)waited;
        }"#;
    processes(world(2), |comm| {
        let architecture = cuda::capabilities(0).unwrap().architecture();
        let code = cuda::compile("exchange.cu", TEXT, &architecture, &[]).unwrap();
        let load = |image: &[u8]| {
            let source = ModuleSource::new("exchange.cubin").with_cubin(image);
            // SAFETY: the kernel writes one word of its outcome. What cannot be loaded does nothing.
            unsafe { comm.device().load_module(&source) }
        };
        let kernel = load(&code).unwrap().kernel("exchange").unwrap();
        let fixture = Fixture::new(comm);
        let connection = fixture.pair(Transport::Direct, 64);
        let arguments = [connection.channel(), fixture.outcome.argument()];
        kernel
            .launch(&fixture.stream, &Launch::new(1, 64), &arguments)
            .unwrap();
        comm.synchronize(&fixture.stream).unwrap();
        assert_eq!(fixture.outcome.read(), [5, 0]);

        let other = if architecture == "sm_80" {
            "sm_90"
        } else {
            "sm_80"
        };
        let foreign = cuda::compile("exchange.cu", TEXT, other, &[]).unwrap();
        for image in [&foreign[..], b"no machine code", b""] {
            let error = load(image).unwrap_err();
            assert_says(&error, &["exchange.cubin"]);
        }
        comm.barrier().unwrap();
    });
}

#[test]
fn an_unknown_kernel_is_an_error() {
    let device = open_device();
    let source = ModuleSource::new("one.cu")
        .with_cuda("extern \"C\" __global__ void one() {}")
        .with_host_kernel("one", |_| Ok(()));
    // SAFETY: the kernel does nothing.
    let module = unsafe { device.load_module(&source) }.unwrap();
    module.kernel("one").unwrap();
    for name in ["two", "with\0zero"] {
        let error = module.kernel(name).unwrap_err();
        let says = ["unknown kernel", "one.cu"];
        assert_error(&error, ErrorKind::InvalidArgument, &says);
    }
}

#[test]
fn a_block_runs_for_each_of_the_grid() {
    let device = open_device();
    let stream = device.create_stream(Default::default()).unwrap();
    let outcome = Outcome::new(&device);
    let run = Arc::new(AtomicU32::new(0));
    let counted = run.clone();
    let source = ModuleSource::new("count.cu")
        .with_cuda(
            "extern \"C\" __global__ void count(unsigned *sum, unsigned step) { atomicAdd(sum, STEP * step); }",
        )
        .with_option("-DSTEP=2")
        .with_host_kernel("count", move |block| {
            let step = 2 * block.u32(1)?;
            let before = counted.fetch_add(step, Ordering::SeqCst);
            // The last block to count stores the sum.
            if before + step == block.blocks() * step {
                let sum = block.blocks() * step;
                block.write(&block.slice(0)?.slice(0..4)?, &sum.to_ne_bytes())?;
            }
            Ok(())
        });
    // SAFETY: the kernel adds to the first word of its first argument.
    let module = unsafe { device.load_module(&source) }.unwrap();
    let launch = Launch::new(7, 1)
        .with_shared_bytes(64)
        .with_all_blocks_together();
    let arguments = [outcome.argument(), Argument::from(3_u32)];
    module
        .kernel("count")
        .unwrap()
        .launch(&stream, &launch, &arguments)
        .unwrap();
    stream
        .synchronize(Deadline::after(Duration::from_secs(10)))
        .unwrap();
    assert_eq!(outcome.read(), [42, 0]);
}

#[test]
fn a_kernel_that_panics_fails_its_stream() {
    if kind() == DeviceKind::Cuda {
        return;
    }
    let device = open_device();
    let stream = device.create_stream(Default::default()).unwrap();
    let source = ModuleSource::new("panics").with_host_kernel("panics", |block| {
        assert!(block.index() != 1, "on purpose");
        Ok(())
    });
    // SAFETY: it has no code for a GPU.
    let module = unsafe { device.load_module(&source) }.unwrap();
    module
        .kernel("panics")
        .unwrap()
        .launch(&stream, &Launch::new(2, 1), &[])
        .unwrap();
    let error = stream
        .synchronize(Deadline::after(Duration::from_secs(5)))
        .unwrap_err();
    assert_says(&error, &["panicked", "panics"]);
}

#[test]
fn ranges_outside_of_a_region_are_refused() {
    threads(world(2), |comm| {
        let fixture = Fixture::new(comm);
        for transport in TRANSPORTS {
            let connection = fixture.pair(transport, 4096);
            let arguments = [connection.channel(), Argument::U64(4096)];
            fixture.run("out_of_range", 1, &arguments);
        }
    });
}
