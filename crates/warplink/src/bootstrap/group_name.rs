//! The names of groups, which their members derive alike.

use super::message::Request;
use crate::error::Rank;
use sha2::{Digest, Sha256};

/// What tells a group from the others of its job. Its members derive it alike, each for itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct GroupName([u8; 16]);

impl GroupName {
    /// The group of all ranks.
    pub(crate) const WORLD: Self = Self([0; 16]);

    /// The name of a group that was made from this one in the way `how`, the `number`-th of the same
    /// members.
    pub(crate) fn child(self, how: &str, members: &[Rank], number: u64) -> Self {
        let mut hash = Sha256::new();
        hash.update(self.0);
        hash.update(format!("{how} {number} {members:?}"));
        let digest: [u8; 32] = hash.finalize().into();
        let mut name = [0; 16];
        name.copy_from_slice(&digest[..16]);
        Self(name)
    }

    /// As it goes over the wire.
    pub(crate) fn to_bytes(self) -> [u8; 16] {
        self.0
    }

    /// The name that goes over the wire as `bytes`.
    pub(crate) fn from_bytes(bytes: [u8; 16]) -> Self {
        Self(bytes)
    }

    /// Whether `request` is one of the group.
    pub(crate) fn is_of(self, request: &Request) -> bool {
        let prefix = self.key("");
        match request {
            Request::Gather { id, .. } => id.instance == self.instance(),
            Request::Wait { keys, .. } => keys.iter().any(|key| key.starts_with(&prefix)),
            Request::Set { pairs } => pairs.iter().any(|(key, _)| key.starts_with(&prefix)),
            _ => false,
        }
    }

    /// The number of the group among those of the same members, out of the way of counted ones.
    pub(super) fn instance(self) -> u64 {
        let [a, b, c, d, e, f, g, h, ..] = self.0;
        u64::from_le_bytes([a, b, c, d, e, f, g, h]) | 1 << 63
    }

    /// `key`, for this group alone: not of others, nor of the application.
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

    /// As where the group of all has failed, and others go on.
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
