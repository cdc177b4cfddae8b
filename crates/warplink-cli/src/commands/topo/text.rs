//! Text output of a topology.

use crate::report::counted;
use crate::report::table::{Align, Table};
use std::collections::BTreeSet;
use std::fmt::Write;
use warplink::device::NetworkDevice;
use warplink::topology::{Connection, Topology};

/// Content of a matrix cell.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum TextCell {
    Itself,
    Links(u32),
    Switches(u32),
    Memory,
    Bus,
    Nothing,
}

impl TextCell {
    fn text(self) -> String {
        match self {
            Self::Itself => "-".to_owned(),
            Self::Links(links) => format!("L{links}"),
            Self::Switches(links) => format!("S{links}"),
            Self::Memory => "mem".to_owned(),
            Self::Bus => "bus".to_owned(),
            Self::Nothing => "none".to_owned(),
        }
    }

    fn legend(self) -> Option<String> {
        let links = |links| counted(links as usize, "link");
        let meaning = match self {
            Self::Itself => return None,
            Self::Links(count) => format!("{} from device to device", links(count)),
            Self::Switches(count) => format!("through switches, {} each", links(count)),
            Self::Memory => "the machine's memory".to_owned(),
            Self::Bus => "the bus only".to_owned(),
            Self::Nothing => "neither reaches the other's memory".to_owned(),
        };
        Some(format!("{:<5} {meaning}", self.text()))
    }
}

/// The matrix with a legend, the class, and whether the direct path is possible.
pub(super) fn describe(topology: &Topology) -> String {
    let (places, world) = (topology.places(), topology.places().len());
    let several = places
        .iter()
        .any(|place| place.machine != places[0].machine);
    let numbers: Vec<String> = (0..world).map(|rank| rank.to_string()).collect();
    let mut columns = vec![("rank", Align::Right)];
    if several {
        columns.push(("host", Align::Left));
    }
    columns.extend([
        ("device", Align::Left),
        ("address", Align::Left),
        ("NUMA", Align::Right),
        ("network", Align::Left),
    ]);
    columns.extend(numbers.iter().map(|number| (number.as_str(), Align::Right)));
    let (mut table, mut used) = (Table::new(columns), BTreeSet::new());
    for (rank, place) in places.iter().enumerate() {
        let mut row = vec![rank.to_string()];
        if several {
            row.push(place.host.clone());
        }
        row.extend([
            place.device.clone(),
            known(place.address),
            known(place.numa_node),
            known(place.network.as_ref().map(network)),
        ]);
        for peer in 0..world {
            let cell = cell(topology, rank, peer);
            used.insert(cell);
            row.push(cell.text());
        }
        table.row(row);
    }
    let mut text = format!("{table}\n");
    for legend in used.into_iter().filter_map(TextCell::legend) {
        text += &legend;
        text.push('\n');
    }
    if world > 1 {
        text.push('\n');
    }
    let forced = if topology.is_forced() { ", forced" } else { "" };
    // Writing to a string cannot fail.
    let _ = writeln!(text, "class: {}{forced}", topology.class());
    if let Some(positions) = topology.cube_positions() {
        let list = |ranks: &[usize]| ranks.iter().map(usize::to_string).collect::<Vec<_>>();
        let (first, second) = positions.split_at(positions.len() / 2);
        let faces = list(first).into_iter().zip(list(second));
        let faces: Vec<_> = faces.map(|(a, b)| format!("{a}-{b}")).collect();
        let _ = writeln!(
            text,
            "groups: {} and {}; facing ranks: {}",
            list(first).join(" "),
            list(second).join(" "),
            faces.join(" ")
        );
    }
    match topology.obstacles() {
        [] => text += "direct path: possible\n",
        obstacles => {
            text += "direct path: not possible\n";
            for obstacle in obstacles {
                let _ = writeln!(text, "  {obstacle}");
            }
        }
    }
    text
}

fn cell(topology: &Topology, rank: usize, peer: usize) -> TextCell {
    let is_card = |rank: usize| topology.places()[rank].address.is_some();
    match topology.mesh().connection(rank, peer) {
        Connection::Itself => TextCell::Itself,
        Connection::Links(links) => TextCell::Links(links),
        Connection::Switches(_) if !is_card(rank) && !is_card(peer) => TextCell::Memory,
        Connection::Switches(links) => TextCell::Switches(links),
        Connection::Bus => TextCell::Bus,
        Connection::Nothing => TextCell::Nothing,
    }
}

fn known(value: Option<impl std::fmt::Display>) -> String {
    value.map_or_else(|| "-".to_owned(), |value| value.to_string())
}

fn network(device: &NetworkDevice) -> String {
    match device.distance {
        Some(distance) => format!("{} ({}, {distance})", device.name, device.kind),
        None => format!("{} ({})", device.name, device.kind),
    }
}
