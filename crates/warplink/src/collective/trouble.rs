//! What is told of calls that do not end, and of calls that differ.

use super::{Call, Collectives, Inner};
use crate::device::InUse;
use crate::error::{Error, ErrorKind, Result};
use crate::p2p::Direction;
use crate::program::execute::Announced;
use crate::sync::lock;
use std::sync::{Arc, Mutex, Weak};

/// The collectives of a communicator that were joined.
#[derive(Debug, Default)]
pub(crate) struct Known(Mutex<Vec<Weak<InUse<Inner>>>>);

impl Known {
    pub(crate) fn add(&self, collectives: &Collectives) {
        let mut all = lock(&self.0);
        all.retain(|one| one.strong_count() > 0);
        all.push(Arc::downgrade(&collectives.0));
    }

    fn all(&self) -> Vec<Arc<InUse<Inner>>> {
        lock(&self.0).iter().filter_map(Weak::upgrade).collect()
    }

    /// Who did not come to a collective, where a wait timed out because of that.
    pub(crate) fn explain_timeout(&self) -> Option<Error> {
        for collectives in self.all() {
            let Some(direct) = collectives.path.direct() else {
                continue;
            };
            if let Some(explained) = awaited_message(&collectives) {
                return Some(explained);
            }
            let absent = direct.workspace.absent(&direct.announcements);
            // What cannot be found out is left out.
            let Some(&first) = absent.ok().as_ref().and_then(|absent| absent.first()) else {
                continue;
            };
            let last = *lock(&collectives.last);
            let called = last.map_or_else(String::new, |call| {
                format!("; the last that this rank called is {call}")
            });
            let explained = Error::new(
                ErrorKind::Timeout,
                format!("a rank has not come to a collective that this rank is in{called}"),
            )
            .with_operation("synchronize")
            .with_peer(first)
            .with_help("make the same calls in the same order on every rank");
            return Some(explained);
        }
        None
    }

    /// Fails where kernels have noted that another rank called something else.
    pub(crate) fn check_agreement(&self) -> Result<()> {
        for collectives in self.all() {
            if let Some(lines) = &collectives.lines
                && let Some(error) = lines.disagreement()?
            {
                let error = error.with_rank(collectives.context.rank());
                collectives.context.fault.fail(error.clone());
                return Err(error);
            }
            let (Some(last), Some(direct)) = (*lock(&collectives.last), collectives.path.direct())
            else {
                continue;
            };
            let Some((peer, announced)) = direct.workspace.disagreement()? else {
                continue;
            };
            let (text, help) = match announced {
                Announced::Other(words) => (
                    format!(
                        "in a collective, the peer calls {}; expected what this rank calls, whose last call is {last}",
                        Call::describe(&words)
                    ),
                    "make the same calls in the same order on every rank",
                ),
                Announced::UnknownMemory => (
                    "in a collective, the peer has its data in memory that this rank has let go of; expected memory \
                     that all ranks reach"
                        .to_owned(),
                    "keep what a graph was recorded with, and record graphs anew where they use other memory",
                ),
            };
            let error = Error::new(ErrorKind::Mismatch, text)
                .with_operation("synchronize")
                .with_peer(peer)
                .with_help(help);
            collectives.context.fault.fail(error.clone());
            return Err(error);
        }
        Ok(())
    }
}

/// The error of a wait that timed out, where a message has begun at this rank and not at the other.
fn awaited_message(collectives: &Inner) -> Option<Error> {
    let lines = collectives.lines.as_ref()?;
    // What cannot be found out is left out.
    let awaited = lines.awaited(&*collectives.context.device);
    let (peer, direction) = awaited.ok().flatten()?;
    let text = match direction {
        Direction::Send => "the peer has not come to the receive of what this rank sends",
        Direction::Receive => "the peer has not come to the send of what this rank receives",
    };
    let error = Error::new(ErrorKind::Timeout, text);
    Some(
        error
            .with_operation("synchronize")
            .with_peer(peer)
            .with_help(
                "give each send a receive on the other rank, in an order in which all can go on",
            ),
    )
}
