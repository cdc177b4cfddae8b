//! Transfers: what is shared, posted and waited for.

use super::scope::{Instances, Named};
use super::{TAG_LIMIT, Unroller};
use crate::program::diagnostic::{Diagnostic, DiagnosticKind};
use crate::program::ir::{
    Backend, Direction, Each, PostedMatmul, Protocol, ShareItem, Transfer, TransferRef,
};
use crate::program::rank_program::{
    ExchangeId, OperationKind, StoredMatmul, TransferId, TransferInstance,
};
use std::collections::HashSet;
use std::sync::Arc;

impl<'p> Unroller<'p> {
    pub(super) fn share(&mut self, items: &'p [ShareItem]) -> Result<(), Diagnostic> {
        let position = self.site.position();
        let exchange = self.made.exchanges.len();
        // Numbered before its transfers, which refer to it.
        self.made.exchanges.push(Vec::new());
        self.nodes(items, &mut |unroller, transfer| {
            unroller.declare_transfer(transfer, exchange)
        })?;
        self.at(position);
        // Where a branch leaves nothing to share, there is nothing to do.
        if self.made.exchanges[exchange].is_empty() {
            self.made.exchanges.pop();
        } else {
            self.enqueue(OperationKind::Share(exchange));
        }
        Ok(())
    }

    pub(super) fn declare_transfer(
        &mut self,
        transfer: &'p Transfer,
        exchange: ExchangeId,
    ) -> Result<(), Diagnostic> {
        let name = transfer.name.as_str();
        let view = self.view(&transfer.tensor)?;
        let range = self.range(&view, "transferred")?;
        if transfer.direction == Direction::Receive {
            self.writable(&view)?;
        }
        let peer = self.number_below(&transfer.peer, self.made.world, "peer")?;
        if self.lookup(name).is_some() || !crate::program::text::is_name(name) {
            let message = format!(
                "'{name}' cannot name a transfer; expected a word that has no meaning here"
            );
            return Err(self.malformed(message));
        }
        let tag = self.integer(&transfer.tag)?;
        // Beyond these, tags would no longer differ in the bits that travel.
        if !(-TAG_LIMIT..TAG_LIMIT).contains(&tag) {
            let message = format!("the tag of '{name}' is {tag}; expected -2^62 to 2^62 - 1");
            return Err(self.diagnostic(DiagnosticKind::OutOfBounds, message));
        }
        let id = self.made.transfers.len();
        let path: Vec<usize> = self.loops.iter().map(|open| open.id).collect();
        let key: Vec<i64> = self.loops.iter().map(|open| open.value).collect();
        let named = self.transfers.entry(name).or_insert_with(|| Named {
            name: Arc::from(name),
            paths: Vec::new(),
            instances: Instances::default(),
        });
        let shared_name = named.name.clone();
        if !named.paths.contains(&path) {
            named.paths.push(path);
        }
        if let Some(before) = named.instances.insert(key, id) {
            let position = self.made.transfers[before].site.position();
            let message = format!(
                "a transfer '{name}' with these indices is already shared in {position}; expected \
                 another name"
            );
            return Err(self.malformed(message));
        }
        let ordinal = self
            .ordinals
            .entry((transfer.direction, peer, tag))
            .or_default();
        let site = self.site.clone();
        self.made.transfers.push(TransferInstance {
            name: shared_name,
            direction: transfer.direction,
            range,
            dtype: view.dtype,
            peer,
            tag,
            // Ends with equal direction, peer and tag match in order of declaration.
            ordinal: *ordinal,
            backend: transfer.backend,
            exchange,
            site,
        });
        *ordinal += 1;
        self.made.exchanges[exchange].push(id);
        self.posts.push(0);
        Ok(())
    }

    pub(super) fn post(&mut self, list: &'p [Each<TransferRef>]) -> Result<(), Diagnostic> {
        let mut group: Vec<TransferId> = Vec::new();
        let mut seen = HashSet::new();
        self.each(list, |unroller, reference| {
            let id = unroller.posted(reference, &mut seen)?;
            let tensor = unroller.made.transfers[id].range.tensor;
            if let Some(position) = unroller.deallocated.get(&tensor) {
                let message = format!(
                    "{reference} accesses '{}', which is deallocated in {position}",
                    unroller.made.tensors[tensor].name
                );
                return Err(unroller.diagnostic(DiagnosticKind::UseAfterDeallocate, message));
            }
            group.push(id);
            Ok(())
        })?;
        let engine = |id: &TransferId| self.made.transfers[*id].is_engine();
        // The engine's group is one call of its library, in which other transfers have no place.
        if group.iter().any(engine) && !group.iter().all(engine) {
            let message = "a group has transfers via nccl and others; expected one post for each";
            return Err(self.diagnostic(DiagnosticKind::Mismatch, message));
        }
        for id in &group {
            self.posts[*id] += 1;
        }
        // Loops may be empty on some ranks, such as the first of a pipeline.
        if !group.is_empty() {
            self.enqueue(OperationKind::Post(group));
        }
        Ok(())
    }

    pub(super) fn post_matmul(&mut self, each: &'p Each<PostedMatmul>) -> Result<(), Diagnostic> {
        let mut seen = HashSet::new();
        let mut whole: Option<OperationKind> = None;
        self.each(std::slice::from_ref(each), |unroller, posted| {
            let id = unroller.posted(&posted.send, &mut seen)?;
            let send = &unroller.made.transfers[id];
            let stored =
                (send.direction, send.backend) == (Direction::Send, Backend::Direct(Protocol::Put));
            if !stored {
                let message = format!(
                    "{} is not a send via put; expected one to store a matmul where it goes",
                    posted.send
                );
                return Err(unroller.malformed(message));
            }
            let operands = unroller.operands(&posted.product)?;
            let next = unroller.stored_matmul(id, &operands)?;
            let alike = match &mut whole {
                None => {
                    whole = Some(next);
                    true
                }
                Some(whole) => join(whole, &next),
            };
            if alike {
                return Ok(());
            }
            let message = format!(
                "the matmul of {} differs from those before it in the group; expected the same \
                 size, right operand and bias",
                posted.send
            );
            Err(unroller.diagnostic(DiagnosticKind::Mismatch, message))
        })?;
        if let Some(whole) = whole {
            for id in whole.posted() {
                self.posts[*id] += 1;
            }
            self.enqueue(whole);
        }
        Ok(())
    }

    /// A transfer that is posted, once in a group.
    fn posted(
        &self,
        reference: &'p TransferRef,
        seen: &mut HashSet<TransferId>,
    ) -> Result<TransferId, Diagnostic> {
        let id = self.transfer(reference, DiagnosticKind::Malformed)?;
        if seen.insert(id) {
            return Ok(id);
        }
        let message = format!("{reference} is posted twice in one group; expected once");
        Err(self.malformed(message))
    }

    pub(super) fn wait(&mut self, list: &'p [Each<TransferRef>]) -> Result<(), Diagnostic> {
        let mut group: Vec<TransferId> = Vec::new();
        self.each(list, |unroller, reference| {
            let id = unroller.transfer(reference, DiagnosticKind::UnpostedWait)?;
            if unroller.posts[id] == 0 {
                let message = format!(
                    "wait for '{reference}', which has not been posted; expected a post before the wait"
                );
                return Err(unroller.diagnostic(DiagnosticKind::UnpostedWait, message));
            }
            group.push(id);
            Ok(())
        })?;
        if !group.is_empty() {
            self.enqueue(OperationKind::Wait(group));
        }
        Ok(())
    }
}

/// Adds the products of `next` to those of `whole`, if they are alike.
fn join(whole: &mut OperationKind, next: &OperationKind) -> bool {
    let (OperationKind::PostMatmul(whole), OperationKind::PostMatmul(next)) = (whole, next) else {
        return false;
    };
    let shared = |it: &StoredMatmul| (it.b, it.bias, it.spec);
    let alike = shared(whole) == shared(next);
    if alike {
        whole.group.extend(&next.group);
        whole.a.extend(&next.a);
    }
    alike
}
