//! Mixed small calls, as many as one asks for, each with fresh inputs and checked.
//!
//! A batch is what is enqueued before the host waits. Its number and the seed say everything about it.

use crate::common::{allocate, decode, encode, kind};
use crate::expected::{Case, Made, Random};
use std::ops::Range;
use warplink::device::{DeviceSlice, MatmulSpec, Priority, ReduceOp, Stream};
use warplink::{Collectives, Communicator, DType, DeviceKind};

/// The most elements of a call.
const MOST: usize = 4096;

/// The most calls of a batch.
const MAX_CALLS: usize = 40;

/// The most launches of a graph in a row, and how many of a graph that is launched often have fresh inputs each.
const MAX_IN_A_ROW: usize = 40;
const MAX_FRESH: usize = 200;

/// On GPUs, one of so many calls has up to so many elements, which go by other algorithms, on many lanes.
const LARGE: (usize, usize) = (600, 1 << 20);

/// Which calls there are.
#[derive(Clone, Debug)]
pub(crate) struct Mix {
    pub(crate) seed: u64,
    pub(crate) types: Vec<DType>,
    pub(crate) operators: Vec<ReduceOp>,
}

impl Mix {
    /// Everything.
    pub(crate) fn all(seed: u64) -> Self {
        Self {
            seed,
            types: DType::ALL.to_vec(),
            operators: ReduceOp::ALL.to_vec(),
        }
    }

    /// A call of any kind.
    fn case(&self, random: &mut Random, world: usize) -> Case {
        let mut most = [16, 16, 256, 256, 1024, MOST][random.below(6)];
        if kind() == DeviceKind::Cuda && random.below(LARGE.0) == 0 {
            most = LARGE.1;
        }
        let mut case = Case::random(random, world, most);
        if random.below(24) == 0 {
            case.call.count = 0;
        }
        if case.call.kind.reduces() {
            case.call.dtype = self.types[random.below(self.types.len())];
            case.call.op = Some(self.operators[random.below(self.operators.len())]);
            // Elements start at multiples of their size.
            case.shift = [0, 16, 1, 3][random.below(4)] * case.call.dtype.size();
        }
        case
    }
}

/// How the calls of a batch are made.
#[derive(Clone, Copy, Debug)]
enum Manner {
    /// On one stream.
    OneStream,
    /// On two streams by turns, which are others on every rank.
    Turns,
    /// As a graph that is launched again and again, with calls between its launches.
    Graph,
    /// Of two communicators on a stream each, enqueued in another order on every rank.
    TwoCommunicators,
}

/// A rank, with two communicators of all ranks.
pub(crate) struct Endurance<'a> {
    comm: &'a Communicator,
    other: Communicator,
    mix: Mix,
    collectives: [Collectives; 2],
    streams: [Stream; 2],
    /// Shared by the calls of a batch.
    memory: DeviceSlice,
    products: Products,
}

impl<'a> Endurance<'a> {
    /// Every rank calls it at the same time.
    pub(crate) fn new(comm: &'a Communicator, mix: Mix) -> Self {
        let other = comm.split(0, comm.rank() as i64).unwrap();
        let stream = || comm.create_stream(Priority::Normal).unwrap();
        Self {
            comm,
            mix,
            collectives: [comm.collectives().unwrap(), other.collectives().unwrap()],
            other,
            streams: [stream(), stream()],
            memory: allocate(comm, 1 << 20),
            products: Products::new(comm),
        }
    }

    /// Makes the calls of batch `number`, and checks them; tells how many they were.
    pub(crate) fn batch(&mut self, number: u64) -> usize {
        let mut random = Random::new(self.mix.seed.wrapping_mul(1 << 32).wrapping_add(number + 1));
        random.next();
        let manners = [
            Manner::OneStream,
            Manner::Turns,
            Manner::Graph,
            Manner::TwoCommunicators,
        ];
        let manner = manners[random.below(manners.len())];
        let calls = 1 + random.below(MAX_CALLS);
        let beside_products = random.below(self.products.one_of) == 0;
        let mut made = self.place(&mut random, calls, true);
        if beside_products {
            self.products.enqueue();
        }
        let done = match manner {
            Manner::Graph => {
                let launches = 1 + random.below(5);
                self.replay(&mut random, &mut made, launches, 3)
            }
            _ => {
                self.eager(manner, &made);
                calls
            }
        };
        if beside_products {
            self.products.check(self.comm, manner);
        }
        done
    }

    /// A graph of `calls` collectives, launched at least so many times; tells how many calls that was. The first launches have
    /// fresh inputs each. What is left is another graph, of calls that leave their inputs alone, which is launched many
    /// times without a host that waits.
    pub(crate) fn graph(&mut self, number: u64, calls: usize, launches: usize) -> usize {
        let mut random = Random::new(self.mix.seed ^ number.wrapping_mul(0x9e37_79b9) ^ 0xa5a5);
        let fresh = launches.min(MAX_FRESH);
        let mut made = self.place(&mut random, calls, true);
        let mut done = self.replay(&mut random, &mut made, fresh, 3);
        if launches > fresh {
            let mut made = self.place(&mut random, calls, false);
            done += self.replay(&mut random, &mut made, launches - fresh, MAX_IN_A_ROW);
        }
        done
    }

    /// Closes what is this rank's alone.
    pub(crate) fn close(self) {
        self.other.close().unwrap();
    }

    /// So many calls with their memory and inputs, some of them in place if that is allowed.
    fn place(&mut self, random: &mut Random, calls: usize, in_place: bool) -> Vec<Made> {
        let world = self.comm.world();
        let mut cases: Vec<Case> = (0..calls).map(|_| self.mix.case(random, world)).collect();
        for case in &mut cases {
            case.in_place &= in_place;
        }
        let mut end = 0;
        let ranges: Vec<Range<usize>> = cases
            .iter()
            .map(|case| {
                let start = end;
                end = (start + case.memory_bytes(world)).next_multiple_of(256);
                start..start + case.memory_bytes(world)
            })
            .collect();
        if end > self.memory.bytes() {
            self.memory = allocate(self.comm, end.next_power_of_two());
        }
        let made = cases.into_iter().zip(ranges).map(|(case, range)| {
            let memory = self.memory.slice(range).unwrap();
            let made = case.place(self.comm, memory).unwrap();
            made.fill(self.comm).unwrap();
            made
        });
        made.collect()
    }

    /// Enqueues the calls, waits for them and checks them.
    fn eager(&self, manner: Manner, made: &[Made]) {
        let rank = self.comm.rank();
        if matches!(manner, Manner::TwoCommunicators) {
            // Code that a call had to load would wait for kernels that wait for a peer.
            for pair in made.chunks(2) {
                for (one, collectives) in pair.iter().zip(&self.collectives) {
                    collectives.prepare(one.call()).unwrap();
                }
            }
            self.comm.barrier().unwrap();
        }
        for (at, pair) in made.chunks(2).enumerate() {
            let swapped = matches!(manner, Manner::TwoCommunicators) && (at + rank) % 2 == 1;
            let order = if swapped { [1, 0] } else { [0, 1] };
            for place in order.into_iter().filter(|place| *place < pair.len()) {
                let (collectives, stream) = match manner {
                    Manner::TwoCommunicators => (place, place),
                    Manner::Turns => (0, (at * (rank + 1) + place) % 2),
                    Manner::OneStream | Manner::Graph => (0, 0),
                };
                pair[place]
                    .enqueue(&self.collectives[collectives], &self.streams[stream])
                    .unwrap();
            }
        }
        self.check(made);
    }

    /// Records the calls as a graph, and launches it at least so many times, up to `in_a_row` times before it is checked and
    /// its inputs change, if it leaves them alone; tells how many calls that was.
    fn replay(
        &self,
        random: &mut Random,
        made: &mut [Made],
        launches: usize,
        in_a_row: usize,
    ) -> usize {
        let (collectives, stream) = (&self.collectives[0], &self.streams[0]);
        stream.begin_capture().unwrap();
        for one in &*made {
            one.enqueue(collectives, stream).unwrap();
        }
        let graph = stream.end_capture().unwrap();
        let repeats = made.iter().all(|made| !made.is_in_place());
        let mut launched = 0;
        while launched < launches {
            if launched > 0 {
                for one in &mut *made {
                    one.fill_again(self.comm, random.next()).unwrap();
                }
            }
            // What leaves its inputs alone gives the same again, without a host that waits between.
            let times = if repeats {
                1 + random.below(in_a_row)
            } else {
                1
            };
            for _ in 0..times {
                graph.launch(stream).unwrap();
                if random.below(3) == 0 {
                    collectives.barrier(stream).unwrap();
                }
            }
            self.check(made);
            launched += times;
        }
        launched * made.len()
    }

    fn check(&self, made: &[Made]) {
        for (comm, stream) in [self.comm, &self.other].into_iter().zip(&self.streams) {
            comm.synchronize(stream).unwrap();
        }
        made.iter().for_each(|made| made.check(self.comm));
    }
}

/// Matrix products on a stream of their own, which fill a GPU.
struct Products {
    stream: Stream,
    enqueue: Box<dyn Fn(&Stream)>,
    c: DeviceSlice,
    /// Rows and columns.
    side: usize,
    /// They are beside one of so many batches.
    one_of: usize,
}

/// The value in a row and a column of the left matrix: a whole number, which every type holds.
fn left(row: usize, column: usize) -> f64 {
    ((5 * row + 3 * column) % 13) as f64 - 6.0
}

/// The column of the left matrix that column `column` of the product is twice.
fn origin(column: usize, side: usize) -> usize {
    (7 * column + 3) % side
}

impl Products {
    fn new(comm: &Communicator) -> Self {
        let (side, one_of) = match kind() {
            DeviceKind::Host => (64, 4),
            DeviceKind::Cuda => (4096, 64),
        };
        let compute = comm.device().compute().unwrap();
        let spec = MatmulSpec::new(side, side, side, DType::F32);
        compute.prepare_matmul(&spec).unwrap();
        let [a, b, c] = [(); 3].map(|()| allocate(comm, 4 * side * side));
        let all = (0..side * side).map(|at| (at / side, at % side));
        let a_values: Vec<f64> = all.clone().map(|(row, column)| left(row, column)).collect();
        let b_value = |(row, column)| {
            if row == origin(column, side) {
                2.0
            } else {
                0.0
            }
        };
        let b_values: Vec<f64> = all.map(b_value).collect();
        for (memory, values) in [(&a, &a_values), (&b, &b_values)] {
            let bytes = encode(DType::F32, values);
            comm.device().upload(memory, &bytes).unwrap();
        }
        let to = c.clone();
        Self {
            stream: comm.create_stream(Priority::Normal).unwrap(),
            enqueue: Box::new(move |stream| {
                stream.fill(&to, 0xff).unwrap();
                for _ in 0..4 {
                    compute.matmul(stream, &spec, &a, &b, &to, None).unwrap();
                }
            }),
            c,
            side,
            one_of,
        }
    }

    fn enqueue(&self) {
        (self.enqueue)(&self.stream);
    }

    /// Some rows are right.
    fn check(&self, comm: &Communicator, manner: Manner) {
        comm.synchronize(&self.stream).unwrap();
        let row_bytes = 4 * self.side;
        for row in (0..self.side).step_by(self.side / 32) {
            let memory = self.c.slice(row * row_bytes..(row + 1) * row_bytes);
            let mut bytes = vec![0; row_bytes];
            comm.device()
                .download(&memory.unwrap(), &mut bytes)
                .unwrap();
            let got = decode(DType::F32, &bytes);
            let expected = (0..self.side).map(|column| 2.0 * left(row, origin(column, self.side)));
            let expected: Vec<f64> = expected.collect();
            assert_eq!(got, expected, "a product beside calls ({manner:?})");
        }
    }
}
