//! Agreement of ranks that bind a program: whether all bring the same program, and whether each rank's part of
//! binding succeeded.

use super::context::RankContext;
use crate::error::{Error, Rank, Result};
use crate::program::ir::Program;
use crate::program::parameters::Parameters;
use serde::{Deserialize, Serialize};

/// Digest of the program that a rank binds: must be equal on every rank.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Digest {
    name: String,
    /// Hash of every line of the program's text.
    lines: Vec<u32>,
    /// Values of the parameters, in the order of the program.
    parameters: Vec<(String, String)>,
    /// Optional tensors that are bound.
    tensors: Vec<String>,
    streams: usize,
}

impl Digest {
    pub(crate) fn of(program: &Program, parameters: &Parameters, streams: usize) -> Result<Self> {
        let values = program.parameters.iter().map(|parameter| {
            let value = parameters.resolve(parameter)?;
            Ok((parameter.name.clone(), value.to_string()))
        });
        Ok(Self {
            name: program.name.clone(),
            // As printed from the tree, so that comments and layout of the source files may differ between ranks.
            lines: program.to_string().lines().map(hash).collect(),
            parameters: values.collect::<Result<_>>()?,
            tensors: parameters.tensors().map(str::to_owned).collect(),
            streams,
        })
    }

    /// Adds a value that must be equal on every rank.
    pub(crate) fn with(mut self, name: &str, value: impl ToString) -> Self {
        self.parameters.push((name.to_owned(), value.to_string()));
        self
    }

    /// Difference between this digest, which `rank` brings, and rank 0's.
    fn difference(&self, rank: Rank, first: &Self) -> Option<String> {
        let name = &self.name;
        if *name != first.name {
            return Some(format!(
                "rank {rank} binds '{name}', rank 0 binds '{}'",
                first.name
            ));
        }
        // Hashes by line cost a few bytes each and still locate the first difference.
        if self.lines != first.lines {
            let same = self.lines.iter().zip(&first.lines);
            let line = same.take_while(|(here, there)| here == there).count() + 1;
            return Some(format!(
                "the text of '{name}' on rank {rank} differs from rank 0's, first in line {line} as printed"
            ));
        }
        let values = self.parameters.iter().zip(&first.parameters);
        if let Some(((parameter, here), (_, there))) = values.into_iter().find(|(a, b)| a != b) {
            return Some(format!(
                "rank {rank} binds '{name}' with {parameter} = {here}, rank 0 with {parameter} = {there}"
            ));
        }
        let only = |a: &Self, b: &Self| a.tensors.iter().find(|t| !b.tensors.contains(t)).cloned();
        if let Some(tensor) = only(self, first) {
            return Some(format!(
                "rank {rank} binds '{name}' with the optional tensor '{tensor}', rank 0 without"
            ));
        }
        if let Some(tensor) = only(first, self) {
            return Some(format!(
                "rank 0 binds '{name}' with the optional tensor '{tensor}', rank {rank} without"
            ));
        }
        (self != first).then(|| {
            format!(
                "rank {rank} prepared '{name}' with {} streams, rank 0 with {}",
                self.streams, first.streams
            )
        })
    }
}

impl RankContext {
    /// Blocks until every rank has sent its digest, or an earlier failure. Fails on all ranks if one failed, or if
    /// they bring different programs.
    pub(super) fn agree(&self, brought: Result<&Digest, &Error>) -> Result<()> {
        let all = self.exchange().gather("bind", brought)?;
        for (rank, theirs) in all.iter().enumerate() {
            if let Some(difference) = theirs.difference(rank, &all[0]) {
                let peer = if rank == self.rank() { 0 } else { rank };
                return Err(Error::mismatch(difference)
                    .with_operation("bind")
                    .with_peer(peer)
                    .with_help("bring the same program, parameters and streams on every rank"));
            }
        }
        Ok(())
    }

    /// As [`GroupExchange::agree_on`].
    pub(crate) fn agree_on<T>(&self, made: Result<T>) -> Result<T> {
        self.exchange().agree_on(made)
    }
}

/// FNV-1a: fast and stable across builds; not meant to resist collisions on purpose.
fn hash(line: &str) -> u32 {
    line.bytes().fold(0x811c_9dc5, |hash, byte| {
        (hash ^ u32::from(byte)).wrapping_mul(0x0100_0193)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn digest(text: &str, parameters: &[(&str, i64)], streams: usize) -> Digest {
        let program = Program::parse(text).unwrap();
        let parameters = parameters.iter().copied().collect();
        Digest::of(&program, &parameters, streams).unwrap()
    }

    #[test]
    fn a_difference_is_named_as_precisely_as_it_is_known() {
        let text =
            "program p(n, k = 1 | 2) {\n  input A: f32[n]\n  output B: f32[n]\n  B = copy(A)\n}";
        let first = digest(text, &[("n", 8)], 2);
        assert_eq!(first.difference(1, &first), None);
        // A parameter set to its default equals an omitted one.
        let given = digest(text, &[("n", 8), ("k", 1)], 2);
        assert_eq!(given.difference(1, &first), None);
        let cases = [
            (
                digest(&text.replace("program p", "program q"), &[("n", 8)], 2),
                "rank 1 binds 'q', rank 0 binds 'p'",
            ),
            (
                digest(&text.replace("copy(A)", "sum(A, A)"), &[("n", 8)], 2),
                "first in line",
            ),
            (
                digest(text, &[("n", 9)], 2),
                "rank 1 binds 'p' with n = 9, rank 0 with n = 8",
            ),
            (
                digest(text, &[("n", 8), ("k", 2)], 2),
                "with k = 2, rank 0 with k = 1",
            ),
            (
                digest(text, &[("n", 8)], 3),
                "with 3 streams, rank 0 with 2",
            ),
        ];
        for (other, expected) in cases {
            let difference = other.difference(1, &first).unwrap();
            assert!(difference.contains(expected), "{difference}");
        }
    }
}
