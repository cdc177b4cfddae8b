//! Flight recorder of a rank's engine calls, and comparison with those of other ranks.

use super::call::Call;

/// Number of calls kept.
const KEPT: usize = 256;

/// Maximum calls in a statement.
pub(super) const MAX_STATED: u64 = 240;

/// Encoded call ([`Call::engine_words`]).
type RecordWords = [u32; 4];

/// Ring buffer of a rank's calls, numbered from 1. Captured calls have no numbers, since a graph makes them
/// at every launch.
#[derive(Debug)]
pub(super) struct Record {
    made: u64,
    /// Running hash of all calls.
    hash: u64,
    /// Running hash of the call counts at which calls were captured. Call numbers of two ranks correspond
    /// only if these hashes are equal.
    recordings: u64,
    /// The three counters before the call in progress. It may fail, so it counts but is not compared yet.
    under_way: Option<[u64; 3]>,
    /// Calls, indexed by number modulo the length.
    last: Box<[CallRecord; KEPT]>,
}

/// A call, and the hashes after it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct CallRecord {
    words: RecordWords,
    hash: u64,
    recordings: u64,
}

/// Excerpt of a record, sent to another rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Statement {
    /// Number of calls made.
    pub(super) made: u64,
    recordings: u64,
    /// Number of the last of `calls`, which are consecutive, and the capture hash before it.
    last: u64,
    last_recordings: u64,
    /// Running hash before `calls`.
    before: u64,
    calls: Vec<RecordWords>,
}

/// First difference to another rank's calls.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Difference {
    pub(super) number: u64,
    /// This rank's call of that number and the other's; `None` if the difference precedes the statement.
    pub(super) calls: Option<[String; 2]>,
}

/// Extends a running hash.
fn extend(hash: u64, [a, b, c, d]: RecordWords) -> u64 {
    let pair = |low: u32, high: u32| u64::from(high) << 32 | u64::from(low);
    // Order matters as well as content, so mix by multiplication and rotation. On every call's path, hence no
    // cryptographic hash; the constants are odd with well-spread bits.
    let hash = (hash ^ pair(a, b)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    (hash.rotate_left(29) ^ pair(c, d)).wrapping_mul(0xd1b5_4a32_d192_ed03)
}

impl Default for Record {
    fn default() -> Self {
        Self {
            made: 0,
            hash: 0,
            recordings: 0,
            under_way: None,
            last: Box::new([CallRecord::default(); KEPT]),
        }
    }
}

impl Record {
    /// Records a call that is about to be made or captured.
    pub(super) fn begin(&mut self, call: &Call, is_recorded: bool) {
        self.under_way = Some([self.made, self.hash, self.recordings]);
        if is_recorded {
            let made = self.made;
            // Captured calls have no numbers, since a graph is launched any number of times. The count of
            // calls at the capture represents them.
            self.recordings = extend(self.recordings, [made as u32, (made >> 32) as u32, 1, 0]);
            return;
        }
        let words = call.engine_words();
        self.made += 1;
        self.hash = extend(self.hash, words);
        self.last[Self::place(self.made)] = CallRecord {
            words,
            hash: self.hash,
            recordings: self.recordings,
        };
    }

    /// Confirms or discards the call in progress.
    pub(super) fn end(&mut self, is_made: bool) {
        let before = self.under_way.take();
        // The library has not seen a call that failed on the host, so it must not be compared.
        if !is_made && let Some(before) = before {
            [self.made, self.hash, self.recordings] = before;
        }
    }

    /// Number of calls made, without the one in progress.
    pub(super) fn settled(&self) -> u64 {
        self.under_way.map_or(self.made, |[made, ..]| made)
    }

    fn place(number: u64) -> usize {
        (number % KEPT as u64) as usize
    }

    /// The call with a number, if kept. A discarded call may have overwritten the oldest one.
    fn entry(&self, number: u64) -> Option<&CallRecord> {
        // One fewer than the array holds: the call in progress has overwritten the oldest entry.
        let is_kept = (1..=self.made).contains(&number) && self.made - number < KEPT as u64 - 1;
        is_kept.then(|| &self.last[Self::place(number)])
    }

    /// Description of the call with a number, if kept.
    pub(super) fn describe(&self, number: u64) -> Option<String> {
        let entry = self.entry(number)?;
        Some(Call::describe_of_engine(&entry.words))
    }

    /// Statement of the last `count` calls up to number `until`, limited to those without captures between
    /// them.
    pub(super) fn statement(&self, until: u64, count: u64) -> Statement {
        let last = until.min(self.settled());
        let mut statement = Statement {
            made: self.made,
            recordings: self.recordings,
            last,
            last_recordings: 0,
            before: 0,
            calls: Vec::new(),
        };
        let Some(end) = self.entry(last) else {
            return statement;
        };
        statement.last_recordings = end.recordings;
        statement.before = end.hash;
        let count = count.min(MAX_STATED);
        // Newest first, so that a statement cut short lacks the oldest calls.
        for number in (last.saturating_sub(count) + 1..=last).rev() {
            let entry = self.entry(number);
            let Some(entry) = entry.filter(|entry| entry.recordings == end.recordings) else {
                break;
            };
            // The call before the first one may have been overwritten.
            let before = match number {
                1 => Some(0),
                _ => self.entry(number - 1).map(|entry| entry.hash),
            };
            let Some(before) = before else { break };
            statement.before = before;
            statement.calls.push(entry.words);
        }
        statement.calls.reverse();
        statement
    }

    /// First difference between another rank's statement and this rank's kept calls. Calls after different
    /// captures are not compared, since launches of graphs have no numbers.
    pub(super) fn difference(&self, other: &Statement) -> Option<Difference> {
        let mut hash = other.before;
        for (number, theirs) in other.numbered() {
            hash = extend(hash, *theirs);
            let own = self.entry(number).filter(|_| number <= self.settled());
            let Some(own) = own else {
                continue;
            };
            // Equal hashes mean that all calls up to here are equal, including those no longer kept.
            if own.recordings != other.last_recordings || own.hash == hash {
                continue;
            }
            // Equal calls with different hashes: the difference precedes the statement.
            let calls = (own.words != *theirs)
                .then(|| [own.words, *theirs].map(|words| Call::describe_of_engine(&words)));
            return Some(Difference { number, calls });
        }
        None
    }

    /// Whether the other rank has made fewer calls; false after different captures, when that is unknown.
    pub(super) fn is_ahead_of(&self, other: &Statement) -> bool {
        self.recordings == other.recordings && other.made < self.made
    }
}

impl Statement {
    fn numbered(&self) -> impl Iterator<Item = (u64, &RecordWords)> {
        let first = self.last + 1 - self.calls.len() as u64;
        (first..).zip(&self.calls)
    }

    /// Description of the statement's last call.
    pub(super) fn last_call(&self) -> Option<String> {
        let words = self.calls.last()?;
        Some(Call::describe_of_engine(words))
    }

    pub(super) fn to_bytes(&self) -> Vec<u8> {
        let head = [
            self.made,
            self.recordings,
            self.last,
            self.last_recordings,
            self.before,
        ];
        let head = head.iter().flat_map(|number| number.to_le_bytes());
        let words = self.calls.as_flattened().iter();
        head.chain(words.flat_map(|word| word.to_le_bytes()))
            .collect()
    }

    /// Decodes a statement; `None` if invalid.
    pub(super) fn from_bytes(bytes: &[u8]) -> Option<Self> {
        let (head, words) = bytes.split_first_chunk::<40>()?;
        let (numbers, _) = head.as_chunks::<8>();
        let &[made, recordings, last, last_recordings, before] = numbers else {
            return None;
        };
        let (calls, []) = words.as_chunks::<16>() else {
            return None;
        };
        let calls = calls.iter().map(|call| {
            let (words, _) = call.as_chunks::<4>();
            std::array::from_fn(|word| u32::from_le_bytes(words[word]))
        });
        let calls: Vec<RecordWords> = calls.collect();
        let [made, recordings, last, last_recordings, before] =
            [made, recordings, last, last_recordings, before].map(u64::from_le_bytes);
        // Numbers from a peer: reject those that would overflow the arithmetic on them.
        let fits = last <= made && made < u64::MAX && calls.len() as u64 <= last;
        fits.then_some(Self {
            made,
            recordings,
            last,
            last_recordings,
            before,
            calls,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::collective::CollectiveKind;
    use crate::device::ReduceOp;
    use crate::dtype::DType;
    use proptest::prelude::*;

    fn call(count: usize) -> Call {
        Call::new(
            CollectiveKind::AllReduce,
            ReduceOp::Sum,
            DType::I32,
            count,
            0,
        )
    }

    fn make(record: &mut Record, counts: impl IntoIterator<Item = usize>) {
        for count in counts {
            record.begin(&call(count), false);
            record.end(true);
        }
    }

    fn record_call(record: &mut Record, count: usize) {
        record.begin(&call(count), true);
        record.end(true);
    }

    fn record(counts: impl IntoIterator<Item = usize>) -> Record {
        let mut record = Record::default();
        make(&mut record, counts);
        record
    }

    #[test]
    fn the_first_call_that_differs_is_found_with_its_number() {
        let (own, other) = (record(1..=40), record((1..=34).chain([99, 98])));
        let found = own.difference(&other.statement(40, 10)).unwrap();
        let calls = [35, 99].map(|count| format!("all_reduce of {count} i32, sum"));
        assert_eq!((found.number, found.calls), (35, Some(calls)));
        assert!(own.is_ahead_of(&other.statement(40, 10)));
        // A rank that is behind is answered with its own calls.
        let answer = own.statement(36, 10);
        assert_eq!((answer.made, answer.last), (40, 36));
        assert_eq!(other.difference(&answer).unwrap().number, 35);
        assert_eq!(own.difference(&record(1..=38).statement(40, 10)), None);
        let last = record([7]).statement(40, 10).last_call();
        assert_eq!(last.unwrap(), "all_reduce of 7 i32, sum");
    }

    #[test]
    fn differing_call_found_after_its_record_expired() {
        let (own, other) = (
            record(1..=2000),
            record((1..=2000).map(|count| count.max(2))),
        );
        let found = own.difference(&other.statement(2000, 3)).unwrap();
        assert_eq!((found.number, found.calls), (1998, None));
        assert_eq!(own.difference(&record(1..=2000).statement(2000, 3)), None);
    }

    #[test]
    fn expired_records_are_not_compared() {
        let (own, other) = (record(1..=2000), record([5]));
        assert_eq!(own.difference(&other.statement(9, 9)), None);
        assert!(own.statement(9, 9).calls.is_empty());
        assert!(own.describe(9).is_none());
        assert!(own.describe(2000 - 254).is_some() && own.describe(2000 - 255).is_none());
        // A discarded call has overwritten the oldest one.
        let mut own = record(1..=KEPT);
        own.begin(&call(99), false);
        own.end(false);
        assert_eq!(own.settled(), KEPT as u64);
        assert_eq!(own.describe(1), None);
        assert_eq!(own.describe(2).unwrap(), "all_reduce of 2 i32, sum");
        make(&mut own, [257]);
        assert_eq!(own.difference(&record(1..=257).statement(257, 100)), None);
    }

    #[test]
    fn a_call_that_is_under_way_counts_and_is_not_compared() {
        let (mut own, other) = (record([1]), record([1, 2]));
        own.begin(&call(9), false);
        assert_eq!(own.difference(&other.statement(9, 9)), None);
        let statement = own.statement(9, 9);
        assert_eq!((statement.made, statement.last), (2, 1));
        assert_eq!(other.difference(&statement), None);
        assert!(!other.is_ahead_of(&statement));
        own.end(false);
        assert!(other.is_ahead_of(&own.statement(9, 9)));
        own.begin(&call(9), false);
        own.end(true);
        assert_eq!(own.difference(&other.statement(9, 9)).unwrap().number, 2);
    }

    #[test]
    fn calls_between_different_graphs_are_not_compared() {
        let (mut own, mut other) = (record([1]), record([1]));
        record_call(&mut own, 2);
        make(&mut own, [3, 4]);
        // The peer makes a call that this rank captures, and captures one later.
        make(&mut other, [2]);
        assert_eq!(own.difference(&other.statement(9, 9)), None);
        record_call(&mut other, 2);
        make(&mut other, [3, 4]);
        assert_eq!(own.difference(&other.statement(9, 9)), None);
        assert!(!other.is_ahead_of(&own.statement(9, 9)));
        // A failed capture does not count.
        let recordings = other.recordings;
        other.begin(&call(9), true);
        other.end(false);
        assert_eq!((other.settled(), other.recordings), (4, recordings));
        // With the same captures they are comparable.
        let mut same = record([1]);
        record_call(&mut same, 2);
        make(&mut same, [3, 5]);
        let found = own.difference(&same.statement(9, 9)).unwrap();
        assert_eq!((found.number, found.calls.is_some()), (3, true));
    }

    #[test]
    fn roots_of_many_ranks_differ() {
        let to = |root| Call {
            kind: CollectiveKind::Broadcast,
            op: None,
            root: Some(root),
            ..call(3)
        };
        let (mut own, mut other) = (Record::default(), Record::default());
        for (record, root) in [(&mut own, 700), (&mut other, 1400)] {
            record.begin(&to(root), false);
            record.end(true);
        }
        let found = own.difference(&other.statement(1, 1)).unwrap();
        let [own, theirs] = found.calls.unwrap();
        assert!(own.ends_with(", root 700") && theirs.ends_with(", root 1400"));
    }

    proptest! {
        #[test]
        fn a_statement_survives(counts in proptest::collection::vec(0usize..100, 0..40), until in 0u64..50) {
            let statement = record(counts).statement(until, 16);
            let bytes = statement.to_bytes();
            prop_assert_eq!(Statement::from_bytes(&bytes), Some(statement));
        }

        #[test]
        fn arbitrary_bytes_never_panic(bytes: Vec<u8>) {
            let _ = Statement::from_bytes(&bytes);
        }

        #[test]
        fn arbitrary_statements_never_panic(
            made in prop_oneof![0..400u64, proptest::num::u64::ANY],
            last in prop_oneof![0..400u64, proptest::num::u64::ANY],
            before: u64,
            calls in proptest::collection::vec(proptest::array::uniform4(proptest::num::u32::ANY), 0..20),
        ) {
            let (recordings, last_recordings) = (0, 0);
            let sent = Statement { made, recordings, last, last_recordings, before, calls };
            if let Some(statement) = Statement::from_bytes(&sent.to_bytes()) {
                let own = record(1..=300);
                let _ = (own.difference(&statement), own.is_ahead_of(&statement), statement.last_call());
            }
        }
    }
}
