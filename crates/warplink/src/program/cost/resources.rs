//! Sharing of all ranks' resources among concurrent work.
//!
//! Work has a speed from 0 to 1, relative to that alone. At speed s it uses s times its demand of each resource that
//! it needs, and no resource provides more than 1:
//!
//! 1. Multiprocessors are assigned to kernels in order of arrival, high priority first; each gets what it can occupy,
//!    as far as available.
//! 2. Work slows down while some other work runs, according to the model's interference.
//! 3. Lanes of kernels use links and memory in order of arrival, as far as earlier ones leave capacity; among
//!    simultaneous arrivals, the first half of each rank's lanes goes first.
//! 4. Links and memory are shared by max-min fairness: the slowest work is as fast as possible, then the next, and so
//!    on.

use super::model::Interference;
use super::schedule::Schedule;
use super::step::{Class, RESOURCES, Work};

/// Work with less than this left, in seconds alone, is complete; absorbs rounding errors.
const DONE: f64 = 1e-12;

/// Events within this time, in seconds, are simultaneous.
pub(super) const AT_ONCE: f64 = 1e-12;

/// Remaining capacity below which a resource counts as exhausted.
const USED_UP: f64 = 1e-9;

/// Running work.
#[derive(Clone, Copy, Debug)]
pub(super) struct Active {
    pub(super) work: u32,
    /// Stream that it runs on.
    pub(super) stream: u32,
    /// Start time.
    pub(super) started: f64,
    /// Remaining seconds, if it ran alone.
    remaining: f64,
    speed: f64,
    limit: f64,
    settled: bool,
}

/// All running work, and its shares.
pub(super) struct Resources<'a> {
    schedule: &'a Schedule<'a>,
    /// In order of arrival.
    active: Vec<Active>,
    /// Share of each resource in use.
    load: Vec<f64>,
    /// Seconds of full use of each resource so far.
    busy: Vec<f64>,
    /// For each resource, total demand of work whose speed still grows.
    growing: Vec<f64>,
    /// For each rank, the number of running multiplications, puts and gets.
    running: Vec<[u32; 3]>,
    /// Free share of multiprocessors, for each rank.
    left: Vec<f64>,
    /// For each resource, capacity left by earlier work that uses it in order of arrival, and demand of the next such
    /// work.
    left_in_turn: Vec<f64>,
    wanted: Vec<f64>,
    /// Work that uses resources in order of arrival, in that order.
    in_turn: Vec<usize>,
    stale: bool,
}

impl<'a> Resources<'a> {
    pub(super) fn new(schedule: &'a Schedule<'a>) -> Self {
        let ranks = schedule.programs.len();
        let count = ranks * RESOURCES as usize;
        Self {
            schedule,
            active: Vec::new(),
            load: vec![0.0; count],
            busy: vec![0.0; count],
            growing: vec![0.0; count],
            running: vec![[0; 3]; ranks],
            left: vec![1.0; ranks],
            left_in_turn: vec![1.0; count],
            wanted: vec![0.0; count],
            in_turn: Vec::new(),
            stale: false,
        }
    }

    /// Starts `work` of a stream.
    pub(super) fn start(&mut self, work: u32, stream: u32, now: f64) {
        let it = &self.schedule.works[work as usize];
        let mut remaining = it.seconds;
        if it.class == Class::SmallKernel && self.running[it.ranks[0] as usize][0] > 0 {
            // Matmuls fill all multiprocessors, so the block waits for a tile to complete.
            remaining += self.schedule.model.latency.room;
        }
        self.count(it, 1);
        self.active.push(Active {
            work,
            stream,
            started: now,
            remaining,
            speed: 0.0,
            limit: 0.0,
            settled: false,
        });
        self.stale = true;
    }

    fn count(&mut self, work: &Work, change: i32) {
        let class = match work.class {
            Class::Matmul => 0,
            Class::Put => 1,
            Class::Get => 2,
            Class::SmallKernel | Class::Other => return,
        };
        let [first, second] = work.ranks.map(|rank| rank as usize);
        let mut add = |rank: usize| {
            let count = &mut self.running[rank][class];
            *count = count.saturating_add_signed(change);
        };
        add(first);
        if second != first {
            add(second);
        }
    }

    /// Seconds until the next work completes; `None` if no work progresses.
    pub(super) fn next(&mut self) -> Option<f64> {
        if std::mem::take(&mut self.stale) {
            self.share();
        }
        let moving = self.active.iter().filter(|active| active.speed > 0.0);
        let ends = moving.map(|active| active.remaining / active.speed);
        ends.fold(None, |least: Option<f64>, end| {
            Some(least.map_or(end, |least| least.min(end)))
        })
    }

    /// Advances time by `seconds`, at most the result of [`next`](Self::next).
    pub(super) fn advance(&mut self, seconds: f64) {
        for active in &mut self.active {
            active.remaining -= seconds * active.speed;
        }
        for (busy, load) in self.busy.iter_mut().zip(&self.load) {
            *busy += load * seconds;
        }
    }

    /// Removes completed work.
    pub(super) fn take_done(&mut self, done: &mut Vec<Active>) {
        let before = done.len();
        self.active.retain(|active| {
            let over = active.remaining <= DONE;
            if over {
                done.push(*active);
            }
            !over
        });
        for active in &done[before..] {
            self.count(&self.schedule.works[active.work as usize], -1);
            self.stale = true;
        }
    }

    /// Seconds of full use of each resource, by its number.
    pub(super) fn into_busy(self) -> Vec<f64> {
        self.busy
    }

    /// Computes the speed of all running work.
    fn share(&mut self) {
        self.limit();
        self.limit_in_turn();
        self.load.fill(0.0);
        self.growing.fill(0.0);
        let schedule = self.schedule;
        let mut over = false;
        for active in &mut self.active {
            active.speed = active.limit;
            active.settled = active.limit <= 0.0;
            for &(resource, demand) in demands(schedule, active.work) {
                let load = &mut self.load[resource as usize];
                *load += demand * active.limit;
                over |= *load > 1.0 + USED_UP;
            }
        }
        if over {
            // Only if some resource is overcommitted: mostly none is, and the limits are the speeds.
            self.fill();
        }
    }

    /// Max-min fair sharing by progressive filling: all speeds grow together; each stops at its limit or when a
    /// resource is exhausted.
    fn fill(&mut self) {
        let schedule = self.schedule;
        self.load.fill(0.0);
        for active in &mut self.active {
            active.speed = 0.0;
            if !active.settled {
                for &(resource, demand) in demands(schedule, active.work) {
                    self.growing[resource as usize] += demand;
                }
            }
        }
        loop {
            let mut step = f64::INFINITY;
            for active in self.active.iter().filter(|active| !active.settled) {
                step = step.min(active.limit - active.speed);
            }
            if step.is_infinite() {
                return;
            }
            for (load, growing) in self.load.iter().zip(&self.growing) {
                if *growing > USED_UP {
                    step = step.min((1.0 - load).max(0.0) / growing);
                }
            }
            for (load, growing) in self.load.iter_mut().zip(&self.growing) {
                *load += growing * step;
            }
            for index in 0..self.active.len() {
                let active = &mut self.active[index];
                if active.settled {
                    continue;
                }
                active.speed += step;
                let needs = demands(schedule, active.work);
                let at_limit = active.limit - active.speed <= USED_UP * active.limit;
                let held =
                    |&(resource, _): &(u32, f64)| self.load[resource as usize] >= 1.0 - USED_UP;
                if at_limit || needs.iter().any(held) {
                    active.settled = true;
                    for &(resource, demand) in needs {
                        let growing = &mut self.growing[resource as usize];
                        // Rounding could leave it below 0.
                        *growing = (*growing - demand).max(0.0);
                    }
                }
            }
        }
    }

    /// Limits the speed of work that uses resources in order of arrival.
    fn limit_in_turn(&mut self) {
        let schedule = self.schedule;
        let turn = |active: &Active| schedule.works[active.work as usize].turn;
        self.in_turn.clear();
        let numbers = (0..self.active.len()).filter(|number| turn(&self.active[*number]).is_some());
        self.in_turn.extend(numbers);
        let (active, order) = (&mut self.active, &mut self.in_turn);
        let at_once = |a: &Active, b: &Active| (a.started - b.started).abs() <= AT_ONCE;
        // Running work is already in order of arrival.
        let mut first = 0;
        while first < order.len() {
            let end = (first..order.len())
                .find(|next| !at_once(&active[order[first]], &active[order[*next]]));
            let end = end.unwrap_or(order.len());
            order[first..end].sort_by_key(|number| turn(&active[*number]));
            first = end;
        }
        self.left_in_turn.fill(1.0);
        let mut rest = &order[..];
        while let Some(&next) = rest.first() {
            let together = |number: &&usize| {
                let (a, b) = (&active[**number], &active[next]);
                at_once(a, b) && turn(a) == turn(b)
            };
            let (group, later) = rest.split_at(rest.iter().take_while(together).count().max(1));
            rest = later;
            self.wanted.fill(0.0);
            for number in group {
                for &(resource, demand) in demands(schedule, active[*number].work) {
                    self.wanted[resource as usize] += demand * active[*number].limit;
                }
            }
            for number in group {
                let active = &mut active[*number];
                let mut share: f64 = 1.0;
                for &(resource, _) in demands(schedule, active.work) {
                    let resource = resource as usize;
                    if self.wanted[resource] > self.left_in_turn[resource] {
                        share = share.min(self.left_in_turn[resource] / self.wanted[resource]);
                    }
                }
                active.limit *= if share < USED_UP { 0.0 } else { share };
            }
            for number in group {
                for &(resource, demand) in demands(schedule, active[*number].work) {
                    let left = &mut self.left_in_turn[resource as usize];
                    *left = (*left - demand * active[*number].limit).max(0.0);
                }
            }
        }
    }

    /// Limits speeds by multiprocessors and interference.
    fn limit(&mut self) {
        let schedule = self.schedule;
        let beside = &schedule.model.interference;
        self.left.fill(1.0);
        for high in [true, false] {
            for active in &mut self.active {
                let work = &schedule.works[active.work as usize];
                if work.high != high {
                    continue;
                }
                let mut limit = 1.0;
                if work.occupancy > 0.0 {
                    let left = &mut self.left[work.ranks[0] as usize];
                    limit = (*left / work.occupancy).clamp(0.0, 1.0);
                    *left = (*left - limit * work.occupancy).max(0.0);
                    // Rounding errors of the remainder would otherwise let work progress by tiny steps, each an
                    // event.
                    if limit < USED_UP {
                        limit = 0.0;
                    }
                }
                active.limit = limit * slowed(work, &self.running, beside);
            }
        }
    }
}

/// Speed of `work` with interference from concurrent work.
fn slowed(work: &Work, running: &[[u32; 3]], beside: &Interference) -> f64 {
    let [first, second] = work.ranks.map(|rank| running[rank as usize]);
    match work.class {
        Class::Matmul => {
            let put = if first[1] > 0 {
                beside.matmul_beside_put
            } else {
                1.0
            };
            let get = if first[2] > 0 {
                beside.matmul_beside_get
            } else {
                1.0
            };
            // The stronger disturbance; the two are not known to add up.
            put.min(get)
        }
        Class::Put | Class::Get if first[0] > 0 || second[0] > 0 => beside.copy_beside_matmul,
        _ => 1.0,
    }
}

fn demands<'s>(schedule: &'s Schedule<'_>, work: u32) -> &'s [(u32, f64)] {
    let (first, end) = schedule.works[work as usize].demands;
    &schedule.demands[first as usize..end as usize]
}
