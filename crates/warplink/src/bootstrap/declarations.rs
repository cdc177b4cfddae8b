//! Finding ranks that make different groups of a communicator.
//!
//! Making a group does not communicate, so its members derive its name each for itself. A rank that
//! gives another list, or makes groups in another order, derives another name, and would wait for ranks
//! that wait for it under theirs. So every rank declares the groups that it makes, without waiting, and
//! the store compares: what two ranks make together, they make in the same order.

use super::message::{Event, GroupDeclaration};
use std::collections::HashMap;
use std::sync::Arc;

/// A group's name, as it goes over the wire.
type Name = [u8; 16];

/// Which of the groups that two ranks make of a parent: the parent, the ranks, and how many before it.
type Key = (Name, u32, u32, u64);

/// What ranks declared.
#[derive(Debug, Default)]
pub(crate) struct Declarations {
    /// What one of two ranks declared and the other has not yet, and which one did.
    open: HashMap<Key, (u32, Arc<GroupDeclaration>)>,
    /// What is wrong with a group, for its members that come later.
    conflicts: HashMap<Name, Event>,
}

impl Declarations {
    /// `rank` makes a group. Returns what is to be told, and to whom.
    pub(crate) fn declare(
        &mut self,
        rank: u32,
        declaration: GroupDeclaration,
    ) -> Vec<(u32, Event)> {
        let declaration = Arc::new(declaration);
        let mut told = Vec::new();
        if let Some(conflict) = self.conflicts.get(&declaration.name) {
            told.push((rank, conflict.clone()));
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
                        told.extend(self.conflict((rank, &declaration), (member, &other)));
                    }
                }
                _ => drop(self.open.insert(key, (rank, declaration.clone()))),
            }
        }
        told
    }

    /// Nobody meets `rank` any more.
    pub(crate) fn forget(&mut self, rank: u32) {
        self.open
            .retain(|&(_, low, high, _), _| low != rank && high != rank);
    }

    /// Two ranks make different groups. Every member of either is to know.
    fn conflict(
        &mut self,
        (rank, own): (u32, &GroupDeclaration),
        (member, other): (u32, &GroupDeclaration),
    ) -> Vec<(u32, Event)> {
        let message = format!(
            "rank {rank} of the job makes a subgroup of the job's ranks {:?}, and rank {member} one of {:?}; \
             expected the same list from every member, in the same order of subgroups",
            own.members, other.members
        );
        let event = Event::Conflict {
            groups: vec![own.name, other.name],
            ranks: [rank, member],
            message,
        };
        self.conflicts.insert(own.name, event.clone());
        self.conflicts.insert(other.name, event.clone());
        let mut told: Vec<u32> = [&own.members[..], &other.members[..]].concat();
        told.sort_unstable();
        told.dedup();
        told.into_iter().map(|to| (to, event.clone())).collect()
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
            let told = declarations.declare(rank, group(1, &[0, 1, 2], &[0; 3]));
            assert!(told.is_empty());
            let other = u64::from(rank != 2);
            if rank != 2 {
                let told = declarations.declare(rank, group(2, &[1, 0], &[other; 2]));
                assert!(told.is_empty());
            }
        }
        assert!(declarations.open.is_empty() && declarations.conflicts.is_empty());
    }

    #[test]
    fn another_list_and_another_order_are_told_to_all_members() {
        let mut declarations = Declarations::default();
        assert!(
            declarations
                .declare(0, group(1, &[0, 1, 2], &[0; 3]))
                .is_empty()
        );
        let told = declarations.declare(1, group(2, &[0, 1, 3], &[0; 3]));
        let to: Vec<u32> = told.iter().map(|(to, _)| *to).collect();
        assert_eq!(to, [0, 1, 2, 3]);
        // One that comes later is told when it does.
        let late = declarations.declare(3, group(2, &[0, 1, 3], &[0; 3]));
        assert_eq!(late.len(), 1);
        assert!(matches!(
            &late[0],
            (3, Event::Conflict { ranks: [1, 0], .. })
        ));
        declarations.forget(0);
        declarations.forget(1);
        declarations.forget(3);
        assert!(declarations.open.is_empty());
    }
}
