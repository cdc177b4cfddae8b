//! What is told of calls that do not end, and of calls that differ.

use super::fused::describe;
use super::witness::{Answered, PATIENCE, Witness};
use super::{Collectives, Inner};
use crate::deadline::Deadline;
use crate::device::{InUse, Priority};
use crate::error::{Error, ErrorKind, Result};
use crate::p2p::Direction;
use crate::program::execute::Announced;
use crate::sync::lock;
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

/// Longer than a stream takes to pass what is done.
const A_MOMENT: Duration = Duration::from_millis(200);

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

    /// Tells the next ranks of calls of the vendor's library, where they were not told; how long to wait before that is
    /// tried again, where it is too early. Does not block.
    pub(crate) fn tell(&self) -> Option<Duration> {
        let all = self.all();
        let witnesses = all.iter().filter_map(|one| one.witness());
        witnesses.filter_map(Witness::tell).max()
    }

    /// The calls of the vendor's library that differ, where another rank's failure ended a wait, or the library's. Asks
    /// the other ranks.
    pub(crate) fn explain_failure(&self) -> Option<Error> {
        let all = self.all();
        let until = Deadline::after(PATIENCE);
        let witnesses = all.iter().filter_map(|one| one.witness());
        let mut asked = witnesses.filter_map(|witness| witness.ask(until).mismatch());
        asked.next()
    }

    /// Who did not come to a collective, where a wait timed out because of that; of one by the vendor's library, whose
    /// calls differ or are missing, as far as the other ranks tell.
    pub(crate) fn explain_timeout(&self) -> Option<Error> {
        let all = self.all();
        let explained = all.iter().find_map(|one| awaited(one));
        explained.or_else(|| all.iter().find_map(|one| unfinished(one)))
    }

    /// Fails where kernels have noted that another rank called something else, or where that told so itself.
    pub(crate) fn check_agreement(&self) -> Result<()> {
        for collectives in self.all() {
            if let Some(error) = collectives.witness().and_then(Witness::disagreement) {
                collectives.context.fault.fail(error.clone());
                return Err(error);
            }
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
                        describe(&words)
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

/// The error of a wait that timed out, where a rank has not come to a message or a collective on the direct path.
fn awaited(collectives: &Inner) -> Option<Error> {
    let direct = collectives.path.direct()?;
    if let Some(explained) = awaited_message(collectives) {
        return Some(explained);
    }
    // What cannot be found out is left out.
    let absent = direct.workspace.absent(&direct.announcements).ok()?;
    let first = *absent.first()?;
    let called = last_call(collectives);
    let error = Error::new(
        ErrorKind::Timeout,
        format!("a rank has not come to a collective that this rank is in{called}"),
    );
    Some(
        error
            .with_operation("synchronize")
            .with_peer(first)
            .with_help("make the same calls in the same order on every rank"),
    )
}

impl Inner {
    /// What ranks tell one another of calls of the vendor's library, where it does any.
    fn witness(&self) -> Option<&Witness> {
        Some(&self.path.joined_engine()?.witness)
    }
}

/// The error of a wait that timed out, where the vendor's library has not done what it was given outside of graphs. It
/// does not tell for whom it waits, so the other ranks are asked.
fn unfinished(collectives: &Inner) -> Option<Error> {
    let witness = collectives.witness()?;
    let behind = || {
        let stream = collectives.context.device.create_stream(Priority::Normal)?;
        collectives.turns.precede(&stream)?;
        stream.synchronize(Deadline::after(A_MOMENT))
    };
    // Without an error, all is done.
    if behind().err()?.kind() != ErrorKind::Timeout {
        return None;
    }
    let called = last_call(collectives);
    let told = |found: &str, help: &'static str| {
        let text = format!("a call of the vendor's library is not done{found}{called}");
        Error::new(ErrorKind::Timeout, text)
            .with_operation("synchronize")
            .with_help(help)
    };
    Some(match witness.ask(Deadline::after(PATIENCE)) {
        Answered::Mismatch(error) => {
            collectives.context.fault.fail(error.clone());
            error
        }
        Answered::Missing { first, text } => told(
            &format!(": {text}"),
            "make the same calls in the same order on every rank",
        )
        .with_peer(first),
        Answered::Nothing => told(
            "",
            "look at what its stream waits for on each rank, and order launches of graphs alike; no rank is known that \
             has made fewer calls",
        ),
    })
}

/// What errors add of the last collective, if there was one.
fn last_call(collectives: &Inner) -> String {
    let last = *lock(&collectives.last);
    last.map_or_else(String::new, |call| {
        format!("; the last that this rank called is {call}")
    })
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
