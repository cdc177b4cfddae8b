//! A kernel with mistakes, which `scripts/device-sanitizer.sh` runs to see that the sanitizer watches ranks.

use super::common::{Ranks, kind, world};
use warplink::DeviceKind;
use warplink::device::{AllocationKind, Argument, Launch, ModuleSource, Priority};

/// One warp reads what another one stores without waiting for it, and the first thread stores where no memory is if
/// it is told to.
const CUDA: &str = r#"
extern "C" __global__ void mistakes(unsigned *memory, unsigned beyond) {
    __shared__ unsigned shared[64];
    shared[threadIdx.x] = threadIdx.x;
    memory[threadIdx.x] = shared[63 - threadIdx.x];
    if (beyond != 0 && threadIdx.x == 0) memory[beyond] = 1;
}
"#;

#[test]
#[ignore = "its kernel has mistakes; scripts/device-sanitizer.sh looks whether they are found"]
fn mistakes_that_the_sanitizer_finds() {
    if kind() == DeviceKind::Host {
        return;
    }
    // Where no tool keeps it from happening, the store ends the context.
    let beyond = match std::env::var("WARPLINK_TEST_MISTAKE").as_deref() {
        Ok("memcheck") => 1 << 30,
        _ => 0,
    };
    let ranks = Ranks::of(world(2));
    ranks.start(|comm| {
        let device = comm.device();
        let memory = device.allocate(4096, AllocationKind::Plain).unwrap();
        let stream = comm.create_stream(Priority::Normal).unwrap();
        let source = ModuleSource::new("mistakes.cu").with_cuda(CUDA);
        // SAFETY: nothing else is in this process that a wrong store could harm.
        let module = unsafe { device.load_module(&source) }.unwrap();
        let kernel = module.kernel("mistakes").unwrap();
        let arguments = [Argument::Slice(memory), Argument::U32(beyond)];
        kernel
            .launch(&stream, &Launch::new(1, 64), &arguments)
            .unwrap();
        // What becomes of it is for the sanitizer to tell.
        let _ = comm.synchronize(&stream);
        let _ = comm.close();
    });
}
