//! A section of one rank, with outer names resolved.

use super::compile;
use super::function::RowFunction;
use super::ir::{Packing, Section, Step};
use super::lane::Part;
use super::layout::{ScratchId, ScratchInstance};
use super::names::FreeNames;
use crate::device::{Factor, ReduceOp};
use crate::dtype::DType;
use crate::error::{Rank, Result};
use crate::program::site::Site;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::sync::Arc;

/// A section as one rank launches it. Everything that differs between lanes and launches is in
/// [`section`](Self::section); its expressions are over `rank`, `world`, [`integers`](Self::integers), the lane,
/// `epoch`, and names bound by the body.
#[derive(Clone, Debug)]
pub struct SectionInstance {
    /// Steps of the lanes.
    pub section: Arc<Section>,
    /// The rank.
    pub rank: Rank,
    /// Number of ranks.
    pub world: usize,
    /// Number of lanes; each is one block of the launch, or a cluster of blocks.
    pub lanes: usize,
    /// Threads per lane.
    pub threads: usize,
    /// Blocks per lane on a device with kernels, which divide its threads: a cluster if there are several, which is
    /// possible for sections without signals, values and announced tensors.
    pub blocks: usize,
    /// Outer integers that it uses. They may differ from rank to rank.
    pub integers: BTreeMap<String, i64>,
    /// Parameters that it uses as operators.
    pub operators: BTreeMap<String, ReduceOp>,
    /// Row functions that it calls.
    pub functions: BTreeMap<String, Arc<RowFunction>>,
    /// Outer tensors that it uses, sorted by name.
    pub tensors: Vec<SectionTensor>,
    /// All scratch of the program so far.
    pub scratch: Arc<[ScratchInstance]>,
    /// Number of launches after which its behaviour repeats: the least common multiple of the divisors of `epoch`.
    pub period: u64,
    /// Whether tensors of the program may share memory, for example if a launch works in place.
    pub shared_tensors: bool,
    /// Whether announced tensors are located through the allocations published by their owners, instead of an
    /// exchange before the launch.
    pub published: bool,
    /// Announced tensors, by index, that are treated as unreachable, to exercise the fallback.
    pub withheld: Vec<usize>,
    /// Input, by index, whose words each launch carries as an argument, instead of memory that holds them.
    pub carried: Option<usize>,
    /// Whether its kernel must also serve instances in which sizes that are equal here differ.
    pub sizes_vary: bool,
    /// Location of the statement.
    pub site: Site,
}

/// A tensor used by a section.
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
    /// Whether it is an input of the program that shares memory with no other tensor.
    pub constant: bool,
    /// Offset in that memory, in elements.
    pub offset: usize,
    /// Its extents, outermost first.
    pub shape: Vec<usize>,
    /// Stride of each axis, in elements.
    pub strides: Vec<usize>,
}

impl SectionTensor {
    /// Whether its rows follow one another without gaps.
    pub(crate) fn has_dense_rows(&self) -> bool {
        matches!((&self.shape[..], &self.strides[..]), ([_, width], [stride, 1]) if width == stride)
    }
}

/// Index of a tensor in [`RankProgram::tensors`](crate::program::rank_program::RankProgram::tensors).
pub type TensorId = usize;

/// Memory behind a tensor of a section.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum SectionMemory {
    /// A tensor of the program.
    Tensor(TensorId),
    /// Scratch.
    Scratch(ScratchId),
}

/// Memory accessed by an operand of a lane's step.
#[derive(Clone, Debug)]
pub(crate) struct OperandMemory {
    /// A tensor, or scratch.
    pub(crate) memory: SectionMemory,
    /// Packing of scratch; plain for a tensor.
    pub(crate) packing: Packing,
    /// Element range, relative to the start of the tensor or scratch.
    pub(crate) elements: Range<usize>,
    /// Byte range in whole packets, relative to the start of the tensor, or of the packing's area in a workspace.
    pub(crate) bytes: Range<usize>,
}

impl SectionInstance {
    /// Memory of an operand on a rank that launches this section. `None` if the operand starts inside a packet of
    /// scratch, which is possible if it has no elements.
    pub(crate) fn operand(&self, part: &Part) -> Option<OperandMemory> {
        let tensor = &self.tensors[part.tensor];
        let from = tensor.offset + part.offset;
        let elements = from..from + part.elements;
        let (packing, bytes) = match tensor.memory {
            SectionMemory::Tensor(_) => {
                let size = tensor.dtype.size();
                (Packing::Plain, from * size..elements.end * size)
            }
            // Scratch is addressed in elements of data and stored in packets, which are larger.
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

    /// Scratch that contains the operand, if it holds packets.
    pub(crate) fn packets_of(&self, part: &Part) -> Option<ScratchId> {
        match self.tensors[part.tensor].memory {
            SectionMemory::Scratch(id) if self.scratch[id].packing.is_packets() => Some(id),
            _ => None,
        }
    }

    /// The GPU kernel, as CUDA C++ for `<warplink/sections.cuh>`. `aligned` states whether all tensors and their rows
    /// are aligned to 16 bytes, which is known when a program is bound.
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`](crate::ErrorKind::Unsupported) with its place, if kernels cannot perform a step.
    pub fn kernel(&self, aligned: bool) -> Result<String> {
        compile::text(self, &vec![aligned; self.tensors.len()])
    }

    /// As [`kernel`](Self::kernel), for a kernel that records the start time of each step of a lane for a trace.
    ///
    /// # Errors
    /// As [`kernel`](Self::kernel).
    pub fn traced_kernel(&self, aligned: bool) -> Result<String> {
        compile::traced_text(self, &vec![aligned; self.tensors.len()])
    }

    /// Index of the tensor `name`.
    pub fn tensor(&self, name: &str) -> Option<usize> {
        self.tensors
            .binary_search_by(|tensor| tensor.name.as_str().cmp(name))
            .ok()
    }

    /// Factor that reductions by a parameter operator apply to their sources, if any; the same for all.
    pub(crate) fn factor(&self) -> Option<Factor> {
        self.operators
            .values()
            .find_map(|operator| operator.factor())
    }

    /// Indices of the tensors that its lanes announce.
    pub(crate) fn announced(&self) -> Vec<usize> {
        let names = FreeNames::of(&self.section).announced;
        names.iter().filter_map(|name| self.tensor(name)).collect()
    }

    /// Indices of the tensors whose words its lanes read as integers.
    pub(crate) fn read_as_values(&self) -> Vec<usize> {
        let names = FreeNames::of(&self.section).values;
        names.iter().filter_map(|name| self.tensor(name)).collect()
    }

    /// Indices of the tensors of whose words its lanes compute values that they announce, or agree on.
    pub(crate) fn compared(&self) -> Vec<usize> {
        let names = FreeNames::of(&self.section).compared;
        names.iter().filter_map(|name| self.tensor(name)).collect()
    }

    /// Tensors that its moves write, each with one from which it may be copied, by name: it may be another rank's.
    pub(crate) fn copied(&self) -> BTreeSet<(String, String)> {
        FreeNames::of(&self.section).copied
    }

    /// Whether its lanes may note a value that is out of range, or an announcement that differs.
    pub(crate) fn may_note(&self) -> bool {
        let mut actions = Step::actions(&self.section.body);
        actions.any(|(_, kind)| kind.compares_announcements())
            || !FreeNames::of(&self.section).values.is_empty()
    }

    /// Whether nothing writes an operand during the launch, so that this rank's lanes may read it at any time.
    pub(crate) fn is_constant(&self, part: &Part) -> bool {
        let constant = self.tensors[part.tensor].constant;
        // A read-only load may return stale data if anything writes the memory during the launch: peers theirs, or
        // this launch by another name.
        part.rank == self.rank && constant && !self.shared_tensors
    }

    /// This rank's program tensors that it uses.
    pub fn user_tensors(&self) -> impl Iterator<Item = TensorId> {
        self.tensors
            .iter()
            .filter_map(|tensor| match tensor.memory {
                SectionMemory::Tensor(id) => Some(id),
                SectionMemory::Scratch(_) => None,
            })
    }

    /// Scratch behind tensor `index`, if it is scratch.
    pub fn scratch_of(&self, index: usize) -> Option<&ScratchInstance> {
        match self.tensors[index].memory {
            SectionMemory::Scratch(id) => self.scratch.get(id),
            SectionMemory::Tensor(_) => None,
        }
    }
}
