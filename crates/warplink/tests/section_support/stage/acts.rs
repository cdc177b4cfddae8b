//! What steps of lanes do to memory.

use super::super::functions;
use super::{Act, Movement, Operand, Read, Rows, least_common_multiple, packet};
use warplink::DType;
use warplink::device::ReduceOp;
use warplink::program::RankProgram;
use warplink::program::section::{LaneStepKind, Part, RowArgument, SectionInstance, SectionMemory};

pub(super) fn act(
    kind: &LaneStepKind,
    ranks: &[RankProgram],
    sections: &[&SectionInstance],
) -> Act {
    let operand = |part: &Part| {
        let tensor = &sections[part.rank].tensors[part.tensor];
        let memory = match tensor.memory {
            SectionMemory::Tensor(id) => id,
            SectionMemory::Scratch(id) => ranks[part.rank].tensors.len() + id,
        };
        Operand {
            rank: part.rank,
            memory,
            from: tensor.offset + part.offset,
            elements: part.elements,
        }
    };
    match kind {
        LaneStepKind::Signal { peer, lane } => Act::Signal {
            peer: *peer,
            lane: *lane,
        },
        LaneStepKind::Wait(peer) => Act::Wait(*peer),
        LaneStepKind::Value {
            number,
            source,
            matching,
            most,
        } => Act::Value(Read {
            number: *number,
            word: operand(source),
            among: matching.map(|it| (it.row, it.inside, it.from, it.to, it.nth)),
            most: *most,
        }),
        LaneStepKind::Store { value, target } => {
            let tensor = &sections[target.rank].tensors[target.tensor];
            let unit = match tensor.memory {
                SectionMemory::Tensor(_) => 1,
                SectionMemory::Scratch(id) => packet(&ranks[target.rank], id),
            };
            Act::Move(Movement {
                dtype: tensor.dtype,
                unit,
                words: vec![*value as f64],
                ..announcement(&[0], vec![operand(target)], Vec::new())
            })
        }
        LaneStepKind::Announce {
            values,
            tensors,
            target,
        } => Act::Move(Movement {
            meets: !tensors.is_empty(),
            ..announcement(values, vec![operand(target)], Vec::new())
        }),
        LaneStepKind::Agree {
            values,
            tensors,
            source,
            ..
        } => Act::Move(Movement {
            meets: !tensors.is_empty(),
            ..announcement(values, Vec::new(), vec![operand(source)])
        }),
        LaneStepKind::Move(it) => {
            let packets = it.targets.iter().chain(&it.sources).map(|part| {
                let tensor = &sections[part.rank].tensors[part.tensor];
                match tensor.memory {
                    SectionMemory::Tensor(_) => 1,
                    SectionMemory::Scratch(id) => packet(&ranks[part.rank], id),
                }
            });
            Act::Move(Movement {
                operator: it.operator,
                dtype: it.dtype,
                elements: it.elements,
                function: it.rows.as_ref().map(|it| Rows {
                    function: functions::of(&it.function.name),
                    arguments: it.arguments.iter().map(combined).collect(),
                    results: (0..)
                        .zip(&it.results)
                        .flat_map(|(result, count)| vec![result; *count])
                        .collect(),
                }),
                unit: match it.rows {
                    Some(_) => it.elements.max(1),
                    None => packets.fold(1, least_common_multiple),
                },
                targets: it.targets.iter().map(operand).collect(),
                sources: it.sources.iter().map(operand).collect(),
                words: Vec::new(),
                meets: false,
            })
        }
    }
}

fn combined(argument: &RowArgument) -> (usize, ReduceOp) {
    match argument {
        RowArgument::Sources(count, operator) => (*count, *operator),
        RowArgument::Number(_) => panic!("samples give functions no numbers"),
    }
}

/// Words that a rank stores at another, or that it expects of one. Two fit in a packet.
fn announcement(values: &[u32], targets: Vec<Operand>, sources: Vec<Operand>) -> Movement {
    Movement {
        operator: None,
        dtype: DType::I32,
        elements: values.len(),
        function: None,
        unit: 2,
        targets,
        sources,
        words: values.iter().map(|word| f64::from(*word as i32)).collect(),
        meets: false,
    }
}
