//! Collectives of host programs.

use super::join::Paths;
use super::{BYTES, Call, Collectives};
use crate::device::{Collective, CollectiveRequest, DeviceSlice, Stream};
use crate::error::{Error, Result};
use crate::program::execute::DirectCollectives;
use std::sync::Arc;

impl Collectives {
    /// Collectives for programs; `None`, on all ranks alike, unless the direct path executes all calls.
    pub(crate) fn for_programs(self) -> Option<Arc<dyn DirectCollectives>> {
        let direct = matches!(self.0.path, Paths::Direct(_));
        direct.then(|| Arc::new(self) as Arc<dyn DirectCollectives>)
    }
}

impl DirectCollectives for Collectives {
    fn prepare(&self, request: &CollectiveRequest) -> Result<()> {
        let (call, target, source) = self.call_of(request)?;
        self.prepare_for(&call, target, source)
    }

    fn enqueue(&self, stream: &Stream, request: &CollectiveRequest) -> Result<()> {
        let (call, target, source) = self.call_of(request)?;
        Collectives::enqueue(self, &call, target, source, stream)
    }

    fn launch(&self, stream: &Stream, launch: &mut dyn FnMut() -> Result<()>) -> Result<()> {
        let inner = &self.0;
        inner.used_by(stream, || inner.turns.take(stream, launch))
    }
}

impl Collectives {
    /// The call that executes a request, its output and its input.
    fn call_of<'a>(
        &self,
        request: &'a CollectiveRequest,
    ) -> Result<(Call, &'a DeviceSlice, &'a DeviceSlice)> {
        let CollectiveRequest::Collective {
            collective,
            dtype,
            target,
            source,
        } = request
        else {
            let text = "sends and receives are not a collective";
            return Err(Error::internal(text).with_operation(request.name()));
        };
        request.check(self.0.machine.world)?;
        let kind = collective.kind();
        let (op, root) = match *collective {
            Collective::AllGather | Collective::AllToAll => (None, 0),
            Collective::AllReduce(op) | Collective::ReduceScatter(op) => (Some(op), 0),
            Collective::Broadcast(root) => (None, root),
            Collective::Reduce(op, root) => (Some(op), root),
        };
        let (dtype, op) = op.map_or(BYTES, |op| (*dtype, op));
        let count = self.part_bytes(kind, (target, source)) / dtype.size();
        Ok((Call::new(kind, op, dtype, count, root), target, source))
    }
}
