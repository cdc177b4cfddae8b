//! The kernels of element-wise operations.

use crate::device::cuda::gpu::Gpu;
use crate::device::cuda::kernels::module::{Function, Module};
use crate::device::cuda::kernels::nvrtc;
use crate::device::cuda::memory::CudaBacking;
use crate::device::cuda::stream::CudaStream;
use crate::device::{
    Elementwise, ElementwiseOp, Launch, MAX_ELEMENTWISE_AXES, MAX_ELEMENTWISE_SOURCES, Operand,
    Stream,
};
use crate::dtype::DType;
use crate::error::{Error, Result};
use std::ffi::{CString, c_uint, c_void};

/// Threads of a block; bounded by the kernels' launch bounds.
const BLOCK: u32 = 512;

/// Blocks for each multiprocessor: enough to saturate its memory bandwidth.
const BLOCKS_PER_MULTIPROCESSOR: u32 = 4;

/// Bytes of one vector load.
const VECTOR: usize = 16;

/// Strided elements in flight for each thread.
const ITEMS: usize = 2;

/// Functions with kernels for contiguous operands, one for each type that is computed.
const COMBINING: [ElementwiseOp; 4] = [
    ElementwiseOp::Sum,
    ElementwiseOp::Product,
    ElementwiseOp::Max,
    ElementwiseOp::Min,
];

/// Layout must match the kernels.
#[repr(C)]
struct Sources {
    at: [u64; MAX_ELEMENTWISE_SOURCES],
}

/// Layout must match the kernels.
#[repr(C)]
struct Operands {
    extents: [u64; MAX_ELEMENTWISE_AXES],
    target_strides: [u64; MAX_ELEMENTWISE_AXES],
    at: [u64; MAX_ELEMENTWISE_SOURCES],
    strides: [[u64; MAX_ELEMENTWISE_AXES]; MAX_ELEMENTWISE_SOURCES],
}

/// The kernels of element-wise operations.
#[derive(Debug)]
pub(crate) struct ElementwiseKernels {
    combining: Vec<(ElementwiseOp, DType, Function)>,
    /// For strided operands and casts, by accumulator type: `f32`, `f64` and `i32`.
    strided: [Function; 3],
    copy: Function,
    max_blocks: u32,
}

impl ElementwiseKernels {
    pub(crate) fn load(gpu: &Gpu) -> Result<Self> {
        let (context, reaper) = (&gpu.context, &gpu.reaper);
        let module = Module::load(context, reaper, &gpu.capabilities, &nvrtc::ELEMENTWISE)?;
        let types = DType::computed_elementwise();
        let each = |op| types.iter().map(move |dtype| (op, *dtype));
        let combining = COMBINING.into_iter().flat_map(each).map(|(op, dtype)| {
            let name = CString::new(format!("warplink_{op}_{dtype}"));
            let name = name.map_err(|error| Error::internal(error.to_string()))?;
            Ok((op, dtype, module.function(&name)?))
        });
        Ok(Self {
            combining: combining.collect::<Result<_>>()?,
            strided: [
                module.function(c"warplink_strided_f32")?,
                module.function(c"warplink_strided_f64")?,
                module.function(c"warplink_strided_i32")?,
            ],
            copy: module.function(c"warplink_strided_copy")?,
            max_blocks: gpu.capabilities.multiprocessors.max(1) * BLOCKS_PER_MULTIPROCESSOR,
        })
    }

    /// Enqueues an operation.
    pub(crate) fn enqueue(&self, gpu: &Gpu, stream: &Stream, request: &Elementwise) -> Result<()> {
        request.check()?;
        let op = request.op;
        for (operand, dtype) in operands(request) {
            CudaBacking::of(&operand.slice)?;
            if !operand.slice.address().is_multiple_of(dtype.size() as u64) {
                return Err(Error::invalid(format!(
                    "{:?} is not aligned to {} bytes; expected whole elements of {dtype}",
                    operand.slice,
                    dtype.size()
                ))
                .with_operation(op.name()));
            }
        }
        let stream = CudaStream::of(stream, gpu)?;
        let (_, _entered) = stream.enter()?;
        if request.elements() == 0 {
            return Ok(());
        }
        let slices = operands(request).map(|(operand, _)| &operand.slice);
        let _enqueuing = stream.enqueue(slices);
        let combining = self
            .combining
            .iter()
            .find(|(of, dtype, _)| (*of, *dtype) == (op, request.dtype));
        match combining {
            Some((_, _, function)) if request.is_contiguous() => {
                self.combine(stream, function, request)
            }
            _ => self.with_strides(stream, request),
        }
    }

    fn combine(
        &self,
        stream: &CudaStream,
        function: &Function,
        request: &Elementwise,
    ) -> Result<()> {
        let mut sources = Sources {
            at: [0; MAX_ELEMENTWISE_SOURCES],
        };
        for (at, source) in sources.at.iter_mut().zip(&request.sources) {
            *at = source.slice.address();
        }
        let vectors = operands(request)
            .all(|(operand, _)| operand.slice.address().is_multiple_of(VECTOR as u64));
        let elements = if vectors {
            VECTOR / request.dtype.size()
        } else {
            1
        };
        let launch = Launch::new(self.blocks(request, elements), BLOCK);
        let mut number = request.sources.len() as c_uint;
        let (mut target, mut count, mut vectors) = (
            request.target.slice.address(),
            request.elements() as u64,
            c_uint::from(vectors),
        );
        let mut parameters: [*mut c_void; 5] = [
            (&raw mut sources).cast(),
            (&raw mut number).cast(),
            (&raw mut target).cast(),
            (&raw mut count).cast(),
            (&raw mut vectors).cast(),
        ];
        // SAFETY: the parameters are the kernel's, in order. All slices are live device memory of `count` elements,
        // aligned to an element and, if `vectors` is set, to a vector.
        unsafe { function.launch(stream.raw_stream(), &launch, &mut parameters) }
    }

    fn with_strides(&self, stream: &CudaStream, request: &Elementwise) -> Result<()> {
        let types = [request.dtype, request.source_dtype];
        let function = match request.op {
            ElementwiseOp::Copy => &self.copy,
            ElementwiseOp::Cast if types.iter().any(|t| matches!(t, DType::F64 | DType::I32)) => {
                &self.strided[1]
            }
            _ => match request.dtype {
                DType::F64 => &self.strided[1],
                DType::I32 => &self.strided[2],
                _ => &self.strided[0],
            },
        };
        let steps = |operand: &Operand| {
            let mut all = [0; MAX_ELEMENTWISE_AXES];
            for (step, stride) in all.iter_mut().zip(&operand.strides) {
                *step = *stride as u64;
            }
            all
        };
        let mut operands = Operands {
            extents: [1; MAX_ELEMENTWISE_AXES],
            target_strides: steps(&request.target),
            at: [0; MAX_ELEMENTWISE_SOURCES],
            strides: [[0; MAX_ELEMENTWISE_AXES]; MAX_ELEMENTWISE_SOURCES],
        };
        for (extent, of) in operands.extents.iter_mut().zip(&request.shape) {
            *extent = *of as u64;
        }
        for (index, source) in request.sources.iter().enumerate() {
            operands.at[index] = source.slice.address();
            operands.strides[index] = steps(source);
        }
        let launch = Launch::new(self.blocks(request, ITEMS), BLOCK);
        let (mut axes, mut number) = (
            request.shape.len() as c_uint,
            request.sources.len() as c_uint,
        );
        let mut op = op_code(request.op);
        let (mut from, mut to) = (type_code(request.source_dtype), type_code(request.dtype));
        let (mut target, mut count) = (request.target.slice.address(), request.elements() as u64);
        let mut parameters: [*mut c_void; 8] = [
            (&raw mut operands).cast(),
            (&raw mut axes).cast(),
            (&raw mut op).cast(),
            (&raw mut number).cast(),
            (&raw mut from).cast(),
            (&raw mut to).cast(),
            (&raw mut target).cast(),
            (&raw mut count).cast(),
        ];
        // SAFETY: the parameters are the kernel's, in order. All slices are live device memory that
        // goes from the first to the last of the elements that the strides lead to, aligned to one.
        unsafe { function.launch(stream.raw_stream(), &launch, &mut parameters) }
    }

    /// Number of blocks, for `elements` elements per thread and iteration.
    fn blocks(&self, request: &Elementwise, elements: usize) -> u32 {
        let per_block = (BLOCK as usize * elements) as u64;
        let blocks = (request.elements() as u64).div_ceil(per_block);
        blocks.clamp(1, self.max_blocks.into()) as u32
    }
}

/// All operands with their types.
fn operands(request: &Elementwise) -> impl Iterator<Item = (&Operand, DType)> {
    let sources = request.sources.iter();
    let sources = sources.map(|source| (source, request.source_dtype));
    std::iter::once((&request.target, request.dtype)).chain(sources)
}

/// Type code; must match the kernels.
fn type_code(dtype: DType) -> c_uint {
    match dtype {
        DType::F16 => 0,
        DType::BF16 => 1,
        DType::F32 => 2,
        // Other types are only copied, as integers of the same size.
        DType::F64 => 3,
        _ => match dtype.size() {
            1 => 5,
            2 => 0,
            4 => 4,
            _ => 3,
        },
    }
}

/// Operator code; must match the kernels. Unary operators have no combining step.
fn op_code(op: ElementwiseOp) -> c_uint {
    match op {
        ElementwiseOp::Sum | ElementwiseOp::Cast | ElementwiseOp::Copy => 0,
        ElementwiseOp::Product => 1,
        ElementwiseOp::Max => 2,
        ElementwiseOp::Min => 3,
    }
}
