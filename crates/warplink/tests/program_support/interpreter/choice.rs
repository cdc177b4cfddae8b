//! Choices of the integers in memory that kernels read as counts and rows.

use super::schedule::mix;
use rustc_hash::FxBuildHasher;
use std::hash::{BuildHasher as _, Hash};
use warplink::program::{TensorId, TensorInstance};

/// How inputs that kernels read as integers are chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Choice {
    pub(crate) way: Way,
    /// A word that is out of its range in all runs, and its value.
    pub(crate) beyond: Option<(Integer, i64)>,
}

/// Values within the bounds. Both ends of a message may differ, all rows of a rank may go to one, and no two to the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Way {
    /// One edge of all ranges.
    Edge(u64),
    /// The greatest values on ranks of one parity, 0 on the others.
    Ranks(u64),
    /// The greatest values in tensors with this value of a bit of their number, 0 in the others.
    Tensors(u32, u64),
    /// The greatest value for one word of each tensor, 0 for the others.
    One(usize),
    /// The same edge for all words of a run.
    Runs(u64),
    /// The same value for all words of a rank's tensor.
    Equal(u64),
    /// Words of a rank's tensor count up from anywhere or down, so that they differ as far as the range allows.
    Permuted(u64),
    /// Any edge for each word.
    Mixed(u64),
    /// Any value for each word.
    Any(u64),
    /// Any value for one word in three, 0 for the others: where what one word leaves bounds another, few other choices fit.
    Sparse(u64),
}

/// An element of a rank's input.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Integer {
    pub(crate) rank: usize,
    pub(crate) tensor: TensorId,
    pub(crate) element: usize,
}

/// The choice where others do not matter.
pub(crate) const SOME_VALUES: Choice = Choice::within(Way::Mixed(4));

/// Ways of all edges, on all ranks or some, in all words or some.
const WAYS: [Way; 18] = [
    Way::Edge(1),
    Way::Permuted(1),
    Way::Edge(0),
    Way::Equal(1),
    Way::Ranks(0),
    Way::Ranks(1),
    Way::Mixed(1),
    Way::Edge(2),
    Way::One(0),
    Way::Runs(1),
    Way::Edge(3),
    Way::Tensors(0, 0),
    Way::Tensors(0, 1),
    Way::Tensors(1, 0),
    Way::Tensors(1, 1),
    Way::One(1),
    Way::Any(1),
    Way::Mixed(2),
];

impl Choice {
    pub(crate) const fn within(way: Way) -> Self {
        Self { way, beyond: None }
    }

    /// An integer in a word that nothing wrote: 0 in all of them, or any. In all orders it is the same.
    pub(crate) fn left_behind(self, word: impl Hash, most: i64) -> i64 {
        let seed = mix(FxBuildHasher.hash_one(self.way));
        let any = mix(seed ^ mix(FxBuildHasher.hash_one(word))) % (most as u64 + 1);
        [0, any as i64][(seed % 2) as usize]
    }

    /// All choices within the bounds: first the edges, and then random ones without an end.
    pub(crate) fn all(seed: u64) -> impl Iterator<Item = Self> {
        let random = (0..).map(move |number| {
            let seed = mix(seed ^ mix(number + 100));
            match number % 7 {
                0 => Way::Permuted(seed),
                1 => Way::Equal(seed),
                2 => Way::Runs(seed),
                3 => Way::Any(seed),
                4 => Way::Sparse(seed),
                _ => Way::Mixed(seed),
            }
        });
        WAYS.into_iter().chain(random).map(Self::within)
    }
}

/// The input of a rank in a run: small numbers, so that sums and products are exact for long.
fn number(run: usize, rank: usize, tensor: TensorId, element: usize) -> f64 {
    ((7 * element + 5 * tensor + 3 * rank + 4 * run) % 11 + 1) as f64
}

/// The input of a tensor, which may have a bound: then a value within it, or the one beyond it, as the choice says.
pub(crate) fn input_of(
    instance: &TensorInstance,
    choice: Choice,
    (run, rank): (usize, usize),
    tensor: TensorId,
    element: usize,
) -> f64 {
    let Some(most) = instance.value_bound else {
        return number(run, rank, tensor, element);
    };
    let word = Integer {
        rank,
        tensor,
        element,
    };
    match choice.beyond {
        Some((beyond, value)) if beyond == word => value as f64,
        _ => choice.way.value(run, word, most) as f64,
    }
}

impl Way {
    fn value(self, run: usize, word: Integer, most: i64) -> i64 {
        let edges = [0, most, 1.min(most), (most - 1).max(0), most / 2];
        let edge = |which: u64| edges[(which % 5) as usize];
        let most_if = |is: bool| if is { most } else { 0 };
        let any = |of: u64| (of % (most as u64 + 1)) as i64;
        let list = (run << 32 | word.rank << 24 | word.tensor << 16) as u64;
        let place = list | word.element as u64;
        match self {
            Self::Edge(which) => edge(which),
            Self::Ranks(parity) => most_if(word.rank as u64 % 2 == parity),
            Self::Tensors(bit, value) => most_if(word.tensor as u64 >> bit & 1 == value),
            Self::One(element) => most_if(word.element == element),
            Self::Runs(seed) => edge(mix(seed ^ mix(run as u64))),
            Self::Equal(seed) => any(mix(seed ^ mix(list))),
            Self::Permuted(seed) => {
                let first = mix(seed ^ mix(list)) >> 2;
                let steps = word.element as u64 * [1, most as u64][(first % 2) as usize];
                any(first + steps)
            }
            Self::Mixed(seed) => edge(mix(seed << 48 ^ place)),
            Self::Any(seed) => any(mix(seed ^ mix(place))),
            Self::Sparse(seed) => match mix(seed ^ mix(place)) {
                of if of % 3 == 0 => any(of / 3),
                _ => 0,
            },
        }
    }
}
