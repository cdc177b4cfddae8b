//! Kernels whose launches follow one another, readied so that each costs the host little.

use super::launch::{Argument, Launch};
use super::module::Kernel;
use super::slice::DeviceSlice;
use super::stream::Stream;
use crate::error::Result;
use crate::sync::lock;
use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Mutex};

/// The most kernels of one user that are readied: each takes 0.1 MiB of a GPU.
const MAX_READY: usize = 64;

/// When launches of a kernel are readied, while the device may wait for its work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Readying {
    /// Now.
    Always,
    /// Now if the kernel's code was loaded for it, which has waited already, and never if not: the work that would be
    /// waited for may itself wait for what this rank does next.
    WithCode,
    Never,
}

/// A kernel whose launches follow one another, readied so that each costs the host as little as the device can do. Two
/// streams may be given launches only in the order in which they run: a device may have each wait for the one before.
#[derive(Clone, Debug)]
pub(crate) struct SerialKernel {
    kernel: Kernel,
    ready: Option<Arc<dyn SerialBackend>>,
}

/// The arguments of a launch of a serial kernel.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SerialArguments<'a> {
    /// A structure, by value.
    pub(crate) words: &'a [u64],
    /// A pointer to the first byte.
    pub(crate) signals: &'a DeviceSlice,
    /// Memory whose addresses are among the words.
    pub(crate) memory: &'a [&'a DeviceSlice],
}

impl SerialArguments<'_> {
    /// All memory that the launch accesses.
    pub(crate) fn slices(&self) -> impl Iterator<Item = &DeviceSlice> {
        self.memory.iter().copied().chain([self.signals])
    }

    /// As arguments of any kernel.
    pub(crate) fn to_arguments(self) -> [Argument; 3] {
        [
            Argument::Words(self.words.into()),
            Argument::Slice(self.signals.clone()),
            Argument::Memory(self.memory.iter().copied().cloned().collect()),
        ]
    }
}

/// The kernels that one user has readied, by their code: what is launched with other words or another grid is the same.
#[derive(Debug, Default)]
pub(crate) struct SerialKernels(Mutex<HashMap<usize, Arc<dyn SerialBackend>>>);

impl SerialKernels {
    /// Readies `kernel`, the launches of which are like `launch`, if it is to be now. Others are launched as any kernel.
    pub(crate) fn ready(
        &self,
        kernel: Kernel,
        launch: &Launch,
        readying: Readying,
    ) -> Result<SerialKernel> {
        let ready = match kernel.0.identity() {
            Some(identity) => self.backend(identity, &kernel, launch, readying)?,
            None => None,
        };
        Ok(SerialKernel { kernel, ready })
    }

    /// A kernel of the code of `like`, which is launched in the same way.
    pub(crate) fn again(
        &self,
        like: &SerialKernel,
        launch: &Launch,
        readying: Readying,
    ) -> Result<SerialKernel> {
        let readying = match readying {
            // The code was loaded for another kernel, perhaps long ago.
            Readying::WithCode => Readying::Never,
            other => other,
        };
        self.ready(like.kernel.clone(), launch, readying)
    }

    fn backend(
        &self,
        identity: usize,
        kernel: &Kernel,
        launch: &Launch,
        readying: Readying,
    ) -> Result<Option<Arc<dyn SerialBackend>>> {
        let (known, count) = {
            let all = lock(&self.0);
            (all.get(&identity).cloned(), all.len())
        };
        let now = match readying {
            Readying::Always => true,
            Readying::WithCode => kernel.0.loaded_its_code(),
            Readying::Never => false,
        };
        if known.is_some() || !now || count >= MAX_READY {
            return Ok(known);
        }
        // Without the lock, which launches take that need not wait.
        let made = kernel.0.clone().serial(launch)?;
        // One that another thread has readied meanwhile counts.
        Ok(made.map(|made| lock(&self.0).entry(identity).or_insert(made).clone()))
    }
}

impl SerialKernel {
    /// Whether launches with other words may have the same kernel. On a device that takes closures, they hold what others
    /// find in the words.
    pub(crate) fn is_code(&self) -> bool {
        self.kernel.0.identity().is_some()
    }

    /// Enqueues a launch, after all that were given to any stream before. Does not block.
    ///
    /// # Errors
    /// As [`Kernel::launch`].
    pub(crate) fn launch(
        &self,
        stream: &Stream,
        launch: &Launch,
        arguments: &SerialArguments<'_>,
    ) -> Result<()> {
        match &self.ready {
            Some(ready) => ready.launch(stream, launch, arguments),
            None => self
                .kernel
                .launch(stream, launch, &arguments.to_arguments()),
        }
    }
}

/// A kernel whose launches were readied; see [`SerialKernel`].
pub(crate) trait SerialBackend: Send + Sync + fmt::Debug {
    /// See [`SerialKernel::launch`].
    fn launch(
        &self,
        stream: &Stream,
        launch: &Launch,
        arguments: &SerialArguments<'_>,
    ) -> Result<()>;
}
