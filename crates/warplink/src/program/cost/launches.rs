//! Communication between the launches of all ranks.

use super::class;
use super::launch::{RankLaunch, launch};
use super::schedule::Schedule;
use crate::error::Result;
use crate::program::RankProgram;
use crate::program::section::{ScratchId, SectionInstance};
use std::collections::{BTreeMap, HashMap};

impl Schedule<'_> {
    /// Determines the communication between the launches of all ranks, in order.
    ///
    /// # Errors
    /// [`ErrorKind::Verification`] for a section that cannot be resolved.
    pub(super) fn find_launches(&mut self, iterations: u64) -> Result<()> {
        self.launches = all_launches(self.programs, iterations)?;
        // Packets stored for the lanes of a class, and packets that they read, by launch, scratch, rank and class;
        // and the total stored for all classes.
        let mut own: BTreeMap<(usize, ScratchId, usize, usize), [f64; 2]> = BTreeMap::new();
        let mut all: HashMap<(usize, ScratchId, usize), f64> = HashMap::new();
        for (rank, (program, launches)) in self.programs.iter().zip(&self.launches).enumerate() {
            for (number, (section, launch)) in program.sections().zip(launches).enumerate() {
                for (class, steps) in launch.classes.iter().enumerate() {
                    let (put, read) = steps.packets(section);
                    for ((id, to), elements) in put {
                        let to = self.stand_in(to);
                        own.entry((number, id, to, class)).or_default()[0] += elements;
                        *all.entry((number, id, to)).or_default() +=
                            elements * steps.class.count as f64;
                    }
                    for (id, elements) in read {
                        own.entry((number, id, rank, class)).or_default()[1] += elements;
                    }
                }
            }
        }
        let between = &mut self.between_lanes;
        for ((number, id, ..), [comes, read]) in &own {
            // A class that stores without reading, or the reverse, shows that packets cross classes; then one counter
            // serves all of them.
            if (*comes > 0.0) != (*read > 0.0) {
                between.crossed.insert((*number, *id));
            }
        }
        for ((number, id, rank, class), [comes, read]) in own {
            let comes = if between.crossed.contains(&(number, id)) {
                all.get(&(number, id, rank)).copied().unwrap_or(0.0)
            } else {
                comes
            };
            // A wait for more than ever arrives would deadlock the simulation.
            if comes < read {
                between
                    .shares
                    .insert((number, id, rank, class), comes / read);
            }
        }
        Ok(())
    }
}

/// Launches of each rank. Ranks with equal numbers of lanes share a common refinement of their classes.
fn all_launches(programs: &[RankProgram], iterations: u64) -> Result<Vec<Vec<RankLaunch>>> {
    let classes = |program: &RankProgram| program.sections().map(class::classes).collect();
    let classes: Vec<Vec<Vec<usize>>> = programs.iter().map(classes).collect();
    let of_launch = |(number, section): (usize, &SectionInstance)| {
        let others = classes.iter().filter_map(|of_rank| of_rank.get(number));
        let alike: Vec<&Vec<usize>> = others.filter(|of| of.len() == section.lanes).collect();
        launch(section, class::common(&alike), iterations)
    };
    let of_program =
        |program: &RankProgram| program.sections().enumerate().map(of_launch).collect();
    programs.iter().map(of_program).collect()
}
