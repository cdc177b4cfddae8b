//! A section of one rank, with the names around it resolved.

use super::compile;
use super::function::RowFunction;
use super::ir::{Packing, Section};
use super::lane::Part;
use super::layout::{ScratchId, ScratchInstance};
use super::names::FreeNames;
use crate::device::{Factor, ReduceOp};
use crate::dtype::DType;
use crate::error::{Rank, Result};
use crate::program::site::Site;
use crate::program::tensor::TensorId;
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

/// A section as one rank launches it. What differs from lane to lane, and from launch to launch, is in
/// [`section`](Self::section); its expressions are over `rank`, `world`, [`integers`](Self::integers), the
/// lane, `epoch`, and what the body binds.
#[derive(Clone, Debug)]
pub struct SectionInstance {
    /// What its lanes do.
    pub section: Arc<Section>,
    /// The rank.
    pub rank: Rank,
    /// How many ranks there are.
    pub world: usize,
    /// How many lanes: blocks of the launch.
    pub lanes: usize,
    /// Threads of each.
    pub threads: usize,
    /// The integers around the section that it names. They may differ from rank to rank.
    pub integers: BTreeMap<String, i64>,
    /// The parameters that it names as operators.
    pub operators: BTreeMap<String, ReduceOp>,
    /// The functions of rows that it calls.
    pub functions: BTreeMap<String, Arc<RowFunction>>,
    /// The tensors around the section that it names, in the order of their names.
    pub tensors: Vec<SectionTensor>,
    /// All scratch of the program so far.
    pub scratch: Arc<[ScratchInstance]>,
    /// After how many launches what they do is repeated: the least common multiple of what `epoch` is
    /// divided by.
    pub period: u64,
    /// Whether tensors of the program may be the same memory, as where a launch works in place.
    pub shared_tensors: bool,
    /// Whether tensors that are announced are found by what their owners have published, and not where an exchange
    /// before the launch has found them.
    pub published: bool,
    /// Announced tensors, by index, that are taken for out of reach, so that what is done then is seen.
    pub withheld: Vec<usize>,
    /// Whether its kernel is to be that of instances with other sizes, too, where some that are equal here differ.
    pub sizes_vary: bool,
    /// Where it stands.
    pub site: Site,
}

/// A tensor that a section names.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SectionTensor {
    /// Its name in the section.
    pub name: String,
    /// Whose memory it is.
    pub memory: SectionMemory,
    /// Its element type.
    pub dtype: DType,
    /// Whether it is an input of a program that is called, whatever it is of the caller's.
    pub read_only: bool,
    /// Where it starts in that memory, in elements.
    pub offset: usize,
    /// Its extents, outermost first.
    pub shape: Vec<usize>,
    /// For each axis, the elements from one index to the next.
    pub strides: Vec<usize>,
}

/// What memory a tensor of a section is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum SectionMemory {
    /// A tensor of the program.
    Tensor(TensorId),
    /// Scratch.
    Scratch(ScratchId),
}

/// The memory of an operand of a lane's step.
#[derive(Clone, Debug)]
pub(crate) struct OperandMemory {
    /// A tensor, or scratch.
    pub(crate) memory: SectionMemory,
    /// How scratch holds data; plain for a tensor.
    pub(crate) packing: Packing,
    /// Its elements, counted from the start of the tensor or scratch.
    pub(crate) elements: Range<usize>,
    /// Its bytes, counted from the start of the tensor, or of the area of the packing in a workspace; whole packets.
    pub(crate) bytes: Range<usize>,
}

impl SectionInstance {
    /// The memory of an operand on a rank that launches this section; `None` where scratch has a packet across its
    /// start, as it may where it has no elements.
    pub(crate) fn operand(&self, part: &Part) -> Option<OperandMemory> {
        let tensor = &self.tensors[part.tensor];
        let from = tensor.offset + part.offset;
        let elements = from..from + part.elements;
        let (packing, bytes) = match tensor.memory {
            SectionMemory::Tensor(_) => {
                let size = tensor.dtype.size();
                (Packing::Plain, from * size..elements.end * size)
            }
            SectionMemory::Scratch(id) => {
                let scratch = &self.scratch[id];
                (scratch.packing, scratch.packed(from, part.elements)?)
            }
        };
        Some(OperandMemory {
            memory: tensor.memory,
            packing,
            elements,
            bytes,
        })
    }

    /// The scratch of packets that an operand is in, if it is.
    pub(crate) fn packets_of(&self, part: &Part) -> Option<ScratchId> {
        match self.tensors[part.tensor].memory {
            SectionMemory::Scratch(id) if self.scratch[id].packing.is_packets() => Some(id),
            _ => None,
        }
    }

    /// The kernel that a GPU runs for it, as CUDA C++ for `<warplink/sections.cuh>`. `aligned` says whether all
    /// tensors, and their rows, start at multiples of 16 bytes, which is known when a program is bound.
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`](crate::ErrorKind::Unsupported) for what kernels cannot do, with its place.
    pub fn kernel(&self, aligned: bool) -> Result<String> {
        compile::text(self, &vec![aligned; self.tensors.len()])
    }

    /// As [`kernel`](Self::kernel), for a kernel that stores when each step of a lane starts, for a trace.
    ///
    /// # Errors
    /// As [`kernel`](Self::kernel).
    pub fn traced_kernel(&self, aligned: bool) -> Result<String> {
        compile::traced_text(self, &vec![aligned; self.tensors.len()])
    }

    /// The index of the tensor `name`.
    pub fn tensor(&self, name: &str) -> Option<usize> {
        self.tensors
            .binary_search_by(|tensor| tensor.name.as_str().cmp(name))
            .ok()
    }

    /// What reductions by an operator that is a parameter multiply their sources by, if they do; the same for all.
    pub(crate) fn factor(&self) -> Option<Factor> {
        self.operators
            .values()
            .find_map(|operator| operator.factor())
    }

    /// The indices of the tensors that its lanes announce.
    pub(crate) fn announced(&self) -> Vec<usize> {
        let names = FreeNames::of(&self.section).announced;
        names.iter().filter_map(|name| self.tensor(name)).collect()
    }

    /// The tensors of the program that it names, on this rank.
    pub fn user_tensors(&self) -> impl Iterator<Item = TensorId> {
        self.tensors
            .iter()
            .filter_map(|tensor| match tensor.memory {
                SectionMemory::Tensor(id) => Some(id),
                SectionMemory::Scratch(_) => None,
            })
    }

    /// The scratch that tensor `index` is, if it is scratch.
    pub fn scratch_of(&self, index: usize) -> Option<&ScratchInstance> {
        match self.tensors[index].memory {
            SectionMemory::Scratch(id) => self.scratch.get(id),
            SectionMemory::Tensor(_) => None,
        }
    }
}
