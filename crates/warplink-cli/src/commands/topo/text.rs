//! Text output of a topology.

use crate::commands::bench::report::{Row, table};
use crate::report::counted;
use std::collections::BTreeSet;
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
    let (mut rows, mut used) = (Vec::new(), BTreeSet::new());
    for (rank, place) in places.iter().enumerate() {
        let mut row = Row::of("").number("rank", rank);
        if several {
            row = row.words("host", &place.host);
        }
        row = row
            .words("device", &place.device)
            .words("address", known(place.address))
            .number("NUMA", known(place.numa_node))
            .words("network", known(place.network.as_ref().map(network)));
        for peer in 0..world {
            let cell = cell(topology, rank, peer);
            used.insert(cell);
            row = row.number(peer.to_string(), cell.text());
        }
        rows.push(row);
    }
    let mut text = format!("{}\n", table(&rows));
    for legend in used.into_iter().filter_map(TextCell::legend) {
        text += &format!("{legend}\n");
    }
    if world > 1 {
        text.push('\n');
    }
    let forced = if topology.is_forced() { ", forced" } else { "" };
    text += &format!("class: {}{forced}\n", topology.class());
    if let Some(positions) = topology.cube_positions() {
        let list = |ranks: &[usize]| ranks.iter().map(usize::to_string).collect::<Vec<_>>();
        let (first, second) = positions.split_at(positions.len() / 2);
        let faces = list(first).into_iter().zip(list(second));
        let faces: Vec<_> = faces.map(|(a, b)| format!("{a}-{b}")).collect();
        text += &format!(
            "groups: {} and {}; facing ranks: {}\n",
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
                text += &format!("  {obstacle}\n");
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
