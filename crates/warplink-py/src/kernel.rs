//! User modules, their kernels, and launches.

use crate::array::Array;
use crate::block;
use crate::channel::{Connection, Connections};
use crate::errors::{detached, raise};
use crate::owner::{OfProcess, Owner};
use crate::place::Place;
use crate::stream::Stream;
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyFloat, PyInt};
use warplink::device::{self, Argument, Launch, ModuleSource};

/// Code loaded into the device, created by `Communicator.load_module`.
#[pyclass(frozen, module = "warplink")]
#[derive(Debug)]
pub(crate) struct Module {
    module: OfProcess<device::Module>,
    place: Place,
}

/// A kernel of a module, which it keeps loaded.
#[pyclass(frozen, module = "warplink")]
#[derive(Debug)]
pub(crate) struct Kernel {
    kernel: OfProcess<device::Kernel>,
    name: String,
    place: Place,
}

impl Module {
    /// Loads code into the device of `place`; see `Communicator.load_module` in Python.
    pub(crate) fn load(
        py: Python<'_>,
        place: &Place,
        mut source: ModuleSource,
        host: Option<&Bound<'_, PyDict>>,
    ) -> PyResult<Self> {
        for (name, body) in host.into_iter().flatten() {
            if !body.is_callable() {
                return Err(PyTypeError::new_err(format!(
                    "the host kernel {name} is not callable; expected a function of a block"
                )));
            }
            // The module may be dropped on a thread of the device, where a plain reference could not be released.
            let (body, place) = (Owner::new(body.unbind()), place.clone());
            let run = move |block: &device::Block<'_>| block::run(block, &body, &place);
            source = source.with_host_kernel(name.extract::<String>()?, run);
        }
        // SAFETY: the caller guarantees, as documented in Python, that kernels access only memory that their arguments
        // refer to; host kernels only have the calls of `block`.
        let module = detached(py, || unsafe { place.device.load_module(&source) })?;
        Ok(Self {
            module: OfProcess::new(module),
            place: place.clone(),
        })
    }
}

#[pymethods]
impl Module {
    /// The kernel `name`, ready to launch. Raises InvalidArgumentError if the module has none.
    fn kernel(&self, name: &str) -> PyResult<Kernel> {
        let kernel = self.module.get()?.kernel(name).map_err(raise)?;
        Ok(Kernel {
            kernel: OfProcess::new(kernel),
            name: name.to_owned(),
            place: self.place.clone(),
        })
    }
}

#[pymethods]
impl Kernel {
    /// Enqueues `blocks` blocks of `threads` threads on `stream`, with one of `arguments` for each parameter.
    /// Does not block.
    ///
    /// | argument | parameter in CUDA C++ |
    /// |---|---|
    /// | a region, memory, view or array | a pointer to the first byte |
    /// | a `Connection` | `warplink::Channel` |
    /// | `Connections` | `const warplink::Channel *` |
    /// | an `int`, a `float` | `unsigned long long`, `double` |
    /// | a number of `ctypes` or NumPy | of 32 or 64 bits, as it says |
    ///
    /// `shared_nbytes` is the dynamic shared memory of each block; with `together`, all blocks must be resident on the
    /// device at the same time, so that they may wait for one another. On the host device the Python function runs for
    /// each block, on separate threads.
    ///
    /// The caller keeps memory among the arguments allocated until the kernel is done. Read-only arrays are accepted,
    /// since the kernel may only read them. Raises InvalidArgumentError if the arguments do not match the parameters.
    /// If a peer of a channel is lost, the stream fails.
    #[pyo3(signature = (stream, arguments, *, blocks=1, threads=1, shared_nbytes=0, together=false))]
    #[expect(clippy::too_many_arguments, reason = "they are keywords in Python")]
    fn launch(
        &self,
        py: Python<'_>,
        stream: &Stream,
        arguments: Vec<Bound<'_, PyAny>>,
        blocks: u32,
        threads: u32,
        shared_nbytes: u32,
        together: bool,
    ) -> PyResult<()> {
        let arguments = arguments
            .iter()
            .map(|one| self.argument(one, stream))
            .collect::<PyResult<Vec<_>>>()?;
        let mut shape = Launch::new(blocks, threads).with_shared_bytes(shared_nbytes);
        if together {
            shape = shape.with_all_blocks_together();
        }
        let (kernel, stream) = (self.kernel.get()?, stream.live()?);
        detached(py, || kernel.launch(stream, &shape, &arguments))
    }

    fn __repr__(&self) -> String {
        format!("Kernel('{}')", self.name)
    }
}

impl Kernel {
    fn argument(&self, object: &Bound<'_, PyAny>, stream: &Stream) -> PyResult<Argument> {
        if let Ok(connection) = object.cast::<Connection>() {
            return connection.get().channel();
        }
        if let Ok(connections) = object.cast::<Connections>() {
            return connections.get().channels(object.py());
        }
        // Plain numbers have no width in Python: they are passed with 64 bits, and ctypes or NumPy select others. A
        // bool is an int as well.
        if object.is_instance_of::<PyInt>() {
            return Ok(Argument::U64(object.extract()?));
        }
        // Exact, since numpy.float64 derives from float; `number` handles it with NumPy's other scalars.
        if object.is_exact_instance_of::<PyFloat>() {
            return Ok(Argument::F64(object.extract()?));
        }
        // Before arrays: NumPy's scalars have an array interface too, of memory that lives as long as the scalar
        // only.
        if let Some(number) = number(object)? {
            return Ok(number);
        }
        let array = Array::resolve(object, &self.place, Some(stream.raw()))?;
        Ok(Argument::Slice(array.slice))
    }
}

/// A number of `ctypes` or NumPy; `None` for other objects.
fn number(object: &Bound<'_, PyAny>) -> PyResult<Option<Argument>> {
    let kind = object.get_type();
    let module = kind.module()?.to_string();
    let (name, value) = match module.as_str() {
        "ctypes" if object.hasattr("value")? => {
            (kind.name()?.to_string(), object.getattr("value")?)
        }
        // Arrays have `item` as well, but also a length.
        "numpy" if object.hasattr("item")? && !object.hasattr("__len__")? => {
            (kind.name()?.to_string(), object.call_method0("item")?)
        }
        _ => return Ok(None),
    };
    Ok(Some(match name.as_str() {
        "c_uint" | "uint32" => Argument::U32(value.extract()?),
        "c_int" | "int32" => Argument::I32(value.extract()?),
        "c_ulong" | "c_ulonglong" | "uint64" => Argument::U64(value.extract()?),
        // `long` has 64 bits on every platform of the library, all of them LP64.
        "c_long" | "c_longlong" | "int64" => Argument::I64(value.extract()?),
        "c_float" | "float32" => Argument::F32(value.extract()?),
        "c_double" | "float64" => Argument::F64(value.extract()?),
        _ => {
            return Err(PyTypeError::new_err(format!(
                "{module}.{name} cannot be a kernel argument; expected a number of 32 or 64 bits"
            )));
        }
    }))
}
