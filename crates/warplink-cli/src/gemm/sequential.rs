//! All-gather + matmul without overlap: gather everything, then multiply.

use super::{Gemm, Op};
use anyhow::{Result, ensure};
use std::sync::Arc;
use warplink::device::{Compute, DeviceSlice, MatmulSpec, Stream};
use warplink::memory::Region;
use warplink::p2p::{Protocol, Transfer, TransferRequest, post_all, wait_all};

/// Every rank sends its part to every other in one group of transfers; then one GEMM. The baseline without
/// the vendor's collectives.
pub(crate) struct Sequential {
    transfers: Vec<Transfer>,
    gathered: Region,
    own: Region,
    a: DeviceSlice,
    b: DeviceSlice,
    c: DeviceSlice,
    compute: Arc<dyn Compute>,
    spec: MatmulSpec,
}

impl Sequential {
    /// Collective.
    pub(crate) fn new(gemm: &Gemm<'_>) -> Result<Self> {
        let (comm, problem) = (gemm.comm, gemm.problem);
        ensure!(
            problem.op == Op::AllGatherMatmul,
            "the baseline supports all-gather + matmul only"
        );
        let (rank, world) = (comm.rank(), comm.world());
        let part = gemm.a.bytes();
        let gathered = comm.alloc(part * world)?;
        let source = comm.register(&gemm.a)?;
        let mut requests = Vec::new();
        // In rotated order, so that in each step every rank has a different target.
        for step in 1..world {
            let (to, from) = ((rank + world - step) % world, (rank + step) % world);
            let target = gathered.slice(from * part..(from + 1) * part)?;
            requests.push(TransferRequest::send(&source, to, 0).with_protocol(Protocol::Put));
            requests.push(TransferRequest::receive(&target, from, 0).with_protocol(Protocol::Put));
        }
        let spec = problem.spec(problem.m, problem.k);
        let compute = comm.compute()?;
        compute.prepare_matmul(&spec)?;
        Ok(Self {
            transfers: comm.exchange(&requests)?,
            own: gathered.slice(rank * part..(rank + 1) * part)?,
            gathered,
            a: gemm.a.clone(),
            b: gemm.b.clone(),
            c: gemm.c.clone(),
            compute,
            spec,
        })
    }

    pub(crate) fn run(&self, stream: &Stream) -> Result<()> {
        let group: Vec<&Transfer> = self.transfers.iter().collect();
        stream.copy(&self.own, &self.a)?;
        if !group.is_empty() {
            post_all(&group, stream)?;
            wait_all(&group, stream)?;
        }
        let gathered = self.gathered.memory();
        Ok(self
            .compute
            .matmul(stream, &self.spec, gathered, &self.b, &self.c, None)?)
    }
}
