//! Cache of resolved lane steps.

use super::{FreeNames, LaneStep, ReadValues, ReadWord, Resolution, SectionInstance};
use crate::program::diagnostic::Diagnostic;
use crate::sync::lock;
use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, OnceLock};

/// Limit on the words on which cached steps depend: cached resolutions refer to one another, and are dropped recursively.
const MAX_WORDS: usize = 512;

/// Number of steps that are resolved although the cache is full before it is emptied, for each step that it may hold: the
/// values on which its steps depend may never come again.
const MAX_MISSED: usize = 8;

/// Cache of resolved steps. Resolving the steps of a lane takes longer than executing them on small data. They hardly
/// depend on the launch, and the values that lanes read from memory often recur, so later launches reuse them.
pub(in crate::program) struct StepCache {
    /// Limit on the steps that it holds, which bounds its memory; further ones are resolved for each launch.
    limit: usize,
    announced: OnceLock<Vec<usize>>,
    read: OnceLock<BTreeSet<String>>,
    steps: Mutex<CachedSteps>,
}

#[derive(Default)]
struct CachedSteps {
    first: BTreeMap<StepKey, Arc<CachedResolution>>,
    count: usize,
    /// Steps that were resolved since it is full.
    missed: usize,
}

/// Cache key: lane, epoch modulo its period, and the announced tensors that some rank does not reach.
type StepKey = (usize, u64, Vec<usize>);

/// Value of a word that a resolution asks for; `None` if it is not known yet.
type ReadAnswer = Option<i64>;

/// A cached resolution: complete, or continued by the value of a word.
enum CachedResolution {
    Complete(Arc<[LaneStep]>),
    /// It asks for a word, and depends on the answer.
    Asks(ReadWord, Mutex<BTreeMap<ReadAnswer, Arc<CachedResolution>>>),
}

impl StepCache {
    /// A cache of at most so many steps.
    pub(in crate::program) fn new(limit: usize) -> Self {
        Self {
            limit,
            announced: OnceLock::new(),
            read: OnceLock::new(),
            steps: Mutex::default(),
        }
    }

    /// Tensors that lanes announce.
    pub(in crate::program) fn announced(&self, section: &SectionInstance) -> &[usize] {
        self.announced.get_or_init(|| section.announced())
    }

    /// Names of the integers that lanes read from memory.
    pub(in crate::program) fn read(&self, section: &SectionInstance) -> &BTreeSet<String> {
        self.read
            .get_or_init(|| FreeNames::of(&section.section).read)
    }

    /// Steps of a lane of `section`, which must be the same section in every call, with the tensors `missing`
    /// unreachable, and words of memory that have `values`; see [`SectionInstance::steps_where`]. Asks for each word once. Also
    /// gives the number of statements that were resolved for this, 0 where the steps were cached.
    pub(in crate::program) fn steps(
        &self,
        section: &SectionInstance,
        launch: (usize, u64),
        missing: &[usize],
        values: &ReadValues<'_>,
    ) -> Result<(Arc<[LaneStep]>, usize), Diagnostic> {
        let (lane, epoch) = launch;
        let reachable = |tensor: usize| !missing.contains(&tensor);
        let resolve = |values: &ReadValues<'_>| {
            let (steps, taken) = section.steps_where(lane, epoch, &reachable, values)?;
            Ok((steps.into(), taken))
        };
        let found = self.cached_or(section, launch, missing, values, resolve);
        found.map(|(steps, taken)| (steps, taken.unwrap_or(0)))
    }

    /// As [`steps`](Self::steps), with the resolution that goes on from there, unless the steps were cached.
    pub(in crate::program) fn begin<'s>(
        &self,
        section: &'s SectionInstance,
        launch: (usize, u64),
        missing: &[usize],
        values: &ReadValues<'_>,
    ) -> Result<(Arc<[LaneStep]>, Option<Resolution<'s>>), Diagnostic> {
        self.cached_or(section, launch, missing, values, |values| {
            let mut resolution = Resolution::new(section, launch, missing);
            Ok((resolution.go_on(values)?.into(), resolution))
        })
    }

    /// The cached steps, or what `resolve` gives, which gets the values of words.
    fn cached_or<T>(
        &self,
        section: &SectionInstance,
        (lane, epoch): (usize, u64),
        missing: &[usize],
        values: &ReadValues<'_>,
        resolve: impl FnOnce(&ReadValues<'_>) -> Result<(Arc<[LaneStep]>, T), Diagnostic>,
    ) -> Result<(Arc<[LaneStep]>, Option<T>), Diagnostic> {
        let key = (lane, epoch % section.period.max(1), missing.to_vec());
        let mut asked = Vec::new();
        // The key has everything that steps depend on: lane, epoch within the period, and unreachable tensors; values
        // read from memory select a path in the tree below it.
        let mut next = lock(&self.steps).first.get(&key).cloned();
        while let Some(resolution) = next {
            match &*resolution {
                CachedResolution::Complete(steps) => return Ok((steps.clone(), None)),
                CachedResolution::Asks(word, answers) => {
                    // Asked without a lock: the answer may be computed by the verifier, which may come back to this
                    // cache.
                    let answer = values(word);
                    asked.push((*word, answer));
                    // `None`, an unknown value, is an answer too: the steps up to there are complete for it.
                    next = lock(answers).get(&answer).cloned();
                }
            }
        }
        // Resolved from the start; words that were asked for already keep their answers.
        let (known, asked) = (asked.len(), RefCell::new(asked));
        let repeated = RefCell::new(0..known);
        let answer = |word: &ReadWord| {
            if let Some(number) = repeated.borrow_mut().next() {
                return asked.borrow()[number].1;
            }
            let answer = values(word);
            asked.borrow_mut().push((*word, answer));
            answer
        };
        // Without a lock, since resolving takes long; two threads may do it, and the second result is dropped.
        let (steps, resolved) = resolve(&answer)?;
        lock(&self.steps).insert(self.limit, key, asked.into_inner(), &steps);
        Ok((steps, Some(resolved)))
    }
}

/// For a kernel that the host device runs.
impl Default for StepCache {
    fn default() -> Self {
        Self::new(1 << 14)
    }
}

impl CachedSteps {
    fn insert(
        &mut self,
        limit: usize,
        key: StepKey,
        asked: Vec<(ReadWord, ReadAnswer)>,
        steps: &Arc<[LaneStep]>,
    ) {
        if asked.len() > MAX_WORDS {
            return;
        }
        let size = steps.len() + asked.len();
        if self.count + size > limit {
            self.missed += size;
            if self.missed <= MAX_MISSED * limit {
                return;
            }
            *self = Self::default();
        }
        self.count += size;
        let complete = Arc::new(CachedResolution::Complete(steps.clone()));
        // The rest of the path that is not cached yet, from its end.
        let path = |asked: &[(ReadWord, ReadAnswer)]| {
            asked
                .iter()
                .rev()
                .fold(complete.clone(), |next, (word, answer)| {
                    let answers = BTreeMap::from([(*answer, next)]);
                    Arc::new(CachedResolution::Asks(*word, Mutex::new(answers)))
                })
        };
        let mut at = match self.first.get(&key) {
            Some(first) => first.clone(),
            None => {
                self.first.insert(key, path(&asked));
                return;
            }
        };
        for (number, (_, answer)) in asked.iter().enumerate() {
            let CachedResolution::Asks(_, answers) = &*at else {
                return;
            };
            let mut answers = lock(answers);
            let Some(next) = answers.get(answer).cloned() else {
                answers.insert(*answer, path(&asked[number + 1..]));
                return;
            };
            // The guard borrows from `at`, which is replaced below.
            drop(answers);
            at = next;
        }
    }
}
