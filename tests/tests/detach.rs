//! The way home: of programs that touch none of their memory, and of pages that nobody has any more.

use std::time::{Duration, Instant};

use gms_tests::*;
use nix::sys::signal::Signal;

/// For a program to be paged.
const SOON: Duration = Duration::from_secs(30);
/// For a few hundred MiB to come home, however busy the machine is.
const QUICK: Duration = Duration::from_secs(6);
/// An agent that gives nothing back for 15 s has lost its pages.
const LOST: Duration = Duration::from_secs(40);

/// A program that fills memory and then touches none of it, asleep or computing, until it gets a line.
fn still(mib: Mib, how: &str) -> Proc {
    let argv = [mib.0.to_string(), how.to_string()];
    let proc = Program::new([c_program("still")]).args(argv).stdin_open().spawn();
    proc.wait_output(0, "ready\n");
    proc
}

fn wait_until_away(pager: &mut Proc, least: Mib) -> Status {
    poll_until("pages at the agents", SOON, || {
        if pager.poll().is_some() {
            pager.fail("gms ended early");
        }
        // What is away and not at an agent is on its way there.
        status_of(pager.pid()).filter(|s| {
            // What each agent holds is told a little later.
            let held: u64 = s.agents.iter().map(|agent| agent.pages_held * 4096).sum();
            s.away_bytes >= least.bytes()
                && held.min(s.remote_bytes) + Mib(2).bytes() >= s.away_bytes
        })
    })
}

fn line(proc: &mut Proc, answer: &str) {
    let from = proc.output_len();
    proc.write_stdin(b"\n");
    proc.wait_output(from, answer);
}

fn end_well(mut proc: Proc) {
    line(&mut proc, "right\n");
    proc.close_stdin();
    let outcome = proc.finish().expect_code(0);
    assert!(outcome.text().ends_with("ended\n"), "{}", outcome.text());
}

fn resident(proc: &Proc) -> u64 {
    rss_anon(proc.pid()).unwrap_or(0)
}

fn comes_home_at_once(how: &str) {
    let Some(stage) = Stage::set() else { return };
    let agent = AgentProc::start(Mib(512));
    let proc = still(Mib(256), how);
    let before = Before::of(proc.pid());
    let attach = Gms::attach(&stage, proc.pid()).local(Mib(48)).agents(&[&agent]);
    let mut pager = attach.spawn();
    wait_until_away(&mut pager, Mib(200));
    let began = Instant::now();
    Gms::line(["detach"]).arg(proc.pid().to_string()).finish().expect_code(0);
    let took = began.elapsed();
    let outcome = attach.finish_proc(pager).expect_code(0);
    assert_let_go(proc.pid(), Mib(250));
    before.assert_unchanged();
    assert!(took < QUICK, "it took {took:?}");
    // Nobody faulted: it came by itself.
    assert!(outcome.stats().pages_in > 200 << 8, "{:?}", outcome.stats());
    end_well(proc);
}

#[test]
fn a_sleeping_program_comes_home_at_once() {
    comes_home_at_once("sleep");
}

#[test]
fn a_computing_program_comes_home_at_once() {
    comes_home_at_once("compute");
}

#[test]
fn guards_put_over_what_is_away_are_not_filled_by_its_way_home() {
    let Some(stage) = Stage::set() else { return };
    if !has_guards() {
        return;
    }
    let agent = AgentProc::start(Mib(512));
    let mut proc =
        Program::new([c_program("promises")]).args(["guards-home", "64"]).stdin_open().spawn();
    proc.wait_output(0, "ready\n");
    let before = Before::of(proc.pid());
    let attach = Gms::attach(&stage, proc.pid()).local(Mib(8)).agents(&[&agent]);
    let mut pager = attach.spawn();
    wait_until_away(&mut pager, Mib(48));
    line(&mut proc, "guarded\n");
    Gms::line(["detach"]).arg(proc.pid().to_string()).finish().expect_code(0);
    attach.finish_proc(pager).expect_code(0);
    // A quarter has guards instead of pages.
    assert_let_go(proc.pid(), Mib(46));
    before.assert_unchanged();
    line(&mut proc, "right\n");
    proc.finish().expect_code(0);
}

/// Parent, child and grandchild share pages that are away, and each has some of its own. All that each has comes home, and none runs meanwhile.
#[test]
fn a_tree_comes_home_as_a_whole() {
    let Some(stage) = Stage::set() else { return };
    let agents = [AgentProc::start(Mib(512)), AgentProc::start(Mib(512))];
    let program = Program::new([c_program("forkcow")]).args(["64", "held"]);
    let native = program.clone().stdin("\n").finish().expect_code(0);
    let gms =
        Gms::run(&stage, &program.stdin_open()).local(Mib(24)).agents(&[&agents[0], &agents[1]]);
    let mut proc = gms.spawn();
    proc.wait_output(0, "held\n");
    // Of 192 MiB, what is shared counted with each; agents hold that once.
    let status = poll_until("pages away", SOON, || {
        status_of(proc.pid()).filter(|status| status.away_bytes >= Mib(144).bytes())
    });
    let mut tree = vec![status.pid];
    tree.extend(descendants(status.pid).into_iter().filter(|&pid| !is_of_gms(pid)));
    assert_eq!(tree.len(), 3, "not parent, child and grandchild");
    let resident = |pid: i32| rss_anon(pid).unwrap_or(0);
    for &pid in &tree {
        assert!(has_uffd(pid) && resident(pid) < Mib(60).bytes(), "nothing of {pid} was away");
    }
    Gms::line(["detach"]).arg(proc.pid().to_string()).finish().expect_code(0);
    tree.iter().for_each(|&pid| assert_let_go(pid, Mib(64)));
    // Each looks at all of its pages, and how the first ends tells of all of them.
    proc.write_stdin(b"\n");
    let outcome = gms.finish_proc(proc).expect_code(0);
    assert_eq!(outcome.stdout, native.stdout);
}

#[test]
fn ctrl_c_shows_on_a_terminal_how_far_it_is() {
    let Some(_stage) = Stage::set() else { return };
    let proc = still(Mib(256), "sleep");
    let mut terminal = Terminal::open();
    terminal.expect("READY");
    let gms = gms_binary();
    let pid = proc.pid();
    terminal.type_in(&format!("{} attach {pid} --local 32M --export 512M\n", gms.display()));
    poll_until("pages at the agent", SOON, || {
        status_of(pid).filter(|status| status.away_bytes > Mib(200).bytes())
    });
    terminal.type_in("\x03");
    terminal.expect("bringing pages home: ");
    terminal.expect("all pages are home");
    end_well(proc);
}

/// A program with pages at two agents, one of which has been killed.
struct Bereft {
    proc: Proc,
    before: Before,
    attach: Gms,
    pager: Proc,
    _alive: AgentProc,
    /// Where the dead agent was.
    addr: String,
    /// Bytes that were there.
    lost: u64,
}

fn with_a_dead_agent(stage: &Stage, how: &str) -> Bereft {
    let (dead, alive) = (AgentProc::start(Mib(512)), AgentProc::start(Mib(512)));
    // Computing, it keeps what it lives on (its stack, its thread's data) by itself.
    let proc = still(Mib(128), how);
    let before = Before::of(proc.pid());
    let attach =
        Gms::attach(stage, proc.pid()).local(Mib(24)).agents(&[&dead, &alive]).redundancy("none");
    let mut pager = attach.spawn();
    // Nearly all that will go.
    let status = wait_until_away(&mut pager, Mib(102));
    let addr = dead.addr();
    let lost = status.agents.iter().find(|agent| agent.addr == addr).map(|a| a.pages_held * 4096);
    let lost = lost.filter(|lost| *lost > 0).unwrap_or_else(|| pager.fail("the agent has no page"));
    dead.kill();
    Bereft { proc, before, attach, pager, _alive: alive, addr, lost }
}

/// The rest is home, and what is not is never read as anything.
fn assert_ends_where_a_page_is_missing(mut proc: Proc, before: &Before, lost: u64) {
    assert_let_go(proc.pid(), Mib(0));
    before.assert_unchanged();
    if let Some(status) = proc.poll() {
        proc.fail(&format!("it has touched no lost page, and ended: {status:?}"));
    }
    // A few pages come and go while all this is looked at.
    let (home, expected) = (resident(&proc), Mib(128).bytes() - lost);
    assert!(home.abs_diff(expected) < Mib(4).bytes(), "{home} bytes are resident, not {expected}");
    proc.write_stdin(b"\n");
    let outcome = proc.finish();
    assert_eq!(outcome.signal, Some(Signal::SIGBUS as i32), "{}", outcome.stderr);
    assert!(outcome.stderr.is_empty() && !outcome.text().contains("right"), "{}", outcome.stderr);
}

#[test]
fn a_detach_ends_although_an_agent_is_gone_for_good() {
    ends_although_an_agent_is_gone("compute");
}

/// The poison must not be refused because the address space is being changed.
#[test]
fn a_detach_ends_although_an_agent_is_gone_and_the_program_discards_memory_all_the_time() {
    ends_although_an_agent_is_gone("discard");
}

fn ends_although_an_agent_is_gone(how: &str) {
    let Some(stage) = Stage::set_beside_others() else { return };
    let Bereft { proc, before, attach, pager, _alive, addr, lost } = with_a_dead_agent(&stage, how);
    let detach = Gms::line(["detach"]).limit(LOST).arg(proc.pid().to_string());
    let outcome = detach.finish().expect_code(125);
    for words in ["pages are lost", &addr, "SIGBUS", &proc.pid().to_string()] {
        assert!(outcome.stderr.contains(words), "{words}: {}", outcome.stderr);
    }
    let outcome = attach.finish_proc(pager).expect_code(125);
    assert!(outcome.stderr.contains("pages are lost"), "{}", outcome.stderr);
    assert_ends_where_a_page_is_missing(proc, &before, lost);
}

#[test]
fn a_detach_does_not_wait_for_an_agent_that_has_lost_its_pages() {
    let Some(stage) = Stage::set() else { return };
    let Bereft { proc, before, attach, pager, _alive, addr, lost } =
        with_a_dead_agent(&stage, "compute");
    let detach = Gms::line(["detach"]).limit(LOST).arg(proc.pid().to_string());
    let client = detach.spawn();
    poll_until("the detach to begin", SOON, || {
        status_of(proc.pid()).filter(|status| status.detaching)
    });
    let began = Instant::now();
    let _restarted = AgentSetup::new(Mib(512)).listen(addr.parse().expect("its address")).start();
    let outcome = detach.finish_proc(client).expect_code(125);
    assert!(began.elapsed() < Duration::from_secs(12), "it took {:?}", began.elapsed());
    assert!(outcome.stderr.contains("pages are lost"), "{}", outcome.stderr);
    attach.finish_proc(pager).expect_code(125);
    assert_ends_where_a_page_is_missing(proc, &before, lost);
}

/// Of two agents that have each page one has been killed: the other may be late, and is asked again.
#[test]
fn a_page_is_not_lost_because_the_agent_that_has_it_was_away_for_a_moment() {
    let Some(stage) = Stage::set_beside_others() else { return };
    let (dead, alive) = (AgentProc::start(Mib(256)), AgentProc::start(Mib(256)));
    let proc = still(Mib(96), "compute");
    let before = Before::of(proc.pid());
    let attach = Gms::attach(&stage, proc.pid()).local(Mib(24)).agents(&[&dead, &alive]);
    let mut pager = attach.spawn();
    wait_until_away(&mut pager, Mib(64));
    let is_away = |addr: &str| {
        poll_until("an agent to be away", SOON, || {
            let agents = status_of(proc.pid())?.agents;
            agents.iter().find(|agent| agent.addr == addr && !agent.up).map(drop)
        });
    };
    let addr = dead.addr();
    dead.kill();
    is_away(&addr);
    // Some of its pages are under way when its link is given up.
    alive.signal(Signal::SIGSTOP);
    let detach = Gms::line(["detach"]).limit(LOST * 2).arg(proc.pid().to_string());
    let client = detach.spawn();
    is_away(&alive.addr());
    alive.signal(Signal::SIGCONT);
    detach.finish_proc(client).expect_code(0);
    attach.finish_proc(pager).expect_code(0);
    assert_let_go(proc.pid(), Mib(90));
    before.assert_unchanged();
    end_well(proc);
}

/// A thread that already waits for a lost page is not left waiting.
#[test]
fn a_program_that_waits_for_a_lost_page_ends() {
    let Some(stage) = Stage::set_beside_others() else { return };
    let Bereft { mut proc, attach, pager, _alive, .. } = with_a_dead_agent(&stage, "compute");
    let detach = Gms::line(["detach"]).limit(LOST).arg(proc.pid().to_string());
    let client = detach.spawn();
    poll_until("the detach to begin", SOON, || {
        status_of(proc.pid()).filter(|status| status.detaching)
    });
    proc.write_stdin(b"\n");
    let outcome = proc.finish();
    assert_eq!(outcome.signal, Some(Signal::SIGBUS as i32), "{}", outcome.stderr);
    drop(detach.finish_proc(client));
    drop(attach.finish_proc(pager));
}
