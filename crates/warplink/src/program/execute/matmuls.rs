//! Matmuls with a common right operand.

use super::replaced::Replaced;
use crate::device::{Compute, DeviceSlice, MatmulSpec, PreparedLaunch, Stream};
use crate::error::Result;
use std::sync::Arc;

/// `c = a · b + bias` for each `(a, c)`.
#[derive(Debug)]
pub(super) struct Matmuls {
    pub(super) spec: MatmulSpec,
    pub(super) pairs: Vec<(DeviceSlice, DeviceSlice)>,
    pub(super) b: DeviceSlice,
    pub(super) bias: Option<DeviceSlice>,
}

impl Matmuls {
    /// Prepares them to be enqueued with these operands.
    pub(super) fn prepare(&self, compute: Arc<dyn Compute>) -> Result<Arc<dyn PreparedLaunch>> {
        compute.prepare_matmuls(&self.spec, &self.pairs, &self.b, self.bias.as_ref())
    }

    /// Whether `replaced` covers any operand.
    pub(super) fn name_any(&self, replaced: &Replaced<'_>) -> bool {
        let sides = self.pairs.iter().flat_map(|(a, c)| [a, c]);
        let mut all = sides.chain([&self.b]).chain(&self.bias);
        all.any(|slice| replaced.has(slice))
    }

    /// Enqueues them one by one, with the memory in `replaced` substituted.
    pub(super) fn enqueue(
        &self,
        stream: &Stream,
        replaced: &Replaced<'_>,
        compute: &Arc<dyn Compute>,
    ) -> Result<()> {
        let b = replaced.of(&self.b)?;
        let bias = self.bias.as_ref().map(|bias| replaced.of(bias));
        let bias = bias.transpose()?;
        self.pairs.iter().try_for_each(|(a, c)| {
            let (a, c) = (replaced.of(a)?, replaced.of(c)?);
            compute.matmul(stream, &self.spec, &a, &b, &c, bias.as_deref())
        })
    }
}
