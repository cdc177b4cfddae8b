//! Messages longer than a program's tensors, in pieces.

use super::MAX_MESSAGES;
use std::ops::Range;

/// Launches for messages of `bytes` each, in pieces of at most `most` bytes: of each piece, the message and the bytes.
///
/// A launch has the n-th pieces of all messages or of none. Ranks have different messages and thus other launches, but the
/// n-th pieces wait only for launches with earlier ones, and those wait for no later piece: no circle of ranks waits.
pub(super) fn launches(
    bytes: &[usize],
    most: usize,
) -> impl Iterator<Item = impl Iterator<Item = (usize, Range<usize>)>> {
    // Empty messages go, too, since their other end may not be empty.
    let rounds = move |bytes: usize| bytes.div_ceil(most).max(1);
    let all = bytes.iter().copied().map(rounds).max().unwrap_or(0);
    let in_one = (MAX_MESSAGES / bytes.len().max(1)).max(1);
    let pieces_of = move |round: usize| {
        let alive = bytes.iter().enumerate();
        let alive = alive.filter(move |&(_, &bytes)| round < rounds(bytes));
        alive.map(move |(message, &bytes)| {
            let start = round * most;
            (message, start..bytes.min(start + most))
        })
    };
    let firsts = (0..all).step_by(in_one);
    firsts.map(move |first| (first..all.min(first + in_one)).flat_map(pieces_of))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::HashMap;

    const MOST: usize = 10;

    /// The first launch that a rank cannot end, when every rank executes its launches in order.
    fn stuck(world: usize, messages: &[(usize, usize, usize)]) -> Option<usize> {
        // By rank: its launches, as the sender, the receiver and the bytes of each piece.
        let ranks: Vec<Vec<Vec<_>>> = (0..world)
            .map(|rank| {
                let mut ends: Vec<_> = messages.iter().collect();
                ends.retain(|&&(from, to, _)| from == rank || to == rank);
                // The order of different pairs differs between ranks.
                ends.sort_by_key(|&&(from, to, _)| (from + to + rank) % world);
                let bytes: Vec<usize> = ends.iter().map(|end| end.2).collect();
                let launches = launches(&bytes, MOST).map(|pieces| {
                    let pieces = pieces.map(|(end, range)| (ends[end].0, ends[end].1, range));
                    let pieces: Vec<_> = pieces.collect();
                    assert!(pieces.len() <= MAX_MESSAGES);
                    pieces
                });
                launches.collect()
            })
            .collect();
        let mut ended = vec![0; world];
        loop {
            // Pieces that each rank has begun, in the order of their pair.
            let begun: Vec<HashMap<_, Vec<_>>> = ranks
                .iter()
                .zip(&ended)
                .map(|(launches, ended)| {
                    let mut pairs: HashMap<_, Vec<_>> = HashMap::new();
                    for (from, to, range) in launches.iter().take(ended + 1).flatten() {
                        pairs.entry((*from, *to)).or_default().push(range.clone());
                    }
                    pairs
                })
                .collect();
            let mut progress = false;
            for rank in 0..world {
                let is_over = begun[rank].iter().all(|(pair, own)| {
                    let peer = if pair.0 == rank { pair.1 } else { pair.0 };
                    let theirs = begun[peer].get(pair).map_or(&[][..], |found| &found[..]);
                    let common = own.len().min(theirs.len());
                    assert_eq!(own[..common], theirs[..common], "pieces of {pair:?}");
                    own.len() <= theirs.len()
                });
                if is_over && ended[rank] < ranks[rank].len() {
                    ended[rank] += 1;
                    progress = true;
                }
            }
            if !progress {
                return (0..world).find(|&rank| ended[rank] < ranks[rank].len());
            }
        }
    }

    #[test]
    fn both_ranks_send_more_pieces_than_a_launch_has() {
        let many = MOST * (MAX_MESSAGES + 1);
        assert_eq!(stuck(2, &[(0, 1, many), (1, 0, many)]), None);
        assert_eq!(
            stuck(3, &[(0, 1, many), (1, 2, many), (2, 0, many), (2, 1, 0)]),
            None
        );
    }

    proptest! {
        #[test]
        fn every_rank_ends_its_launches(
            world in 2..5_usize,
            drawn in prop::collection::vec((0..4_usize, 1..4_usize, 0..900_usize), 0..60),
        ) {
            let pairs = drawn.into_iter().map(|(from, distance, bytes)| {
                let from = from % world;
                (from, (from + 1 + distance % (world - 1)) % world, bytes)
            });
            let messages: Vec<_> = pairs.collect();
            prop_assert_eq!(stuck(world, &messages), None);
        }
    }
}
