//! Kernels with serialized launches, prepared so that each launch takes little host time.

use super::launch::{Argument, Launch};
use super::module::Kernel;
use super::slice::DeviceSlice;
use super::stream::Stream;
use crate::error::Result;
use crate::sync::lock;
use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Mutex};

/// Maximum prepared kernels of one user: each takes 0.1 MiB of GPU memory.
const MAX_READY: usize = 64;

/// When to prepare launches of a kernel, which may wait for the device's work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Readying {
    /// Now.
    Always,
    /// Now if the kernel's code was just loaded, which has waited already, and never otherwise: the pending
    /// work may itself wait for this rank's next action.
    WithCode,
    Never,
}

/// A kernel with serialized launches, prepared to minimize host time. Launches on different streams must be
/// enqueued in the order in which they run: a device may make each wait for the previous one.
#[derive(Clone, Debug)]
pub(crate) struct SerialKernel {
    kernel: Kernel,
    ready: Option<Arc<dyn SerialBackend>>,
}

/// Arguments of a launch of a serial kernel.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SerialArguments<'a> {
    /// A struct, passed by value.
    pub(crate) words: &'a [u64],
    /// Pointer to the first byte.
    pub(crate) signals: &'a DeviceSlice,
    /// Memory whose addresses are among the words.
    pub(crate) memory: &'a [&'a DeviceSlice],
}

impl SerialArguments<'_> {
    /// All memory that the launch accesses.
    pub(crate) fn slices(&self) -> impl Iterator<Item = &DeviceSlice> {
        self.memory.iter().copied().chain([self.signals])
    }

    /// As arguments of an ordinary kernel.
    pub(crate) fn to_arguments(self) -> [Argument; 3] {
        [
            Argument::Words(self.words.into()),
            Argument::Slice(self.signals.clone()),
            Argument::Memory(self.memory.iter().copied().cloned().collect()),
        ]
    }
}

/// One user's prepared kernels, keyed by code: launches that differ only in words or grid share an entry.
#[derive(Debug, Default)]
pub(crate) struct SerialKernels(Mutex<HashMap<usize, Arc<dyn SerialBackend>>>);

impl SerialKernels {
    /// Prepares `kernel` for launches like `launch`, if permitted now. Otherwise it is launched as an
    /// ordinary kernel.
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

    /// A kernel with the same code as `like`, launched in the same way.
    pub(crate) fn again(
        &self,
        like: &SerialKernel,
        launch: &Launch,
        readying: Readying,
    ) -> Result<SerialKernel> {
        let readying = match readying {
            // The code was loaded earlier for another kernel.
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
        // Beyond the limit kernels are launched in the ordinary way, which only takes more host time.
        if known.is_some() || !now || count >= MAX_READY {
            return Ok(known);
        }
        // Unlocked: launches, which take the lock, must not wait for the device.
        let made = kernel.0.clone().serial(launch)?;
        // If another thread was faster, use its result.
        Ok(made.map(|made| lock(&self.0).entry(identity).or_insert(made).clone()))
    }
}

impl SerialKernel {
    /// Whether launches with other words may share the kernel. Closures of the host device capture what GPU
    /// kernels find in the words.
    pub(crate) fn is_code(&self) -> bool {
        self.kernel.0.identity().is_some()
    }

    /// Enqueues a launch, after all launches enqueued on any stream before. Does not block.
    ///
    /// # Errors
    /// As [`Kernel::launch`].
    pub(crate) fn launch(
        &self,
        (stream, is_recorded): (&Stream, bool),
        launch: &Launch,
        arguments: &SerialArguments<'_>,
    ) -> Result<()> {
        match &self.ready {
            Some(ready) => ready.launch((stream, is_recorded), launch, arguments),
            None => self
                .kernel
                .launch(stream, launch, &arguments.to_arguments()),
        }
    }
}

/// A kernel with prepared launches; see [`SerialKernel`].
pub(crate) trait SerialBackend: Send + Sync + fmt::Debug {
    /// See [`SerialKernel::launch`].
    fn launch(
        &self,
        stream: (&Stream, bool),
        launch: &Launch,
        arguments: &SerialArguments<'_>,
    ) -> Result<()>;
}
