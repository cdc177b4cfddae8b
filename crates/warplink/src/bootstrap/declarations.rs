//! Detecting ranks that create different groups of a communicator.
//!
//! Creating a group does not communicate: each member derives its name. A rank that passes another list, or creates
//! groups in another order, derives another name, and both sides would wait for each other under different names. So
//! every rank declares the groups that it creates, without waiting, and the store compares them: two ranks must create
//! their common groups in the same order.

use super::message::{GroupDeclaration, StoreEvent};
use std::collections::HashMap;
use std::sync::Arc;

/// A group's name, as it goes over the wire.
type Name = [u8; 16];

/// Identifies one of the groups that two ranks have in common: the parent, the two ranks, and the number of such groups
/// before it.
type DeclarationKey = (Name, u32, u32, u64);

/// Groups that ranks declared.
#[derive(Debug, Default)]
pub(crate) struct Declarations {
    /// Groups that one of the two ranks has declared and the other has not yet, with the rank that did.
    open: HashMap<DeclarationKey, (u32, Arc<GroupDeclaration>)>,
    /// Conflicts found, for members that declare the group later.
    conflicts: HashMap<Name, StoreEvent>,
}

impl Declarations {
    /// `rank` creates a group. Returns events and their receivers.
    pub(crate) fn declare(
        &mut self,
        rank: u32,
        declaration: GroupDeclaration,
    ) -> Vec<(u32, StoreEvent)> {
        let declaration = Arc::new(declaration);
        let mut events = Vec::new();
        if let Some(conflict) = self.conflicts.get(&declaration.name) {
            events.push((rank, conflict.clone()));
        }
        for (&member, &number) in declaration.members.iter().zip(&declaration.numbers) {
            if member == rank {
                continue;
            }
            let (low, high) = (rank.min(member), rank.max(member));
            let key = (declaration.parent, low, high, number);
            match self.open.remove(&key) {
                Some((who, other)) if who != rank => {
                    if other.name != declaration.name {
                        events.extend(self.conflict((rank, &declaration), (member, &other)));
                    }
                }
                _ => drop(self.open.insert(key, (rank, declaration.clone()))),
            }
        }
        events
    }

    /// `rank` is gone.
    pub(crate) fn forget(&mut self, rank: u32) {
        self.open
            // Its counterparts will never be declared, so the entries would stay for the rest of the job.
            .retain(|&(_, low, high, _), _| low != rank && high != rank);
    }

    /// Two ranks created different groups: an event for every member of either.
    fn conflict(
        &mut self,
        (rank, own): (u32, &GroupDeclaration),
        (member, other): (u32, &GroupDeclaration),
    ) -> Vec<(u32, StoreEvent)> {
        let message = format!(
            "rank {rank} of the job creates a subgroup of the job's ranks {:?}, and rank {member} one of {:?}; \
             expected the same list from every member, in the same order of subgroups",
            own.members, other.members
        );
        let event = StoreEvent::Conflict {
            groups: vec![own.name, other.name],
            ranks: [rank, member],
            message,
        };
        self.conflicts.insert(own.name, event.clone());
        self.conflicts.insert(other.name, event.clone());
        let mut receivers: Vec<u32> = [&own.members[..], &other.members[..]].concat();
        receivers.sort_unstable();
        receivers.dedup();
        receivers
            .into_iter()
            .map(|to| (to, event.clone()))
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn group(name: u8, members: &[u32], numbers: &[u64]) -> GroupDeclaration {
        GroupDeclaration {
            parent: [0; 16],
            name: [name; 16],
            members: members.to_vec(),
            numbers: numbers.to_vec(),
        }
    }

    #[test]
    fn groups_that_are_alike_leave_nothing_behind() {
        let mut declarations = Declarations::default();
        for rank in [2, 0, 1] {
            let events = declarations.declare(rank, group(1, &[0, 1, 2], &[0; 3]));
            assert!(events.is_empty());
            let other = u64::from(rank != 2);
            if rank != 2 {
                let events = declarations.declare(rank, group(2, &[1, 0], &[other; 2]));
                assert!(events.is_empty());
            }
        }
        assert!(declarations.open.is_empty() && declarations.conflicts.is_empty());
    }

    #[test]
    fn all_members_learn_of_another_list_and_another_order() {
        let mut declarations = Declarations::default();
        assert!(
            declarations
                .declare(0, group(1, &[0, 1, 2], &[0; 3]))
                .is_empty()
        );
        let events = declarations.declare(1, group(2, &[0, 1, 3], &[0; 3]));
        let to: Vec<u32> = events.iter().map(|(to, _)| *to).collect();
        assert_eq!(to, [0, 1, 2, 3]);
        // A member that declares it later is notified then.
        let late = declarations.declare(3, group(2, &[0, 1, 3], &[0; 3]));
        assert_eq!(late.len(), 1);
        assert!(matches!(
            &late[0],
            (3, StoreEvent::Conflict { ranks: [1, 0], .. })
        ));
        declarations.forget(0);
        declarations.forget(1);
        declarations.forget(3);
        assert!(declarations.open.is_empty());
    }
}
