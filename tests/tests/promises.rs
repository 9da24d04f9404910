//! What the kernel promises a program about its memory holds under gms too, where a pager from outside hears of it late, in another order, or not at all.
//! Each of these was found by reading the pager beside the kernel's source, and failed at commit 4291ebc.

use std::time::Duration;

use gms_tests::*;

/// Longer than any takes, and far shorter than for a thread that has its pages only by chance.
const LIMIT: Duration = Duration::from_secs(90);

/// Runs a case of `promises.c`, most of whose memory is away.
fn keeps(case: &str) {
    let Some(stage) = Stage::set_beside_others() else { return };
    if case.starts_with("guard") && !has_guards() {
        return;
    }
    let program = Program::new([c_program("promises")]).args([case, "64"]);
    let native = program.finish().expect_code(0);
    let gms = Gms::run(&stage, &program).local(Mib(24)).arg("--export").arg("1G").limit(LIMIT);
    enough_in_time(
        |stats| stats.pages_out > 4096,
        || {
            let paged = gms.finish().expect_code(0);
            assert_eq!(paged.text(), native.text());
            paged
        },
    );
}

macro_rules! promises {
    ($($name:ident => $case:literal;)*) => {$(
        #[test]
        fn $name() { keeps($case); }
    )*};
}

promises! {
    threads_that_outlive_the_first_one_keep_their_memory => "leader";
    a_process_that_shares_memory_outlives_the_one_that_made_it => "sharer";
    guarded_pages_are_zeros_although_guards_raise_no_event => "guards";
    guards_are_not_filled_by_what_is_fetched_or_filled_ahead => "guarded";
    blocks_freed_mapped_and_grown_by_several_threads_keep_their_bytes => "realloc";
    locked_memory_grows => "locked";
    children_have_what_they_inherit_and_nothing_else => "inherit";
    a_process_forks_while_its_threads_purge => "purging";
    a_thread_is_served_beside_others_that_purge_without_pause => "restless";
    a_subreaper_in_the_workload_waits_for_its_own => "subreaper";
    more_children_are_forked_than_gms_can_meet_in_time => "brood";
    what_is_discarded_is_zeros_although_it_was_on_its_way_back => "discards";
    memory_that_a_program_pages_itself_is_left_to_it => "own-missing";
    memory_whose_writes_a_program_watches_is_left_to_it => "own-writes";
}
