//! What is looked for is looked at once, whatever else becomes known meanwhile.

use std::sync::{Arc, OnceLock};

use gms_policy::ids::PageAddr;

use super::*;
use crate::fault::tests::{ID, map, own_userfaultfd};
use crate::kernel::Faults;
use crate::kernel::hooked::Hooked;
use crate::kernel::pagemap::Pagemap;
use crate::kernel::uffd::Userfaultfd;
use crate::range_set::RangeSet;
use crate::tables::EvictOutcome;

#[test]
fn a_marker_is_none_the_less_one_if_its_child_is_met_meanwhile() {
    let at = map(PAGE);
    let owner = Userfaultfd::of_child(own_userfaultfd());
    assert!(owner.register(at..at + PAGE));
    owner.mark(at..at + PAGE, true).expect("marked");
    let mut tables = Tables::new(2, 1024).expect("a memfd");
    tables.add_space(ID);
    tables.register(ID, at..at + PAGE, &RangeSet::default());
    let place = (ID, PageAddr::containing(at));
    let mut leaving = Vec::new();
    tables.begin_evict(ID, &[place.1], &mut leaving);
    tables.finish_evict(leaving[0].1, EvictOutcome::Moved(7), &mut Vec::new());

    let met: Arc<OnceLock<Arc<Space>>> = Arc::default();
    let mut hooked = Hooked::new(owner);
    let child = met.clone();
    hooked.before_probe = Some(Box::new(move || {
        let page_tables = Pagemap::open(std::process::id() as i32).expect("own page tables");
        let _ = child.get().expect("set below").page_tables.set(Box::new(page_tables));
    }));
    let space = Arc::new(Space::new(ID, Box::new(hooked)));
    assert!(met.set(space.clone()).is_ok());
    assert_eq!(look_for_marker(&mut tables, &space, place), Probe::Occupied);
    assert!(!tables.is_empty(place), "a page was forgotten that has a marker");
    // Known by now.
    assert!(space.has_marker(place.1));
}
