//! Executes stream items one at a time, and determines the dependency each item is blocked on.

use super::state::{Item, Mode, Need, SimulatedRun};
use super::violation::Violations;
use crate::error::Rank;
use crate::program::ir::Collective;
use crate::program::rank_program::{OperationKind, TransferId};

impl SimulatedRun<'_> {
    /// Executes the next item of a stream; `false` if the queue is empty or the item is blocked.
    pub(super) fn advance(&mut self, stream: usize, violations: &mut Violations) -> bool {
        let Some(&item) = self.streams[stream].queue.front() else {
            return false;
        };
        match item {
            Item::Record(event) => {
                // The mark must follow every part of the post, so the clock advances first.
                if self.streams[stream].signalled {
                    self.tick(stream);
                }
                let snapshot = self.streams[stream].clock.snapshot(stream);
                let event = &mut self.events[event];
                event.reached = true;
                event.clock = Some(snapshot);
                if let Some(waiting) = event.waiting {
                    self.wake(waiting);
                }
            }
            Item::WaitEvent(event, operation) => {
                let event = &mut self.events[event];
                if !event.reached {
                    event.waiting = Some(stream);
                    return false;
                }
                // Each event has exactly one waiter, so its snapshot is moved out, which frees the clock's nodes
                // early.
                if let Some(mark) = event.clock.take() {
                    self.streams[stream].clock.learn(&mark);
                }
                // The wait itself counts as a step, so that a later snapshot of this stream differs from one taken
                // before the wait.
                self.tick(stream);
                self.streams[stream].last = Some(operation);
            }
            Item::Operation(operation) => {
                if !self.perform(stream, operation, violations) {
                    return false;
                }
                let state = &mut self.streams[stream];
                state.last = Some(operation);
                state.begun = false;
                if let Some(done) = &mut self.done {
                    done.push((state.rank, operation));
                }
            }
        }
        self.streams[stream].queue.pop_front();
        true
    }

    /// Executes an operation as far as its dependencies allow; returns whether it completed.
    fn perform(&mut self, stream: usize, operation: usize, violations: &mut Violations) -> bool {
        if !self.streams[stream].begun {
            if self.waits_for_engine(stream, operation).is_some() {
                return false;
            }
            self.tick(stream);
            self.streams[stream].begun = true;
            self.streams[stream].progress = 0;
            self.begin(stream, operation, violations);
        }
        let rank = self.streams[stream].rank;
        let positions = self.positions(rank, operation);
        loop {
            let position = self.streams[stream].progress;
            if position >= positions {
                break;
            }
            // Dependencies are polled in a fixed order. That cannot cause a false deadlock: none of them is consumed
            // by being satisfied, so the operation completes whenever all hold.
            if let Some(need) = self.need_at(stream, operation, position) {
                self.wait_for(stream, need);
                return false;
            }
            self.pass(stream, operation, position, violations);
            self.streams[stream].progress += 1;
        }
        let holder = self.holder(rank, operation);
        if let Some(holder) = holder {
            self.take_room(stream, operation, holder, violations);
        }
        self.finish(stream, operation, violations);
        if let Some(holder) = holder {
            self.leave_room(stream, operation, holder);
        }
        true
    }

    /// Dependency that blocks the operation at the head of a stream, if any.
    pub(super) fn need(&self, stream: usize, operation: usize) -> Option<Need> {
        if self.streams[stream].begun {
            self.need_at(stream, operation, self.streams[stream].progress)
        } else {
            self.waits_for_engine(stream, operation)
        }
    }

    fn waits_for_engine(&self, stream: usize, operation: usize) -> Option<Need> {
        let engine = &self.engines[self.streams[stream].rank];
        let turn = engine.order.binary_search(&operation).ok()?;
        (turn > engine.done).then(|| Need::Engine(engine.order[turn - 1]))
    }

    /// Number of dependencies an operation may have to satisfy in sequence. A post first waits for the signals that
    /// it repeats in a graph, then for those of the peers.
    fn positions(&self, rank: Rank, operation: usize) -> usize {
        match &self.ranks[rank].operations[operation].kind {
            OperationKind::Post(group) => 2 * group.len(),
            OperationKind::PostMatmul(it) => it.group.len(),
            OperationKind::Wait(group) => group.len(),
            OperationKind::Collective(_) | OperationKind::Kernel(_) => 1,
            _ => 0,
        }
    }

    /// Dependency of an operation at `position`, if it is not satisfied yet.
    fn need_at(&self, stream: usize, operation: usize, position: usize) -> Option<Need> {
        let rank = self.streams[stream].rank;
        match &self.ranks[rank].operations[operation].kind {
            OperationKind::Post(group) if position < group.len() => {
                let id = group[position];
                let again = self.again(rank, operation, position)?;
                // The word of an end that only signals is set by its peer once the copy is done, which is completion
                // of the post before.
                let done = self.ends[rank][id].incoming.has(again - 1);
                (!done).then_some(Need::Peer(id, again - 1))
            }
            OperationKind::Post(group) => {
                self.needs_peer(rank, operation, group, position - group.len())
            }
            OperationKind::PostMatmul(it) => self.needs_peer(rank, operation, &it.group, position),
            OperationKind::Wait(group) => {
                let id = *group.get(position)?;
                let transfer = &self.ranks[rank].transfers[id];
                let number = self.links.numbers[rank].at(operation, position);
                let end = &self.ends[rank][id];
                if transfer.initiates() {
                    return end.completed.missing(number).map(|n| Need::Own(id, n));
                }
                // In a graph, a wait on another stream starts from an event that follows the first post, so it cannot
                // be satisfied before that.
                if self.mode == Mode::Captured && !end.placed {
                    return Some(Need::Own(id, 1));
                }
                end.incoming.missing(number).map(|n| Need::Peer(id, n))
            }
            OperationKind::Collective(_) | OperationKind::Kernel(_) => {
                let number = self.collective_number(rank, operation)?;
                let meeting = &self.collectives[number];
                let members = &self.links.meetings.all[number];
                if meeting.count == members.len() {
                    return None;
                }
                let absent = meeting.present.iter().position(|present| !present)?;
                let (absent, _) = members.call(absent)?;
                Some(Need::Collective(absent, number))
            }
            _ => None,
        }
    }

    /// Number of a post that, in a graph, waits for completion of the previous post: one that only signals, and is
    /// not the first of its transfer.
    fn again(&self, rank: Rank, operation: usize, position: usize) -> Option<usize> {
        let &id = self.ranks[rank].operations[operation]
            .kind
            .posted()
            .get(position)?;
        let transfer = &self.ranks[rank].transfers[id];
        let number = self.links.numbers[rank].at(operation, position);
        let again = self.mode == Mode::Captured && number > 1 && !transfer.initiates();
        again.then_some(number)
    }

    fn needs_peer(
        &self,
        rank: Rank,
        operation: usize,
        group: &[TransferId],
        position: usize,
    ) -> Option<Need> {
        let id = *group.get(position)?;
        let transfer = &self.ranks[rank].transfers[id];
        let number = self.links.numbers[rank].at(operation, position);
        let there = !transfer.initiates() || self.ends[rank][id].incoming.has(number);
        (!there).then_some(Need::Peer(id, number))
    }

    /// Registers a stream to be woken when its dependency may be satisfied.
    fn wait_for(&mut self, stream: usize, need: Need) {
        let rank = self.streams[stream].rank;
        match need {
            Need::Peer(id, _) => self.ends[rank][id].incoming.wait(stream),
            Need::Own(id, _) => self.ends[rank][id].completed.wait(stream),
            Need::Collective(_, number) => self.collectives[number].waiting.push(stream),
            // The previous engine operation wakes the next one; recording the mark wakes its waiter.
            Need::Engine(_) | Need::Event(_) => {}
        }
    }

    /// Performs the non-blocking part of an operation: signals, and its arrival at a collective or kernel.
    fn begin(&mut self, stream: usize, operation: usize, violations: &mut Violations) {
        let (rank, ranks) = (self.streams[stream].rank, self.ranks);
        match &ranks[rank].operations[operation].kind {
            OperationKind::Post(group) => {
                for (position, &id) in group.iter().enumerate() {
                    let transfer = &ranks[rank].transfers[id];
                    // These signals have a dependency and are sent in `pass`, once it is satisfied.
                    if self.again(rank, operation, position).is_some() {
                        continue;
                    }
                    let number = self.links.numbers[rank].at(operation, position);
                    if transfer.is_engine() {
                        let partner = self.links.partners[rank][id];
                        // Both ends write, as either end may wait for the start of the other one's call; only a
                        // receive learns the clock from it.
                        let clock = self.streams[stream].clock.clone();
                        let word = &mut self.ends[transfer.peer][partner].incoming;
                        let woken = word.write(number, stream, &clock);
                        self.wake_all(woken);
                    } else if !transfer.initiates() {
                        self.signal(stream, (operation, id, number), violations);
                    }
                }
            }
            OperationKind::Collective(it) => {
                if let Some(number) = self.collective_number(rank, operation) {
                    let root = match it.collective {
                        Collective::Broadcast(root) => Some(root),
                        _ => None,
                    };
                    self.arrive(stream, number, root);
                }
            }
            OperationKind::Kernel(_) => {
                if let Some(number) = self.collective_number(rank, operation) {
                    self.arrive(stream, number, None);
                }
            }
            _ => {}
        }
    }

    /// Performs the effects of an operation once it has passed `position`.
    fn pass(
        &mut self,
        stream: usize,
        operation: usize,
        position: usize,
        violations: &mut Violations,
    ) {
        if self.mode == Mode::Eager {
            return;
        }
        let (rank, ranks) = (self.streams[stream].rank, self.ranks);
        let OperationKind::Post(group) = &ranks[rank].operations[operation].kind else {
            return;
        };
        if let (Some(number), Some(&id)) =
            (self.again(rank, operation, position), group.get(position))
        {
            self.signal(stream, (operation, id, number), violations);
        }
        // Other streams may be blocked behind the last member of the group.
        if position + 1 == group.len() {
            for &id in group {
                self.ends[rank][id].placed = true;
                let woken = self.ends[rank][id].completed.woken();
                self.wake_all(woken);
            }
        }
    }
}
