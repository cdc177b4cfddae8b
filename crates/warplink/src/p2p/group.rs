//! Posting and waiting for many transfers at once.

use super::transfer::Transfer;
use crate::device::{MemoryOp, Stream};
use crate::error::{Error, ErrorKind, Result};
use crate::signal::{Mode, Steps};

/// Posts `transfers` on `stream` as one group: first everything that only tells a peer, then what
/// has to wait for one. So a group completes whatever the order of its members, here and on the
/// other ranks, as long as each rank posts the other end of every member in a group that this one
/// does not wait for. Does not block.
///
/// # Errors
/// The device's fault, and [`ErrorKind::InvalidArgument`] for a transfer that is captured twice
/// without a wait between.
pub fn post_all(transfers: &[&Transfer], stream: &dyn Stream) -> Result<()> {
    let capturing = stream.is_capturing()?;
    if let [transfer] = transfers {
        let (mode, steps) = transfer.begin_post(stream, capturing)?;
        announce(transfer, mode, &steps, stream)?;
        return carry(transfer, mode, &steps, stream);
    }
    let mut begun = Vec::with_capacity(transfers.len());
    let mut announcements = Vec::with_capacity(transfers.len());
    for transfer in transfers {
        let (mode, steps) = transfer.begin_post(stream, capturing)?;
        if !steps.copy {
            for signal in steps.before.into_iter().flatten() {
                announcements.push(transfer.operation(signal, mode)?);
            }
        }
        begun.push((*transfer, mode, steps));
    }
    if !announcements.is_empty() {
        stream.memory_ops(&announcements)?;
    }
    begun
        .iter()
        .try_for_each(|(transfer, mode, steps)| carry(transfer, *mode, steps, stream))
}

/// Waits on `stream` for every post so far of `transfers`, in any order. Does not block.
///
/// # Errors
/// The device's fault.
pub fn wait_all(transfers: &[&Transfer], stream: &dyn Stream) -> Result<()> {
    let capturing = stream.is_capturing()?;
    if let [transfer] = transfers {
        let Some((mode, steps)) = transfer.begin_wait(stream, capturing) else {
            return Ok(());
        };
        return signals(transfer, mode, steps.before, stream);
    }
    let mut operations = Vec::with_capacity(2 * transfers.len());
    for transfer in transfers {
        let Some((mode, steps)) = transfer.begin_wait(stream, capturing) else {
            continue;
        };
        for signal in steps.before.into_iter().flatten() {
            operations.push(transfer.operation(signal, mode)?);
        }
    }
    if operations.is_empty() {
        Ok(())
    } else {
        stream.memory_ops(&operations)
    }
}

/// Enqueues an announcer's signals.
fn announce(transfer: &Transfer, mode: Mode, steps: &Steps, stream: &dyn Stream) -> Result<()> {
    if steps.copy {
        Ok(())
    } else {
        signals(transfer, mode, steps.before, stream)
    }
}

/// Enqueues a mover's wait, copy and signals.
fn carry(transfer: &Transfer, mode: Mode, steps: &Steps, stream: &dyn Stream) -> Result<()> {
    if !steps.copy {
        return Ok(());
    }
    let ends = transfer.ends();
    let (target, source) =
        ends.ok_or_else(|| Error::new(ErrorKind::Internal, "the mover has no mapping"))?;
    signals(transfer, mode, steps.before, stream)?;
    stream.copy(target, source)?;
    signals(transfer, mode, steps.after, stream)
}

fn signals(
    transfer: &Transfer,
    mode: Mode,
    signals: [Option<crate::signal::Signal>; 2],
    stream: &dyn Stream,
) -> Result<()> {
    let operation = |signal| transfer.operation(signal, mode);
    match signals {
        [Some(first), Some(second)] => {
            let operations: [MemoryOp<'_>; 2] = [operation(first)?, operation(second)?];
            stream.memory_ops(&operations)
        }
        [Some(only), None] | [None, Some(only)] => stream.memory_ops(&[operation(only)?]),
        [None, None] => Ok(()),
    }
}
