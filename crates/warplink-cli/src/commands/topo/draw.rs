//! A topology as a drawing: a box for each rank, lines for links, a panel for each machine.

use super::layout::{BOX, Panel, panels};
use anyhow::Result;
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};
use std::collections::{BTreeMap, BTreeSet};
use warplink::topology::{Connection, RankLocation, Topology};

const MARGIN: i32 = 24;
const HEADING: i32 = 74;
const LEGEND: i32 = 44;
const HOST: i32 = 26;
const MIN_WIDTH: i32 = 520;

/// Width of a sample of colour in the legend.
const SAMPLE: i32 = 20;

const INK: RGBColor = RGBColor(38, 44, 54);
const SOFT: RGBColor = RGBColor(104, 112, 124);
const BORDER: RGBColor = RGBColor(120, 130, 144);
const FRAME: RGBColor = RGBColor(214, 219, 226);
const LINK: RGBColor = RGBColor(52, 113, 178);
const FACING: RGBColor = RGBColor(214, 126, 44);
const BUS: RGBColor = RGBColor(206, 210, 216);
const SWITCH: RGBColor = RGBColor(58, 68, 84);

/// For the NUMA nodes, in order, and again from the start.
const NODES: [RGBColor; 6] = [
    RGBColor(221, 234, 248),
    RGBColor(253, 234, 214),
    RGBColor(225, 242, 222),
    RGBColor(241, 227, 246),
    RGBColor(252, 226, 229),
    RGBColor(222, 243, 243),
];
const NO_NODE: RGBColor = RGBColor(238, 240, 243);

type Canvas<'a> = DrawingArea<SVGBackend<'a>, plotters::coord::Shift>;

/// The drawing, as SVG.
pub(super) fn draw(topology: &Topology) -> Result<String> {
    let panels = panels(topology);
    let host = if panels.len() > 1 { HOST } else { 0 };
    let content = panels
        .iter()
        .map(|panel| panel.size.0 + MARGIN)
        .sum::<i32>()
        + MARGIN;
    let entries = entries(topology);
    let legend = entries.iter().map(LegendEntry::width).sum::<i32>() + 2 * MARGIN;
    let width = content.max(legend).max(MIN_WIDTH);
    let tallest = panels.iter().map(|panel| panel.size.1).max().unwrap_or(0);
    let height = HEADING + host + tallest + LEGEND + MARGIN;
    let mut text = String::new();
    {
        // In a block, since the backend borrows the text until it is dropped.
        let area =
            SVGBackend::with_string(&mut text, (width as u32, height as u32)).into_drawing_area();
        area.fill(&WHITE)?;
        let drawing = Drawing { area, topology };
        drawing.heading()?;
        let mut left = (width - content) / 2 + MARGIN;
        for panel in &panels {
            drawing.machine(panel, (left, HEADING), host)?;
            left += panel.size.0 + MARGIN;
        }
        drawing.legend(&entries, height - LEGEND)?;
        drawing.area.present()?;
    }
    Ok(text)
}

struct Drawing<'a> {
    area: Canvas<'a>,
    topology: &'a Topology,
}

impl Drawing<'_> {
    /// The machine's devices, and the class of its mesh.
    fn heading(&self) -> Result<()> {
        let mut models: BTreeMap<&str, usize> = BTreeMap::new();
        for place in self.topology.places() {
            *models.entry(&place.device).or_default() += 1;
        }
        let models: Vec<_> = models
            .into_iter()
            .map(|(model, count)| format!("{count} × {model}"))
            .collect();
        self.text(&models.join(", "), (MARGIN, 30), 19, INK, HPos::Left)?;
        let class = self.topology.class().to_string().replace('-', " ");
        let forced = if self.topology.is_forced() {
            " (forced)"
        } else {
            ""
        };
        let path = if self.topology.is_direct() {
            "direct path possible"
        } else {
            "direct path not possible"
        };
        let line = format!("class {class}{forced}, {path}");
        self.text(&line, (MARGIN, 56), 14, SOFT, HPos::Left)
    }

    /// The panel of a machine, with its corner at `at`.
    fn machine(&self, panel: &Panel, at: (i32, i32), host: i32) -> Result<()> {
        let corners = [at, (at.0 + panel.size.0, at.1 + host + panel.size.1)];
        self.rectangle(corners, FRAME.stroke_width(1))?;
        if let (true, Some(&rank)) = (host > 0, panel.ranks.first()) {
            let name = &self.topology.places()[rank].host;
            self.text(name, (at.0 + 14, at.1 + 18), 14, INK, HPos::Left)?;
        }
        let moved = |point: (i32, i32)| (at.0 + point.0, at.1 + host + point.1);
        // Thin lines first, so that they do not cover others.
        let mut lines = self.lines(panel);
        lines.sort_by_key(|line| line.links);
        for line in &lines {
            let points = [moved(line.from), moved(line.to)];
            self.line(points, line.colour.stroke_width(line.width(most(&lines))))?;
        }
        // Counts after all lines, which would cross them out.
        for line in &lines {
            if let Some(links) = line.links {
                let middle = ((line.from.0 + line.to.0) / 2, (line.from.1 + line.to.1) / 2);
                self.count(links, moved(middle), line.colour)?;
            }
        }
        if let Some(corners) = panel.switches {
            let [from, to] = corners.map(moved);
            self.rectangle([from, to], SWITCH.filled())?;
            let middle = ((from.0 + to.0) / 2, (from.1 + to.1) / 2);
            let name = if self.is_memory(panel) {
                "memory"
            } else {
                "switches"
            };
            self.text(name, middle, 14, WHITE, HPos::Center)?;
        }
        for (&rank, &middle) in panel.ranks.iter().zip(&panel.middles) {
            self.rank(rank, moved(middle))?;
        }
        Ok(())
    }

    /// Whether the ranks are connected by the memory of their machine.
    fn is_memory(&self, panel: &Panel) -> bool {
        let places = panel
            .ranks
            .iter()
            .map(|&rank| &self.topology.places()[rank]);
        places.clone().all(|place| place.address.is_none())
    }

    /// Every line of a panel.
    fn lines(&self, panel: &Panel) -> Vec<DrawnLine> {
        let mesh = self.topology.mesh();
        let mut lines = Vec::new();
        let placed: Vec<_> = panel.ranks.iter().copied().zip(&panel.middles).collect();
        for (index, &(rank, &from)) in placed.iter().enumerate() {
            for &(peer, &to) in &placed[index + 1..] {
                let (links, colour) = match mesh.connection(rank, peer) {
                    Connection::Links(links) if faces(self.topology, rank, peer) => {
                        (Some(links), FACING)
                    }
                    Connection::Links(links) => (Some(links), LINK),
                    Connection::Bus => (None, BUS),
                    // Ranks behind switches have one line each to the switches instead of one for each pair.
                    Connection::Itself | Connection::Switches(_) | Connection::Nothing => continue,
                };
                lines.push(DrawnLine {
                    from,
                    to,
                    links,
                    colour,
                });
            }
            let switch = mesh.counts(rank).map_or(0, |counts| counts.switch);
            if let (Some([corner, opposite]), 1..) = (panel.switches, switch) {
                let middle = ((corner.0 + opposite.0) / 2, (corner.1 + opposite.1) / 2);
                // Straight down to a bar, and slanting to a box in the middle of a ring.
                let above = (corner.0..=opposite.0).contains(&from.0);
                let to = if above { (from.0, middle.1) } else { middle };
                // From edge to edge, so that the count is in the middle of the visible line.
                let (from, to) = clipped(from, to, (opposite.1 - corner.1) / 2);
                let is_card = self.topology.places()[rank].address.is_some();
                lines.push(DrawnLine {
                    from,
                    to,
                    links: is_card.then_some(switch),
                    colour: LINK,
                });
            }
        }
        lines
    }

    fn rank(&self, rank: usize, middle: (i32, i32)) -> Result<()> {
        let place = &self.topology.places()[rank];
        let half = (BOX.0 / 2, BOX.1 / 2);
        let corners = [
            (middle.0 - half.0, middle.1 - half.1),
            (middle.0 + half.0, middle.1 + half.1),
        ];
        self.rectangle(corners, self.node_colour(place.numa_node).filled())?;
        self.rectangle(corners, BORDER.stroke_width(1))?;
        let name = format!("rank {rank}");
        let [second, third] = details(place);
        let lines = [(name, 15, INK), (second, 12, SOFT), (third, 12, SOFT)];
        let lines: Vec<_> = lines.iter().filter(|line| !line.0.is_empty()).collect();
        for (index, (line, size, colour)) in lines.iter().enumerate() {
            let y = middle.1 + (2 * index as i32 + 1 - lines.len() as i32) * 9;
            self.text(line, (middle.0, y), *size, *colour, HPos::Center)?;
        }
        Ok(())
    }

    /// The number of links, on the middle of a line.
    fn count(&self, links: u32, middle: (i32, i32), colour: RGBColor) -> Result<()> {
        let digits = links.to_string();
        let half = (5 + 4 * digits.len() as i32, 9);
        let corners = [
            (middle.0 - half.0, middle.1 - half.1),
            (middle.0 + half.0, middle.1 + half.1),
        ];
        self.rectangle(corners, WHITE.filled())?;
        self.rectangle(corners, colour.stroke_width(1))?;
        self.text(&digits, middle, 12, INK, HPos::Center)
    }

    /// The meaning of the colours, from `y` down.
    fn legend(&self, entries: &[LegendEntry], y: i32) -> Result<()> {
        let (mut x, middle) = (MARGIN, y + 12);
        for entry in entries {
            match entry {
                LegendEntry::Node(node) => {
                    let corners = [(x, middle - 7), (x + SAMPLE, middle + 7)];
                    self.rectangle(corners, self.node_colour(Some(*node)).filled())?;
                    self.rectangle(corners, BORDER.stroke_width(1))?;
                }
                LegendEntry::Line(_, colour, width) => {
                    let ends = [(x, middle), (x + SAMPLE, middle)];
                    self.line(ends, colour.stroke_width(*width))?;
                }
            }
            let place = (x + SAMPLE + 7, middle);
            self.text(&entry.name(), place, 12, SOFT, HPos::Left)?;
            x += entry.width();
        }
        Ok(())
    }

    fn node_colour(&self, node: Option<u32>) -> RGBColor {
        let nodes = nodes(self.topology);
        let index = node.and_then(|node| nodes.iter().position(|known| *known == node));
        // Colours repeat on machines with more NUMA nodes than colours.
        index.map_or(NO_NODE, |index| NODES[index % NODES.len()])
    }

    fn line(&self, points: [(i32, i32); 2], style: ShapeStyle) -> Result<()> {
        let line = PathElement::new(points, style);
        Ok(self.area.draw(&line)?)
    }

    fn rectangle(&self, corners: [(i32, i32); 2], style: impl Into<ShapeStyle>) -> Result<()> {
        let rectangle = Rectangle::new(corners, style);
        Ok(self.area.draw(&rectangle)?)
    }

    fn text(
        &self,
        text: &str,
        at: (i32, i32),
        size: i32,
        colour: RGBColor,
        anchor: HPos,
    ) -> Result<()> {
        let style = ("sans-serif", size)
            .into_text_style(&self.area)
            .color(&colour)
            .pos(Pos::new(anchor, VPos::Center));
        Ok(self.area.draw(&Text::new(text.to_owned(), at, style))?)
    }
}

/// A line between two boxes.
struct DrawnLine {
    from: (i32, i32),
    to: (i32, i32),
    /// The number of its links; none for the bus and the memory of a machine.
    links: Option<u32>,
    colour: RGBColor,
}

impl DrawnLine {
    /// In pixels, where the strongest line has `most` links.
    fn width(&self, most: u32) -> u32 {
        self.links.map_or(2, |links| 2 + 4 * links / most.max(1))
    }
}

/// An entry of the legend.
enum LegendEntry {
    Node(u32),
    /// Its name, colour and width.
    Line(&'static str, RGBColor, u32),
}

impl LegendEntry {
    fn name(&self) -> String {
        match self {
            Self::Node(node) => format!("NUMA node {node}"),
            Self::Line(name, ..) => (*name).to_owned(),
        }
    }

    /// In pixels, with what is between entries. Texts are narrower than this in every font.
    fn width(&self) -> i32 {
        SAMPLE + 24 + 7 * self.name().chars().count() as i32
    }
}

/// The contents of the drawing, for its legend.
fn entries(topology: &Topology) -> Vec<LegendEntry> {
    let (mesh, world) = (topology.mesh(), topology.places().len());
    let pairs = (0..world).flat_map(|a| (0..a).map(move |b| (a, b)));
    let (mut links, mut facing, mut bus) = (false, false, false);
    for (a, b) in pairs {
        match mesh.connection(a, b) {
            Connection::Links(_) if faces(topology, a, b) => facing = true,
            Connection::Links(_) => links = true,
            // Ranks without an address are no cards: they share the machine's memory, which has no links.
            Connection::Switches(_) => links |= topology.places()[a].address.is_some(),
            Connection::Bus => bus = true,
            Connection::Itself | Connection::Nothing => {}
        }
    }
    let lines = [
        (links, LegendEntry::Line("links", LINK, 4)),
        (facing, LegendEntry::Line("links between groups", FACING, 4)),
        (bus, LegendEntry::Line("bus only", BUS, 2)),
    ];
    let lines = lines.into_iter().filter(|line| line.0).map(|line| line.1);
    let nodes = nodes(topology).into_iter().map(LegendEntry::Node);
    nodes.chain(lines).collect()
}

fn nodes(topology: &Topology) -> BTreeSet<u32> {
    let places = topology.places().iter();
    places.filter_map(|place| place.numa_node).collect()
}

/// Whether two ranks face each other in a hybrid cube mesh.
fn faces(topology: &Topology, rank: usize, peer: usize) -> bool {
    topology.cube_positions().is_some_and(|positions| {
        let at = |rank| positions.iter().position(|placed| *placed == rank);
        let in_group = |rank| at(rank).map(|at| at % (positions.len() / 2));
        in_group(rank) == in_group(peer)
    })
}

fn most(lines: &[DrawnLine]) -> u32 {
    lines
        .iter()
        .filter_map(|line| line.links)
        .max()
        .unwrap_or(0)
}

/// A line from the middle of a rank's box to the middle of a bar of half the height `half`, without what
/// the two cover.
fn clipped(from: (i32, i32), to: (i32, i32), half: i32) -> ((i32, i32), (i32, i32)) {
    let (rise, run) = (to.1 - from.1, to.0 - from.0);
    // Nearly horizontal: a division by a small rise would move the ends far off.
    if rise.abs() <= BOX.1 / 2 + half {
        return (from, to);
    }
    let at = |y: i32| (from.0 + run * (y - from.1) / rise, y);
    let sign = rise.signum();
    (at(from.1 + sign * BOX.1 / 2), at(to.1 - sign * half))
}

/// The second and third line in a rank's box.
fn details(place: &RankLocation) -> [String; 2] {
    let address = place.address.map(|address| address.to_string());
    let network = place.network.as_ref().map(|device| device.name.clone());
    [address.unwrap_or_default(), network.unwrap_or_default()]
}
