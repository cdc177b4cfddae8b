//! Agreement on the performance of transfers by kernels: all ranks of a job use the figures of rank 0's hardware model,
//! so that both ends of a transfer choose the same flow.

use crate::bootstrap::{Bootstrap, Wait};
use crate::deadline::Deadline;
use crate::device::Device;
use crate::error::{Error, ErrorKind, Result};
use crate::exchange::{decode, encode};
use crate::memory::MemoryRegistry;
use crate::p2p::TransferKernels;
use crate::program::cost::{DeviceDescription, HardwareModel};

/// Published figures, with the limit that models store elsewhere, or why rank 0 has none.
type Published = std::result::Result<(u64, TransferKernels), String>;

fn key(bootstrap: &Bootstrap) -> String {
    bootstrap.everyone().key("p2p/kernels")
}

/// Publishes the figures of rank 0, on rank 0, and returns them there. A model that cannot be read is an error of the
/// first transfer that needs it, not of the join. Blocks for a round trip to the store.
pub(super) fn publish(
    device: &dyn Device,
    bootstrap: &Bootstrap,
) -> Result<Option<Result<TransferKernels>>> {
    if bootstrap.rank() != 0 {
        return Ok(None);
    }
    let found = HardwareModel::find(&DeviceDescription::of(device), bootstrap.world());
    let found = found.map(|(model, _)| model.link.transfer_kernels());
    let published: Published = match &found {
        Ok(kernels) => Ok((kernels.one_block_limit, kernels.clone())),
        Err(error) => Err(error.to_string()),
    };
    if bootstrap.world() > 1 {
        bootstrap.store().set(key(bootstrap), encode(&published)?)?;
    }
    Ok(Some(found))
}

/// The figures of rank 0: `own` there, else those that it has published. Read when a rank joins, since the store
/// forgets them if rank 0 is lost.
///
/// # Errors
/// The outer result fails if the store does not answer. The inner one is rank 0's error, on all ranks.
pub(super) fn of_rank_0(
    own: Option<Result<TransferKernels>>,
    bootstrap: &Bootstrap,
    memory: &MemoryRegistry,
    deadline: Deadline,
) -> Result<Result<TransferKernels>> {
    let found = match own {
        Some(own) => own,
        None => {
            let wait = Wait::on([0], deadline);
            let published = bootstrap.store().get(&key(bootstrap), &wait)?;
            match decode::<Published>(&published)? {
                Ok((one_block_limit, kernels)) => Ok(TransferKernels {
                    one_block_limit,
                    ..kernels
                }),
                Err(reason) => {
                    let what = format!("rank 0 of the job has no hardware model: {reason}");
                    Err(Error::new(ErrorKind::PeerFailed, what))
                }
            }
        }
    };
    // Ranks of other communicators transfer concurrently.
    let all: Vec<_> = (0..bootstrap.world()).collect();
    let sharing = memory.ranks_per_device(&all)?;
    Ok(found.map(|kernels| kernels.shared_by(sharing)))
}
