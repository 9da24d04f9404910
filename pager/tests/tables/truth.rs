//! What the kernel allows a page to hold.

use std::collections::BTreeSet;

/// A removal of pages: a call of MADV_DONTNEED or MADV_FREE.
pub(crate) type Call = u32;

/// What a page may hold: each state that the kernel's rules allow, with the calls that have not taken effect in it. A call takes effect at one moment
/// between its event and its return (that of MADV_FREE at any moment from its event on, until the page is written after the return): whoever uses
/// the page meanwhile cannot know when, but what has been seen stays so. A parent and its child are judged apart: that a fork finds the page in one
/// state for both is not asked.
#[derive(Clone, Debug)]
pub(crate) struct Truth(BTreeSet<(u64, BTreeSet<Call>)>);

impl Truth {
    pub(crate) fn of(tag: u64, under_way: BTreeSet<Call>) -> Truth {
        Truth(BTreeSet::from([(tag, under_way)])).or_removed()
    }

    /// With the states in which calls take effect now.
    fn or_removed(mut self) -> Truth {
        let mut more: Vec<_> = self.0.iter().cloned().collect();
        while let Some((_, under_way)) = more.pop() {
            for call in &under_way {
                let rest: BTreeSet<Call> =
                    under_way.iter().copied().filter(|c| c != call).collect();
                if self.0.insert((0, rest.clone())) {
                    more.push((0, rest));
                }
            }
        }
        self
    }

    fn each(&self, change: impl Fn(u64, &BTreeSet<Call>) -> (u64, BTreeSet<Call>)) -> Truth {
        Truth(self.0.iter().map(|(tag, under_way)| change(*tag, under_way)).collect()).or_removed()
    }

    /// One thing is allowed that the kernel does not do: a page that is `leaving` (it has been moved out and has no marker yet) is zeros from the event of
    /// a call on, and the call may still remove what is written there. Nothing shows whether the call has taken effect, so that the page cannot be
    /// given back. Only who uses memory that another thread is giving back within that millisecond, and takes zeros for a sign that it has,
    /// could tell (docs/design.md, weakness 18).
    pub(crate) fn begin(&mut self, call: Call, leaving: bool) {
        *self = self.each(|tag, under_way| (tag, under_way | &BTreeSet::from([call])));
        if leaving {
            let zeros: Vec<_> =
                self.0.iter().map(|(_, under_way)| (0, under_way.clone())).collect();
            self.0.extend(zeros);
        }
    }

    /// MADV_DONTNEED returns: it has taken effect by now.
    pub(crate) fn end(&mut self, call: Call) {
        let one = BTreeSet::from([call]);
        *self = self.each(|tag, under_way| match under_way.contains(&call) {
            true => (0, under_way - &one),
            false => (tag, under_way.clone()),
        });
    }

    /// `returned` are the calls of MADV_FREE that have.
    pub(crate) fn write(&mut self, tag: u64, returned: &BTreeSet<Call>) {
        *self = self.each(|_, under_way| (tag, under_way - returned));
    }

    /// False if the page may not be seen so.
    pub(crate) fn read(&mut self, seen: u64) -> bool {
        self.0.retain(|(tag, _)| *tag == seen);
        !self.0.is_empty()
    }

    /// The page is where calls under way do not reach; what MADV_FREE has marked stays so.
    pub(crate) fn leave(&mut self, returned: &BTreeSet<Call>) {
        *self = self.each(|tag, under_way| (tag, under_way & returned));
    }
}
