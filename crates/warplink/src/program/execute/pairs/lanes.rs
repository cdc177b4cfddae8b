//! Lanes of a program of two ranks, which any two ranks of a group run.

use super::super::lane::{Announcing, LaneInput, TellDifference, internal, run_steps};
use super::super::publication::{Published, Tables};
use super::super::reach::Reach;
use super::PairState;
use super::table::{Decoded, MessageMemory, decode};
use crate::device::{Block, DeviceSlice, Fault, HostLanes, LaneFuture, Word};
use crate::error::{ErrorKind, Rank, Result};
use crate::program::section::StepCache;
use crate::program::section::{SectionInstance, UNPUBLISHED};
use std::sync::Arc;

/// Lanes of all lines of a rank.
pub(super) struct PairLanes {
    pub(super) rank: Rank,
    /// The program's two ranks.
    pub(super) sections: [Arc<SectionInstance>; 2],
    pub(super) caches: [StepCache; 2],
    /// Memory of a message that each tensor of the program is.
    pub(super) memory: Vec<MessageMemory>,
    pub(super) state: PairState,
    /// Memory that lines access: those in which this rank is the first of the two, then the others, by peer.
    pub(super) reaches: Arc<[Reach]>,
    /// Counts lanes that found the data of both ends reachable.
    pub(super) direct: Word,
    pub(super) tables: Arc<Tables>,
    /// Error of a mismatch, as the first or second rank of the program.
    pub(super) tell: [Arc<TellDifference>; 2],
    /// Operation of each of these, for errors.
    pub(super) operations: [&'static str; 2],
    /// Raised on a mismatch, to abort the waits of this rank's other lanes.
    pub(super) fault: Arc<Fault>,
}

impl HostLanes for PairLanes {
    fn run<'a>(&'a self, block: &'a Block<'a>) -> LaneFuture<'a> {
        Box::pin(self.messages(block))
    }
}

impl PairLanes {
    /// Runs the messages of the block's line, one after another.
    async fn messages(&self, block: &Block<'_>) -> Result<()> {
        for message in decode(block.words(0)?) {
            let Some(lane) = message.lane(block.index() as usize) else {
                continue;
            };
            // All reaches have the same state, so any of them serves.
            let count = |lane| self.state.count(&self.reaches[0].state, &message, lane);
            let own = count(lane)?;
            let epoch = block.value(&own);
            self.message(block, &message, (lane, epoch)).await?;
            block.set(&own, epoch + 1);
            // Lanes without blocks in this launch count its messages, too.
            for other in (lane + message.blocks..self.state.lanes).step_by(message.blocks) {
                block.set(&count(other)?, epoch + 1);
            }
        }
        Ok(())
    }

    async fn message(
        &self,
        block: &Block<'_>,
        message: &Decoded,
        (lane, epoch): (usize, u64),
    ) -> Result<()> {
        let Decoded { peer, role, .. } = *message;
        let all = block.memory(2)?;
        let memory = |kind: &MessageMemory| -> Result<DeviceSlice> {
            let place = message.memory(*kind);
            let slice = all.get(place).cloned();
            slice.ok_or_else(|| internal("a launch without memory of a message"))
        };
        let tensors = self.memory.iter().map(memory).collect::<Result<Vec<_>>>()?;
        let places = match message.published {
            Some(Published { number, start }) => [number, start],
            None => [UNPUBLISHED, 0],
        };
        let mut ranks = [self.rank, self.rank];
        ranks[1 - role] = peer;
        let section = &self.sections[role];
        let input = LaneInput {
            section,
            reach: &self.reaches[self.state.line(role, peer)],
            tensors: &tensors,
            published: Some(Announcing {
                tables: &self.tables,
                places: &places,
                ranks: Some(ranks),
            }),
            direct: &self.direct,
            carried: &message.carried,
            first_signals: [ranks[1], ranks[0]].map(|other| self.state.first_signal(other)),
            tell: &*self.tell[role],
            times: None,
            cache: &self.caches[role],
        };
        run_steps(block, input, (lane, epoch))
            .await
            .map_err(|error| {
                if error.kind() != ErrorKind::Mismatch {
                    return error.with_rank(self.rank);
                }
                let error = error.with_operation(self.operations[role]);
                let error = error.with_rank(self.rank).with_peer(peer);
                self.fault.fail(error.clone());
                error
            })
    }
}
