//! An all-gather + matmul without overlap: everything is gathered, then multiplied.

use super::{Op, Product};
use anyhow::{Result, ensure};
use std::sync::Arc;
use warplink::device::{Compute, DeviceSlice, MatmulSpec, Stream};
use warplink::memory::Region;
use warplink::p2p::{Protocol, Transfer, TransferRequest, post_all, wait_all};

/// Every rank's part goes to every other in one group of transfers; then one product. What there is
/// to compare with where the vendor's collectives are not installed.
pub(crate) struct Plain {
    transfers: Vec<Transfer>,
    gathered: Region,
    own: DeviceSlice,
    a: DeviceSlice,
    b: DeviceSlice,
    c: DeviceSlice,
    compute: Arc<dyn Compute>,
    spec: MatmulSpec,
}

impl Plain {
    /// Every rank makes one at the same time.
    pub(crate) fn new(product: &Product<'_>) -> Result<Self> {
        let (comm, problem) = (product.comm, product.problem);
        ensure!(
            problem.op == Op::AllGatherMatmul,
            "only what is gathered can be gathered"
        );
        let (rank, world) = (comm.rank(), comm.world());
        let part = product.a.bytes();
        let gathered = comm.alloc(part * world)?;
        let source = comm.register(&product.a)?;
        let mut requests = Vec::new();
        // In rotated order, so that in each step every rank is the target of one other.
        for step in 1..world {
            let (to, from) = ((rank + world - step) % world, (rank + step) % world);
            let target = gathered.range(from * part..(from + 1) * part)?;
            requests.push(TransferRequest::send(&source, to, 0).protocol(Protocol::Put));
            requests.push(TransferRequest::receive(&target, from, 0).protocol(Protocol::Put));
        }
        let spec = MatmulSpec::new(problem.m, problem.n, problem.k, problem.dtype);
        let compute = comm.compute()?;
        compute.prepare_matmul(&spec)?;
        Ok(Self {
            transfers: comm.exchange(&requests)?,
            own: gathered.slice().slice(rank * part..(rank + 1) * part)?,
            gathered,
            a: product.a.clone(),
            b: product.b.clone(),
            c: product.c.clone(),
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
        let gathered = self.gathered.slice();
        Ok(self
            .compute
            .matmul(stream, &self.spec, gathered, &self.b, &self.c, None)?)
    }
}
