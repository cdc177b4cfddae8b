//! Names of groups, which every member derives locally.

use super::message::{Purpose, Request};
use crate::error::Rank;
use sha2::{Digest, Sha256};

/// Identifies a group within its job. Every member derives the same name, without communication.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct GroupName([u8; 16]);

impl GroupName {
    /// The group of all ranks.
    pub(crate) const WORLD: Self = Self([0; 16]);

    /// The name of the `number`-th group of these members that was derived from this one by the operation `how`.
    pub(crate) fn child(self, how: &str, members: &[Rank], number: u64) -> Self {
        let mut hash = Sha256::new();
        hash.update(self.0);
        // In the order of the list, not sorted: members that list the ranks differently must get different names,
        // which the store then reports as a conflict.
        hash.update(format!("{how} {number} {members:?}"));
        let digest: [u8; 32] = hash.finalize().into();
        let mut name = [0; 16];
        name.copy_from_slice(&digest[..16]);
        Self(name)
    }

    /// The bytes on the wire.
    pub(crate) fn to_bytes(self) -> [u8; 16] {
        self.0
    }

    /// The name of these bytes on the wire.
    pub(crate) fn from_bytes(bytes: [u8; 16]) -> Self {
        Self(bytes)
    }

    /// Whether `request` belongs to the group.
    pub(crate) fn is_of(self, request: &Request) -> bool {
        let prefix = self.key("");
        match request {
            // Hosts may still meet after the group of all ranks has failed, but no joint step can succeed.
            Request::Gather { id, purpose, .. } if self == Self::WORLD => {
                id.instance == 0 && *purpose == Purpose::Bind
            }
            Request::Gather { id, .. } => id.instance == self.instance(),
            Request::Wait { keys, .. } => keys.iter().any(|key| key.starts_with(&prefix)),
            Request::Set { pairs } => pairs.iter().any(|(key, _)| key.starts_with(&prefix)),
            _ => false,
        }
    }

    /// The group's instance number. The highest bit keeps it apart from groups that are counted.
    pub(super) fn instance(self) -> u64 {
        let [a, b, c, d, e, f, g, h, ..] = self.0;
        u64::from_le_bytes([a, b, c, d, e, f, g, h]) | 1 << 63
    }

    /// `key` in the namespace of this group, apart from other groups and the application.
    pub(super) fn key(self, key: &str) -> String {
        match self {
            Self::WORLD => format!("warplink/world/{key}"),
            Self(name) => format!("{:032x}/{key}", u128::from_be_bytes(name)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The group of all ranks may fail while others go on.
    #[test]
    fn a_request_is_of_one_group_or_none() {
        let pair = GroupName::WORLD.child("subgroup", &[0, 1], 0);
        let set = |key: String| Request::Set {
            pairs: vec![(key, b""[..].into())],
        };
        let groups = [GroupName::WORLD, pair, pair.child("survivors", &[0], 0)];
        for (place, group) in groups.into_iter().enumerate() {
            let own = set(group.key("p2p/0>1"));
            for (other, name) in groups.into_iter().enumerate() {
                assert_eq!(name.is_of(&own), place == other);
            }
            assert!(!group.is_of(&set("a key of the application".to_owned())));
        }
    }
}
