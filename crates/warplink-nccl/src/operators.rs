//! Reduction operators: NCCL's, and user-defined ones, which multiply a rank's input by a factor before it is summed.
//!
//! Factors may differ between ranks and may be known only on the device. A kernel therefore multiplies the input first,
//! and the result is summed as usual.

use crate::abi::{Handle, check, store};
use crate::communicator::{Comm, Joined, RealHandle, Served, find, lock};
use crate::group;
use crate::status::{Failure, Outcome};
use crate::table::real;
use std::ffi::{c_int, c_void};
use std::sync::OnceLock;
use warplink::device::cuda::NCCL_OPERATORS;
use warplink::device::{
    Argument, Block, DeviceSlice, Launch, Module, ModuleSource, ReduceOp, Stream,
};
use warplink::memory::Region;
use warplink::{DType, Result};

/// `ncclScalarDevice`.
const ON_DEVICE: c_int = 0;

/// `ncclScalarHostImmediate`.
const IMMEDIATE: c_int = 1;

/// Threads of a block, and the most blocks of a launch.
const THREADS: u32 = 256;
const MAX_BLOCKS: usize = 512;

/// User-defined operators of a communicator.
#[derive(Debug, Default)]
pub(crate) struct Operators(Vec<Option<Made>>);

#[derive(Clone, Copy, Debug)]
struct Made {
    dtype: DType,
    scalar: Scalar,
    /// The real library's operator, if that library executes the calls.
    real: Option<c_int>,
}

/// Factor of a user-defined operator.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Scalar {
    /// The bits of the factor.
    Immediate(u64),
    /// The value stored at this address when the stream reaches the call.
    OnDevice(u64),
}

/// Operator of a call, with its factor.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Operator {
    number: c_int,
    reduction: ReduceOp,
    scalar: Option<Scalar>,
}

/// An input that was multiplied.
pub(crate) struct Multiplied {
    pub(crate) memory: DeviceSlice,
    /// Memory of the result, unless it is the caller's.
    pub(crate) region: Option<Region>,
}

impl Operator {
    /// Looks up an operator by number, for elements of a type.
    pub(crate) fn find(comm: &Comm, number: c_int, dtype: DType) -> Outcome<Self> {
        let unknown = || {
            Failure::argument(
                format!("unknown operator {number}; expected an ncclRedOp_t"),
                "use a value of ncclRedOp_t, or an operator created by ncclRedOpCreatePreMulSum of this communicator",
            )
        };
        let at = usize::try_from(number).map_err(|_| unknown())?;
        if let Some(reduction) = NCCL_OPERATORS.get(at) {
            return Ok(Self {
                number,
                reduction: *reduction,
                scalar: None,
            });
        }
        let operators = lock(&comm.operators);
        let made = operators
            .0
            .get(at - NCCL_OPERATORS.len())
            .copied()
            .flatten();
        let made = made.ok_or_else(unknown)?;
        if made.dtype != dtype {
            return Err(Failure::argument(
                format!("an operator for {}; expected one for {dtype}", made.dtype),
                "create an operator for each type",
            ));
        }
        Ok(Self {
            number: made.real.unwrap_or(number),
            reduction: ReduceOp::Sum,
            scalar: Some(made.scalar),
        })
    }

    /// The operator's number in the real library.
    pub(crate) fn number(self) -> c_int {
        self.number
    }

    pub(crate) fn reduction(self) -> ReduceOp {
        self.reduction
    }

    pub(crate) fn scalar(self) -> Option<Scalar> {
        self.scalar
    }
}

/// # Safety
/// `op` must be valid for a write, and `scalar` point to an element of the type, as NCCL's documentation
/// requires.
pub(crate) unsafe fn create(
    op: *mut c_int,
    scalar: *mut c_void,
    datatype: c_int,
    residence: c_int,
    comm: Handle,
) -> Outcome {
    check(op, "op")?;
    check(scalar, "scalar")?;
    let comm = find(comm)?;
    let joined = comm.usable()?;
    let dtype = crate::abi::element_type(datatype)?;
    let held = match residence {
        ON_DEVICE => Scalar::OnDevice(scalar as u64),
        // Read now: the caller may change its variable as soon as this returns.
        IMMEDIATE => {
            let mut bits = [0; 8];
            // SAFETY: the caller passes as many bytes as an element has, at most eight.
            unsafe {
                bits.as_mut_ptr()
                    .copy_from_nonoverlapping(scalar.cast(), dtype.size());
            }
            Scalar::Immediate(u64::from_le_bytes(bits))
        }
        other => {
            return Err(Failure::argument(
                format!("unknown residence {other}; expected an ncclScalarResidence_t"),
                "use a value of ncclScalarResidence_t",
            ));
        }
    };
    let real = match joined.served() {
        Some(_) => None,
        None => {
            let RealHandle(real) = joined.real()?;
            let mut number = 0;
            // SAFETY: the arguments are the caller's, with the real library's communicator in place of ours.
            let code = unsafe {
                real::RedOpCreatePreMulSum(&mut number, scalar, datatype, residence, real)
            }?;
            Failure::check_real(code, "ncclRedOpCreatePreMulSum")?;
            Some(number)
        }
    };
    let made = Some(Made {
        dtype,
        scalar: held,
        real,
    });
    let mut operators = lock(&comm.operators);
    // Numbers are reused, as in NCCL, so that programs that create an operator per call do not grow the list.
    let at = operators.0.iter().position(Option::is_none);
    let at = at.unwrap_or(operators.0.len());
    match operators.0.get_mut(at) {
        Some(free) => *free = made,
        None => operators.0.push(made),
    }
    // SAFETY: the caller passes null or a pointer valid for a write.
    unsafe { store(op, "op", (NCCL_OPERATORS.len() + at) as c_int) }
}

/// # Safety
/// No requirements; all functions of the table have the same signature.
pub(crate) unsafe fn destroy(op: c_int, comm: Handle) -> Outcome {
    let comm = find(comm)?;
    let at = usize::try_from(op).ok();
    let at = at.and_then(|at| at.checked_sub(NCCL_OPERATORS.len()));
    let mut operators = lock(&comm.operators);
    let made = at.and_then(|at| operators.0.get_mut(at)?.take());
    let made = made.ok_or_else(|| {
        Failure::argument(
            format!("{op} is not a user-defined operator of this communicator"),
            "destroy an operator created by ncclRedOpCreatePreMulSum of this communicator once",
        )
    })?;
    drop(operators);
    let (Some(number), Ok(joined)) = (made.real, comm.joined()) else {
        return Ok(());
    };
    // The calls of the group, which are made at its end, name the operator by its number.
    group::after_calls(move || {
        // SAFETY: the operator is the real library's, of this communicator.
        joined.by_real("ncclRedOpDestroy", |comm| unsafe {
            real::RedOpDestroy(number, comm)
        })
    })
}

impl Scalar {
    /// Multiplies `input`, into `target` if it is as long, else into newly allocated memory.
    pub(crate) fn multiply(
        self,
        (joined, served): (&Joined, &Served),
        dtype: DType,
        input: &DeviceSlice,
        target: Option<&DeviceSlice>,
        stream: &Stream,
    ) -> Outcome<Multiplied> {
        // The output is overwritten by the collective anyway, so it can hold the product until then.
        let whole = target.filter(|target| target.bytes() == input.bytes());
        let (memory, region) = match whole {
            Some(target) => (target.clone(), None),
            None => {
                let region = joined.communicator.alloc(input.bytes())?;
                (region.memory().clone(), Some(region))
            }
        };
        let module = served.module(joined)?;
        let kernel = module.kernel(&format!("multiply_{dtype}"))?;
        let count = input.bytes() / dtype.size();
        // At least one, since CUDA rejects an empty grid; with the maximum, threads loop over further elements.
        let blocks = count.div_ceil(THREADS as usize).clamp(1, MAX_BLOCKS);
        let (at, bits) = match self {
            Self::Immediate(bits) => (0, bits),
            Self::OnDevice(address) => (address, 0),
        };
        let arguments = [
            Argument::Slice(memory.clone()),
            Argument::Slice(input.clone()),
            Argument::U64(count as u64),
            Argument::U64(at),
            Argument::U64(bits),
        ];
        // On the host device one thread does all of it.
        let blocks = if joined.is_on_gpu() { blocks } else { 1 };
        let launch = Launch::new(blocks as u32, THREADS);
        kernel.launch(stream, &launch, &arguments)?;
        Ok(Multiplied { memory, region })
    }
}

impl Served {
    /// Loads the kernels, which may wait for running ones.
    pub(crate) fn load_multiplying(&self, joined: &Joined) -> Outcome {
        Ok(self.module(joined).map(drop)?)
    }

    /// The kernels, loaded on first use.
    fn module(&self, joined: &Joined) -> Result<&Module> {
        if let Some(module) = self.multiplying.get() {
            return Ok(module);
        }
        // SAFETY: the kernels access as many elements of source and target as the launch specifies, and one at the
        // factor.
        let module = unsafe { joined.device().load_module(&source()) }?;
        // Two threads may load it at the same time; the module of the second one is dropped.
        Ok(self.multiplying.get_or_init(|| module))
    }
}

fn source() -> ModuleSource {
    let source = ModuleSource::new("multiply").with_cuda(KERNELS);
    DType::ALL.into_iter().fold(source, |source, dtype| {
        source.with_host_kernel(format!("multiply_{dtype}"), move |block| {
            multiply(dtype, block)
        })
    })
}

/// CUDA C++ of the kernels.
const KERNELS: &str = include_str!("../kernels/multiply.cu");

/// The kernel's body on the host device.
fn multiply(dtype: DType, block: &Block<'_>) -> Result<()> {
    let (target, source) = (block.slice(0)?, block.slice(1)?);
    let (at, bits) = (block.u64(3)?, block.u64(4)?);
    let mut factor = bits.to_le_bytes();
    if at != 0 {
        // SAFETY: the caller keeps the element at this address valid until the stream has passed the call.
        unsafe {
            factor
                .as_mut_ptr()
                .copy_from_nonoverlapping(at as *const u8, dtype.size());
        }
    }
    let mut bytes = vec![0; source.bytes()];
    block.read(source, &mut bytes)?;
    for element in bytes.chunks_exact_mut(dtype.size()) {
        multiply_element(dtype, element, &factor);
    }
    block.write(target, &bytes)
}

/// Multiplies an element in place by the factor in the low bytes: floats are rounded once, integers wrap.
fn multiply_element(dtype: DType, element: &mut [u8], factor: &[u8; 8]) {
    if dtype.is_float() {
        let value = |bytes: &[u8]| dtype.decode(bytes).next().unwrap_or_default();
        let product = value(element) * value(&factor[..element.len()]);
        element.copy_from_slice(&dtype.encode([product]));
        return;
    }
    // The low bytes of a product are the same for signed and unsigned integers.
    let mut wide = [0; 8];
    wide[..element.len()].copy_from_slice(element);
    let product = u64::from_le_bytes(wide).wrapping_mul(u64::from_le_bytes(*factor));
    element.copy_from_slice(&product.to_le_bytes()[..element.len()]);
}

/// The kernels, once loaded.
pub(crate) type Multiplying = OnceLock<Module>;

#[cfg(test)]
mod tests {
    use super::*;
    use half::{bf16, f16};
    use warplink::dtype::F8E4M3;

    #[test]
    fn products_are_rounded_once_and_wrap_around() {
        let product = |dtype: DType, element: &[u8], factor: &[u8]| {
            let mut padded = [0; 8];
            padded[..factor.len()].copy_from_slice(factor);
            let mut element = element.to_vec();
            multiply_element(dtype, &mut element, &padded);
            element
        };
        let half = |value: f32| f16::from_f32(value).to_bits().to_le_bytes();
        assert_eq!(product(DType::F16, &half(3.0), &half(0.5)), half(1.5));
        let brain = |value: f32| bf16::from_f32(value).to_bits().to_le_bytes();
        assert_eq!(product(DType::BF16, &brain(-3.0), &brain(2.0)), brain(-6.0));
        let small = |value: f32| [F8E4M3::from_f32(value).0];
        assert_eq!(product(DType::F8E4M3, &small(1.5), &small(2.0)), small(3.0));
        assert_eq!(product(DType::I8, &[100], &[3]), [44]);
        let big = 3_000_000_000_u32.to_le_bytes();
        let twice = 3_000_000_000_u32.wrapping_mul(2).to_le_bytes();
        assert_eq!(product(DType::U32, &big, &2_u32.to_le_bytes()), twice);
        for dtype in DType::ALL {
            let [two, three] = [2.0, 3.0].map(|value| dtype.encode([value]));
            assert_eq!(product(dtype, &two, &three), dtype.encode([6.0]), "{dtype}");
        }
    }
}
