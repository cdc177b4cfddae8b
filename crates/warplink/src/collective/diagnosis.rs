//! Diagnosis of calls that do not complete or that differ between ranks.

use super::comparison::{CallComparison, PATIENCE, QueryResult};
use super::experts::{COMBINE, DISPATCH, EXCEEDED, describe_exceeded, describe_layer};
use super::fused::{FUSED, describe_fused};
use super::messages::Messages;
use super::{Call, Collectives, Inner};
use crate::deadline::Deadline;
use crate::device::{InUse, Priority};
use crate::error::{Error, ErrorKind, Result};
use crate::p2p::Direction;
use crate::program::execute::{Announced, calls_differ, unknown_memory};
use crate::sync::lock;
use std::borrow::Cow;
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

/// Long enough for a stream to pass completed work.
const COMPLETION_CHECK: Duration = Duration::from_millis(200);

/// Help for collectives that some ranks have not called.
const SAME_CALLS: &str = "make the same calls in the same order on every rank";

/// Registry of a communicator's joined collectives.
#[derive(Debug, Default)]
pub(crate) struct JoinedCollectives(Mutex<Vec<Weak<InUse<Inner>>>>);

impl JoinedCollectives {
    pub(crate) fn add(&self, collectives: &Collectives) {
        let mut all = lock(&self.0);
        all.retain(|one| one.strong_count() > 0);
        all.push(Arc::downgrade(&collectives.0));
    }

    fn all(&self) -> Vec<Arc<InUse<Inner>>> {
        lock(&self.0).iter().filter_map(Weak::upgrade).collect()
    }

    /// Sends pending statements about engine calls to neighbouring ranks; returns how long to wait if it is
    /// too early. Does not block.
    pub(crate) fn send_statements(&self) -> Option<Duration> {
        let all = self.all();
        let comparisons = all.iter().filter_map(|one| one.comparison());
        comparisons
            .filter_map(CallComparison::send_statements)
            // The caller sleeps once for all of them.
            .max()
    }

    /// Engine calls that differ, when a failure of another rank or of the library ended a wait. Queries other
    /// ranks.
    pub(crate) fn explain_failure(&self) -> Option<Error> {
        let all = self.all();
        let until = Deadline::after(PATIENCE);
        let comparisons = all.iter().filter_map(|one| one.comparison());
        let mut asked = comparisons.filter_map(|comparison| comparison.ask(until).mismatch());
        asked.next()
    }

    /// Explains a timed-out collective by the ranks that did not arrive; for engine calls, by those with
    /// differing or missing calls according to the other ranks.
    pub(crate) fn explain_timeout(&self) -> Option<Error> {
        let all = self.all();
        let explained = all.iter().find_map(|one| awaited(one));
        explained.or_else(|| all.iter().find_map(|one| unfinished(one)))
    }

    /// Fails if a kernel or another rank has detected different calls, or a kernel a value that is out of range.
    pub(crate) fn check_agreement(&self) -> Result<()> {
        for collectives in self.all() {
            if let Some(error) = disagreement(&collectives)? {
                collectives.context.fault.fail(error.clone());
                return Err(error);
            }
        }
        Ok(())
    }
}

/// Error of different calls that a kernel or another rank has detected, or of a value that a kernel has refused.
fn disagreement(collectives: &Inner) -> Result<Option<Error>> {
    let of_engine = collectives.comparison();
    if let Some(error) = of_engine.and_then(CallComparison::disagreement) {
        return Ok(Some(error));
    }
    let messages = collectives.messages.as_ref();
    if let Some(error) = messages.map_or(Ok(None), Messages::disagreement)? {
        return Ok(Some(error.with_rank(collectives.context.rank())));
    }
    let Some(direct) = collectives.path.direct() else {
        return Ok(None);
    };
    direct.workspace.noted(|peer, announced| {
        let error = match announced {
            Announced::Other { own, theirs } => {
                calls_differ(format!("in a collective, {}", difference(&own, &theirs)))
            }
            Announced::UnknownMemory => unknown_memory("a collective"),
        };
        error.with_operation("synchronize").with_peer(peer)
    })
}

/// Error of a timed-out wait for a rank that has not arrived at a message or collective on the direct path.
fn awaited(collectives: &Inner) -> Option<Error> {
    let direct = collectives.path.direct()?;
    if let Some(explained) = awaited_message(collectives) {
        return Some(explained);
    }
    // Omit information that cannot be obtained.
    let absent = direct.workspace.absent(&direct.announcements).ok()?;
    let first = *absent.first()?;
    let called = last_call(collectives);
    let text = format!("a rank has not arrived at a collective that this rank is in{called}");
    Some(timed_out(text, SAME_CALLS).with_peer(first))
}

impl Inner {
    /// Call comparison, if the engine is used.
    fn comparison(&self) -> Option<&CallComparison> {
        Some(&self.path.joined_engine()?.comparison)
    }
}

/// Error of a timed-out wait for engine calls outside graphs. The library does not report whom it waits for,
/// so query the other ranks.
fn unfinished(collectives: &Inner) -> Option<Error> {
    let comparison = collectives.comparison()?;
    let behind = || {
        let stream = collectives.context.device.create_stream(Priority::Normal)?;
        // A stream that follows all calls so far completes only when they have.
        collectives.turns.precede(&stream)?;
        stream.synchronize(Deadline::after(COMPLETION_CHECK))
    };
    // Success means that all is done.
    if behind().err()?.kind() != ErrorKind::Timeout {
        return None;
    }
    let called = last_call(collectives);
    let unfinished = |found: &str, help: &'static str| {
        let text = format!("a call of the vendor's library is not done{found}{called}");
        timed_out(text, help)
    };
    Some(match comparison.ask(Deadline::after(PATIENCE)) {
        QueryResult::Mismatch(error) => {
            collectives.context.fault.fail(error.clone());
            error
        }
        QueryResult::Missing { first, text } => {
            unfinished(&format!(": {text}"), SAME_CALLS).with_peer(first)
        }
        QueryResult::Nothing => unfinished(
            "",
            "look at what its stream waits for on each rank, and order launches of graphs alike; no rank is known that \
             has made fewer calls",
        ),
    })
}

/// Description of a rank's call from its announcement.
fn describe(words: &[u32]) -> String {
    match words.first().map(|what| what & 0xf) {
        Some(FUSED) => describe_fused(words),
        Some(COMBINE | DISPATCH | EXCEEDED) => describe_layer(words),
        _ => Call::describe(words),
    }
}

/// Describes how two announcements differ.
pub(super) fn difference(own: &[u32], theirs: &[u32]) -> String {
    if let Some(exceeded) = describe_exceeded(own, theirs) {
        return exceeded;
    }
    let (here, there) = (describe(own), describe(theirs));
    // The announced words differ, but not in what the call means: only the algorithm is left.
    if here == there {
        return format!(
            "the ranks do {here} by different algorithms; expected the same options and machine on all"
        );
    }
    format!("the peer calls {there}; expected {here}, as this rank calls")
}

fn timed_out(text: impl Into<Cow<'static, str>>, help: &'static str) -> Error {
    Error::new(ErrorKind::Timeout, text)
        .with_operation("synchronize")
        .with_help(help)
}

/// Error suffix that describes the last collective, if any.
fn last_call(collectives: &Inner) -> String {
    let last = *lock(&collectives.last);
    last.map_or_else(String::new, |call| {
        format!("; the last that this rank called is {call}")
    })
}

/// Error of a timed-out wait for a message that has begun on this rank only.
fn awaited_message(collectives: &Inner) -> Option<Error> {
    // Omit information that cannot be obtained.
    let awaited = collectives.messages.as_ref()?.awaited();
    let (peer, direction) = awaited.ok().flatten()?;
    let text = match direction {
        Direction::Send => "the peer has not posted the receive for this rank's send",
        Direction::Receive => "the peer has not posted the send for this rank's receive",
    };
    let help = "give each send a receive on the other rank, in an order in which all can progress";
    Some(timed_out(text, help).with_peer(peer))
}
