//! Checks that programs whose kernels share a workspace, its words and its epoch may run after one another.

use super::diagnostics::Diagnostics;
use super::lanes::{self, Caches, JointLaunch, Reaches};
use super::{kernel, link, unroll_all};
use crate::program::diagnostic::Diagnostic;
use crate::program::ir::Program;
use crate::program::parameters::Parameters;
use crate::program::rank_program::RankProgram;
use crate::program::section::{SectionInstance, SectionMemory};

/// Verifies that the kernels of several programs may use one workspace in any order, for example when length, type,
/// number of lanes or algorithm change between calls. Their scratch areas overlap. Each program by itself is checked
/// by [`verify`](super::verify).
///
/// # Errors
/// The diagnostics of a single program, or of a pair of programs.
pub fn verify_sharing(
    programs: &[(&Program, &Parameters)],
    world: usize,
    streams: usize,
) -> Result<(), Vec<Diagnostic>> {
    let mut merged: Vec<RankProgram> = Vec::new();
    // For each program, its kernels; for each kernel, the sections of all ranks. A program that announces tensors
    // counts once per form of reachability.
    let mut kernels: Vec<Vec<Vec<SectionInstance>>> = Vec::new();
    let mut reaches_of: Vec<Vec<Reaches>> = Vec::new();
    let mut caches: Vec<Vec<Caches>> = Vec::new();
    let mut followed: Vec<(usize, usize)> = Vec::new();
    for (number, (program, parameters)) in programs.iter().enumerate() {
        let mut diagnostics = Diagnostics::new(program);
        let ranks = unroll_all(program, world, streams, parameters, &mut diagnostics)?;
        let links = link::link(&ranks, &mut diagnostics);
        diagnostics.end_of_stage()?;
        // Tensors of all programs are numbered in one space, so that only scratch and signals are shared between
        // them.
        let first = merged.first().map_or(0, |all| all.tensors.len());
        let moved = |kernel: Vec<(usize, &SectionInstance)>| {
            let sections = kernel.into_iter();
            sections.map(|(_, section)| moved(section, first)).collect()
        };
        kernels.push(kernel::kernels(&ranks, &links).map(moved).collect());
        let of_kernels = kernels[number].iter();
        caches.push(
            of_kernels
                .map(|sections| lanes::caches(sections.len()))
                .collect(),
        );
        let why = "other programs write to this workspace between its runs";
        lanes::persistent(kernels[number].iter().flatten(), why).map_err(alone)?;
        let reaches = kernels[number]
            .iter()
            .map(|sections| Reaches::of(&sections[0]));
        let of_kernels: Vec<Reaches> = reaches.collect::<Result<_, _>>().map_err(alone)?;
        let most = of_kernels.iter().map(|it| it.main().len()).max();
        followed.extend((0..most.unwrap_or(1)).map(|form| (number, form)));
        reaches_of.push(of_kernels);
        for (rank, own) in ranks.into_iter().enumerate() {
            match merged.get_mut(rank) {
                Some(all) => all.tensors.extend(own.tensors),
                None => merged.push(own),
            }
        }
    }
    for (position, &(one, form)) in followed.iter().enumerate() {
        for &(other, other_form) in &followed[position + 1..] {
            let (of_one, of_other) = (&kernels[one], &kernels[other]);
            let mut diagnostics = Diagnostics::new(programs[one].0);
            let period = lanes::period(of_one.iter().chain(of_other).flatten());
            let period = period.map_err(alone)?;
            let mut launches = named(
                (of_one, &caches[one]),
                programs[one].0,
                (&reaches_of[one], form),
            );
            launches.extend(named(
                (of_other, &caches[other]),
                programs[other].0,
                (&reaches_of[other], other_form),
            ));
            let sequence = alternate(of_one.len(), of_other.len(), lanes::runs(period));
            lanes::follow(&merged, &launches, &sequence, &mut diagnostics).map_err(alone)?;
            diagnostics.end_of_stage()?;
        }
    }
    Ok(())
}

fn alone(diagnostic: Diagnostic) -> Vec<Diagnostic> {
    vec![diagnostic]
}

/// Launches of a program's kernels, with the announced tensors reachable as in one of the forms.
fn named<'a>(
    (kernels, caches): (&'a [Vec<SectionInstance>], &[Caches]),
    program: &'a Program,
    (reaches, form): (&[Reaches], usize),
) -> Vec<JointLaunch<'a>> {
    let launches = kernels.iter().zip(caches).zip(reaches);
    launches
        .enumerate()
        .map(|(number, ((sections, caches), reaches))| {
            let all = reaches.main();
            let reach = all[form % all.len()].clone();
            let sections = (sections.iter().collect(), caches.clone());
            JointLaunch::named(sections, program, reach, number == 0)
        })
        .collect()
}

/// Copy of the section with its tensors numbered from `first` on.
fn moved(section: &SectionInstance, first: usize) -> SectionInstance {
    let mut section = section.clone();
    for tensor in &mut section.tensors {
        if let SectionMemory::Tensor(id) = &mut tensor.memory {
            *id += first;
        }
    }
    section
}

/// Interleavings of two programs with `one` and `other` kernels: each alone several times, then alternating, then
/// with one or two runs of one between those of the other, so that the epoch takes every remainder.
fn alternate(one: usize, other: usize, runs: usize) -> Vec<usize> {
    let first: Vec<usize> = (0..one).collect();
    let second: Vec<usize> = (one..one + other).collect();
    let mut sequence = Vec::new();
    let mut add = |times: usize, run: &[usize]| {
        (0..times).for_each(|_| sequence.extend(run));
    };
    add(runs, &first);
    add(runs, &second);
    for times in 1..=2 {
        for _ in 0..runs {
            add(times, &first);
            add(1, &second);
        }
        for _ in 0..runs {
            add(1, &first);
            add(times, &second);
        }
    }
    sequence
}
