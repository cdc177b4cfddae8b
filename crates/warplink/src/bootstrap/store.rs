//! The interface of the key-value store.

use super::client::Client;
use super::message::{Bytes, OnReady, Reply, Request, wire_ranks};
use crate::deadline::Deadline;
use crate::debug::debug_fields;
#[cfg(doc)]
use crate::error::ErrorKind;
use crate::error::{Error, Rank, Result};
use std::sync::Arc;
use std::time::Duration;

/// The deadline of a wait for keys, and the ranks that it depends on.
#[derive(Clone, Debug)]
pub struct Wait {
    /// When it gives up, with [`ErrorKind::Timeout`]. With a deadline that has already passed, the keys
    /// must exist now.
    pub deadline: Deadline,
    /// Ranks that are all needed to set the keys. If empty, any other rank may set them.
    pub depends_on: Vec<Rank>,
}

impl Wait {
    /// A wait that ends with an error as soon as any of `ranks` is lost or has left.
    pub fn on(ranks: impl Into<Vec<Rank>>, deadline: Deadline) -> Self {
        Self {
            deadline,
            depends_on: ranks.into(),
        }
    }

    /// A wait for keys that any other rank may set. It ends with an error as soon as one of them is lost,
    /// and when all of them have left.
    pub fn any(deadline: Deadline) -> Self {
        Self {
            deadline,
            depends_on: Vec::new(),
        }
    }
}

/// A client of the key-value store that one rank serves, rank 0 at first.
///
/// When that rank is lost, another one takes over with the content of the store, and calls in flight are
/// retried there. Only [`add`](Self::add) and [`compare_and_set`](Self::compare_and_set) fail instead, since
/// they are not idempotent and may have been carried out. Keys that lost ranks had set are gone, and keys
/// that only they had taken or deleted may exist again.
///
/// Cheap to clone; clones share a connection, which any number of threads may use concurrently: a call
/// that waits does not delay others. Keys have 1 to 1,024 bytes; a request or its answer
/// takes at most 64 MiB.
///
/// Calls that do not wait for a key block for one round trip, and end with [`ErrorKind::Timeout`] if the
/// store does not answer within the deadline of the join. All calls can fail with
/// [`ErrorKind::GivenUp`] when the others went on without this rank, with [`ErrorKind::Closed`] when this
/// rank left, and with [`ErrorKind::InvalidArgument`] for a key or a message beyond the limits.
#[derive(Clone)]
pub struct Store {
    client: Arc<Client>,
    limit: Duration,
}

impl Store {
    pub(crate) fn new(client: Arc<Client>, limit: Duration) -> Self {
        Self { client, limit }
    }

    /// Sets a key, whether or not it had a value.
    ///
    /// # Errors
    /// [`ErrorKind::OutOfMemory`] when the store's limit is reached, and those of every call.
    pub fn set(&self, key: impl Into<String>, value: impl AsRef<[u8]>) -> Result<()> {
        let key = key.into();
        let pairs = vec![(key.clone(), Bytes::from(value.as_ref()))];
        self.ask("set", Some(&key), Request::Set { pairs })
            .map(drop)
    }

    /// Sets several keys in one round trip, in their order.
    ///
    /// # Errors
    /// As [`Store::set`]; none of the keys is set then.
    pub fn multi_set(&self, pairs: &[(String, Vec<u8>)]) -> Result<()> {
        self.multi_set_until(pairs, Deadline::after(self.limit))
    }

    /// As [`Store::multi_set`], with a deadline.
    pub(crate) fn multi_set_until(
        &self,
        pairs: &[(String, Vec<u8>)],
        deadline: Deadline,
    ) -> Result<()> {
        let pairs = pairs.iter();
        let pairs = pairs.map(|(key, value)| (key.clone(), Bytes::from(&value[..])));
        let request = Request::Set {
            pairs: pairs.collect(),
        };
        self.client.call("multi-set", request, deadline).map(drop)
    }

    /// The value of a key, once it has one.
    ///
    /// # Errors
    /// [`ErrorKind::Timeout`] at the deadline; [`ErrorKind::PeerLost`] or
    /// [`ErrorKind::PeerLeft`], naming the rank, when one that the wait depends on is gone and the
    /// key is not there; and those of every call.
    pub fn get(&self, key: &str, wait: &Wait) -> Result<Vec<u8>> {
        self.one("get", key, OnReady::Read, wait)
    }

    /// As [`Store::get`], and deletes the key atomically: of several callers that wait for a key, exactly
    /// one gets its value, the one that has waited longest.
    ///
    /// # Errors
    /// As [`Store::get`].
    pub fn take(&self, key: &str, wait: &Wait) -> Result<Vec<u8>> {
        self.one("take", key, OnReady::Take, wait)
    }

    /// The values of several keys, in the order of `keys`, once all have one.
    ///
    /// # Errors
    /// As [`Store::get`].
    pub fn multi_get(&self, keys: &[String], wait: &Wait) -> Result<Vec<Vec<u8>>> {
        self.values("multi-get", keys.to_vec(), OnReady::Read, wait)
    }

    /// As [`Store::multi_get`], and deletes all of the keys atomically. They must differ.
    ///
    /// # Errors
    /// As [`Store::get`]; nothing is deleted then.
    pub fn multi_take(&self, keys: &[String], wait: &Wait) -> Result<Vec<Vec<u8>>> {
        self.values("multi-take", keys.to_vec(), OnReady::Take, wait)
    }

    /// Waits until all of `keys` have values.
    ///
    /// # Errors
    /// As [`Store::get`].
    pub fn wait(&self, keys: &[String], wait: &Wait) -> Result<()> {
        self.park("wait", keys.to_vec(), OnReady::Nothing, wait)
            .map(drop)
    }

    /// Whether all of `keys` have values now.
    ///
    /// # Errors
    /// Those of every call.
    pub fn check<K: AsRef<str>>(&self, keys: &[K]) -> Result<bool> {
        let keys: Vec<_> = keys.iter().map(|key| key.as_ref().to_owned()).collect();
        match self.ask("check", None, Request::Check { keys })? {
            Reply::Flag(there) => Ok(there),
            _ => Err(unexpected("check")),
        }
    }

    /// Deletes a key. Returns whether it had a value.
    ///
    /// # Errors
    /// Those of every call.
    pub fn delete(&self, key: &str) -> Result<bool> {
        self.delete_until(key, Deadline::after(self.limit))
    }

    /// As [`Store::delete`], with a deadline.
    pub(crate) fn delete_until(&self, key: &str, deadline: Deadline) -> Result<bool> {
        let request = Request::Delete {
            key: key.to_owned(),
        };
        let answer = self.client.call("delete", request, deadline);
        match answer.map_err(|error| error.with_key(key))? {
            Reply::Flag(was_there) => Ok(was_there),
            _ => Err(unexpected("delete")),
        }
    }

    /// Adds to a counter, which begins at 0, and returns the sum.
    ///
    /// The counter is stored as 8 bytes, little-endian; [`Store::get`] sees them.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`] when the value is not of 8 bytes or would overflow, and
    /// those of [`Store::set`].
    pub fn add(&self, key: &str, amount: i64) -> Result<i64> {
        match self.ask(
            "add",
            Some(key),
            Request::Add {
                key: key.to_owned(),
                amount,
            },
        )? {
            Reply::Number(sum) => Ok(sum),
            _ => Err(unexpected("add")),
        }
    }

    /// Sets `key` to `new` if its value is `expected`, where `None` means no value.
    /// Otherwise nothing changes, and the inner error is the value that the key has.
    ///
    /// # Errors
    /// As [`Store::set`].
    pub fn compare_and_set(
        &self,
        key: &str,
        expected: Option<&[u8]>,
        new: impl AsRef<[u8]>,
    ) -> Result<Result<(), Option<Vec<u8>>>> {
        let request = Request::CompareAndSet {
            key: key.to_owned(),
            expected: expected.map(Bytes::from),
            new: new.as_ref().into(),
        };
        match self.ask("compare-and-set", Some(key), request)? {
            Reply::Done => Ok(Ok(())),
            Reply::Kept(current) => Ok(Err(current.map(|value| value.0.to_vec()))),
            _ => Err(unexpected("compare-and-set")),
        }
    }

    fn ask(&self, operation: &str, key: Option<&str>, request: Request) -> Result<Reply> {
        let answer = self
            .client
            .call(operation, request, Deadline::after(self.limit));
        answer.map_err(|error| match key {
            Some(key) => error.with_key(key),
            None => error,
        })
    }

    fn one(
        &self,
        operation: &'static str,
        key: &str,
        on_ready: OnReady,
        wait: &Wait,
    ) -> Result<Vec<u8>> {
        self.values(operation, vec![key.to_owned()], on_ready, wait)?
            .pop()
            .ok_or_else(|| unexpected(operation))
    }

    fn values(
        &self,
        operation: &'static str,
        keys: Vec<String>,
        on_ready: OnReady,
        wait: &Wait,
    ) -> Result<Vec<Vec<u8>>> {
        let count = keys.len();
        match self.park(operation, keys, on_ready, wait)? {
            Reply::Values(values) if values.len() == count => {
                Ok(values.into_iter().map(|value| value.0.to_vec()).collect())
            }
            _ => Err(unexpected(operation)),
        }
    }

    fn park(
        &self,
        operation: &'static str,
        keys: Vec<String>,
        on_ready: OnReady,
        wait: &Wait,
    ) -> Result<Reply> {
        let named = match &keys[..] {
            [] => String::new(),
            [one] => one.clone(),
            [first, rest @ ..] => format!("{first} and {} more", rest.len()),
        };
        let on = wire_ranks(&wait.depends_on)?;
        self.client
            .call(
                operation,
                Request::Wait { keys, on_ready, on },
                wait.deadline,
            )
            .map_err(
                // A refusal of the store names the first missing key.
                |error| match error.key() {
                    Some(_) => error,
                    None => error.with_key(named),
                },
            )
    }
}

fn unexpected(operation: &'static str) -> Error {
    Error::protocol("the store sent a reply of an unexpected type").with_operation(operation)
}

debug_fields!(Store);
