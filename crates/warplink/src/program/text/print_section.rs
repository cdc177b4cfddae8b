//! Printing of kernel sections.

use super::print::{Indented, List, print_branch, print_loop};
use crate::program::section::{
    Announcement, Application, Argument, Move, Operator, Place, Receiver, Scratch, Section, Source,
    Step, StepKind, Verb,
};
use std::fmt::{self, Display, Formatter};

impl Display for Scratch {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let persistent = if self.persistent { "persistent " } else { "" };
        write!(f, "scratch {persistent}{}: ", self.name)?;
        if self.packing.is_packets() {
            write!(f, "{} ", self.packing.name())?;
        }
        write!(f, "{}[", self.dtype)?;
        for (axis, extent) in self.shape.iter().enumerate() {
            let lead = if axis == 0 { "" } else { ", " };
            write!(f, "{lead}{extent}")?;
        }
        f.write_str("]")
    }
}

impl Display for Section {
    /// What is before the body.
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let Self {
            lane,
            lanes,
            threads,
            ..
        } = self;
        write!(f, "kernel {lane} in 0..{lanes} threads {threads} ")
    }
}

impl Display for Indented<'_, Step> {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        self.margin(f)?;
        match &self.1.kind {
            StepKind::LetInteger { name, value } => write!(f, "let {name} = {value}")?,
            StepKind::LetTensor { name, value } => write!(f, "let {name} = {value}")?,
            StepKind::Move(step) => step.fmt(f)?,
            StepKind::Signal(list) => write!(f, "signal {}", List(list))?,
            StepKind::Wait(list) => write!(f, "wait {}", List(list))?,
            StepKind::Barrier => f.write_str("barrier")?,
            StepKind::Announce(it) => write!(f, "announce {it}")?,
            StepKind::Agree(it) => write!(f, "agree {it}")?,
            StepKind::For(repetition) => print_loop(f, self.0, repetition)?,
            StepKind::If(branch) => print_branch(f, self.0, branch)?,
        }
        f.write_str("\n")
    }
}

impl Display for Announcement {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        for (position, value) in self.values.iter().enumerate() {
            let lead = if position == 0 { "" } else { ", " };
            write!(f, "{lead}{value}")?;
        }
        for (position, tensor) in self.tensors.iter().enumerate() {
            let lead = if position == 0 { " with " } else { ", " };
            write!(f, "{lead}{tensor}")?;
        }
        write!(f, " in {}", self.rows)?;
        match &self.peers {
            Some(peers) => write!(f, " to {}", List(peers)),
            None => Ok(()),
        }
    }
}

impl Display for Move {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        if let Verb::Apply(application) = &self.verb {
            return print_applied(f, self, application);
        }
        let (targets, sources) = (List(&self.targets), List(&self.sources));
        match &self.verb {
            Verb::Put => write!(f, "put {sources} to {targets}"),
            Verb::Get => write!(f, "get {sources} to {targets}"),
            Verb::Copy => write!(f, "{targets} = copy({sources})"),
            Verb::Reduce(operator) => write!(f, "{targets} = reduce({sources}, {operator})"),
            Verb::Apply(_) => Ok(()),
        }
    }
}

fn print_applied(f: &mut Formatter<'_>, it: &Move, application: &Application) -> fmt::Result {
    let mut targets = &it.targets[..];
    for (number, count) in application.results.iter().enumerate() {
        let (these, others) = targets.split_at((*count).min(targets.len()));
        let lead = if number == 0 { "" } else { "; " };
        write!(f, "{lead}{}", List(these))?;
        targets = others;
    }
    write!(f, " = {}(", application.function)?;
    let mut sources = &it.sources[..];
    for (number, argument) in application.arguments.iter().enumerate() {
        f.write_str(if number == 0 { "" } else { ", " })?;
        let mut next = |count: usize| {
            let (these, others) = sources.split_at(count.min(sources.len()));
            sources = others;
            List(these)
        };
        match argument {
            Argument::Source => next(1).fmt(f)?,
            Argument::Reduced(count, operator) => {
                write!(f, "reduce({}, {operator})", next(*count))?;
            }
            Argument::Number(number) => number.fmt(f)?,
        }
    }
    f.write_str(")")
}

impl Display for Operator {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        match self {
            Self::Fixed(operator) => operator.fmt(f),
            Self::Parameter(name) => f.write_str(name),
        }
    }
}

impl Display for Place {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        self.tensor.fmt(f)?;
        match &self.on {
            Some(rank) => write!(f, " on {rank}"),
            None => Ok(()),
        }
    }
}

impl Display for Receiver {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        self.rank.fmt(f)?;
        match &self.lane {
            Some(lane) => write!(f, " at {lane}"),
            None => Ok(()),
        }
    }
}

impl Display for Source {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        self.place.fmt(f)?;
        match &self.otherwise {
            Some((condition, place)) => write!(f, " if {condition} else {place}"),
            None => Ok(()),
        }
    }
}
