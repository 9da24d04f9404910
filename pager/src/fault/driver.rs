//! The fault thread: waits for messages of the kernel and packets of the agents, and has its core turn.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use crossbeam_channel::Receiver;
use gms_policy::ids::SpaceId;
use gms_transport::Transport;
use gms_transport::client::Client;
use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout};

use super::follow::Follow;
use super::{Asked, Asks, FaultCore, Listen};
use crate::homes::{FaultCommand, ThreadIndex};
use crate::kernel::proc;
use crate::shared::Shared;
use crate::speech::say;
use crate::sync::{drain, lock};
use crate::trace::Trace;

/// Events of epoll taken at once.
const EVENTS: usize = 32;
/// Longest that the thread polls before it blocks: waking an idle CPU costs more than a whole fault.
const SPIN: Duration = Duration::from_micros(50);
/// The same while pages are awaited.
const SPIN_AWAITED: Duration = Duration::from_millis(1);
/// Commands and timers are looked at once in so many turns, however busy the thread is.
const TURNS: u32 = 16;
/// A yield that takes longer has given the CPU to somebody who keeps it. Then the thread blocks, which brings it back sooner, for a while.
const YIELD_MAX: Duration = Duration::from_millis(2);
const NO_SPIN: Duration = Duration::from_millis(10);
/// What is waited for: commands, packets, and from here on the spaces.
const KICKS: u64 = 0;
const PACKETS: u64 = 1;
const SPACES: u64 = 2;

/// See the module's documentation.
pub struct FaultThread<T> {
    core: FaultCore<T>,
    shared: Arc<Shared>,
    thread: ThreadIndex,
    commands: Receiver<FaultCommand>,
    /// Kicks, the lane and the spaces.
    epoll: Epoll,
    /// Spaces with something to read.
    readable: Vec<SpaceId>,
    follow: Follow,
    /// Until when it polls, and from when on it may again.
    spin_until: Instant,
    no_spin_until: Instant,
}

const ASKS: Asks =
    Asks { threads: |pid| proc::status_field(pid, "Threads:"), refuses: proc::may_refuse_unmaps };

impl<T: Transport> FaultThread<T> {
    /// A thread's state; [`FaultThread::run`] runs it.
    pub fn new(
        shared: Arc<Shared>,
        thread: ThreadIndex,
        commands: Receiver<FaultCommand>,
        agents: Client<T>,
        trace: Option<Trace>,
    ) -> nix::Result<FaultThread<T>> {
        let epoll = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC)?;
        epoll.add(shared.homes.kicks(thread), EpollEvent::new(EpollFlags::EPOLLIN, KICKS))?;
        epoll.add(agents.fd(), EpollEvent::new(EpollFlags::EPOLLIN, PACKETS))?;
        let now = Instant::now();
        Ok(FaultThread {
            core: FaultCore::new(now, shared.clone(), thread, agents, ASKS, trace),
            shared,
            thread,
            commands,
            epoll,
            readable: Vec::new(),
            follow: Follow::new(),
            spin_until: now,
            no_spin_until: now,
        })
    }

    /// Serves faults until the session stops.
    pub fn run(mut self) {
        gms_agent::spin::prefer_latency(gms_agent::spin::SLICE);
        let mut turn = 0u32;
        while !self.shared.stop.load(Ordering::Relaxed) {
            if self.shared.handover.is_resting() && self.core.is_at_rest() {
                self.shared.handover.park();
            }
            let mut now = Instant::now();
            let spin = now < self.spin_until;
            turn = turn.wrapping_add(1);
            let mut busy = spin && self.core.glance(&Instant::now);
            if !busy || turn.is_multiple_of(TURNS) {
                busy |= self.wait(now, spin);
                now = Instant::now();
            }
            for id in self.readable.drain(..) {
                self.core.handle_readable(&Instant::now, id);
            }
            self.core.turn(&Instant::now);
            self.follow_up();
            let awaits = self.core.agents().awaits();
            if busy && now >= self.no_spin_until {
                self.spin_until = now + if awaits { SPIN_AWAITED } else { SPIN };
            }
            // Also after a page was installed: perhaps the thread that waited for it shares our CPU.
            if spin && (!busy || !awaits) {
                self.give_way();
            }
        }
        self.end();
    }

    fn end(self) {
        if self.shared.has_failed() {
            // Children of which it was told may be known to nobody else.
            std::mem::forget(self.commands);
        }
        if let Some(Err(error)) = self.core.end(Instant::now()).map(Trace::write) {
            say(format!("--trace: cannot be written: {error}"));
        }
    }

    fn give_way(&mut self) {
        let before = Instant::now();
        std::thread::yield_now();
        let now = Instant::now();
        if now - before > YIELD_MAX {
            (self.spin_until, self.no_spin_until) = (now, now + NO_SPIN);
            self.follow.release(&self.shared.fault_cpu);
        }
    }

    /// Blocks (or, spinning, only looks) until a message, a packet, a command or a deadline; false if nothing came.
    fn wait(&mut self, now: Instant, spin: bool) -> bool {
        let limit = match spin {
            true => Duration::ZERO,
            false => self.core.deadline(now).saturating_duration_since(now),
        };
        let millis = limit.as_micros().div_ceil(1000) as u16;
        let mut events = [EpollEvent::empty(); EVENTS];
        // An interrupted or failed wait only means to look sooner.
        let ready = self.epoll.wait(&mut events, EpollTimeout::from(millis)).unwrap_or(0);
        let now = if spin { now } else { Instant::now() };
        let mut packets = self.core.agents().deadline().is_some_and(|deadline| deadline <= now);
        for event in &events[..ready] {
            match event.data() {
                KICKS => self.obey(),
                PACKETS => packets = true,
                space => self.readable.push(SpaceId(space - SPACES)),
            }
        }
        if packets {
            self.core.network(&Instant::now);
        }
        ready > 0
    }

    fn obey(&mut self) {
        drain(self.shared.homes.kicks(self.thread));
        while let Ok(command) = self.commands.try_recv() {
            self.core.handle_command(command);
        }
    }

    /// What a turn of the core leaves to be done.
    fn follow_up(&mut self) {
        while let Some(listen) = self.core.poll_listen() {
            self.listen(&listen);
        }
        self.record_latency();
        match self.core.take_asked() {
            Asked::Nobody => {}
            // Where other threads serve too, they would meet on one CPU.
            Asked::One(tid) if self.shared.homes.serves_alone(self.thread) => {
                self.follow.fault(tid);
            }
            Asked::One(_) | Asked::Others => self.follow.release(&self.shared.fault_cpu),
        }
        self.follow.look(&self.shared.fault_cpu);
    }

    fn record_latency(&mut self) {
        let served = self.core.drain_served();
        if served.len() > 0 {
            let mut latency = lock(&self.shared.latency);
            served.for_each(|waited| latency.saturating_record(waited.as_nanos() as u64));
        }
    }

    fn listen(&mut self, listen: &Listen) {
        let event = |space: u64, to| EpollEvent::new(to, SPACES + space);
        // Of a space that has been let go nothing is to be heard: what fails then need not be done.
        match listen {
            Listen::Begin(space) => {
                let event = event(space.id.0, EpollFlags::EPOLLIN);
                if let Err(errno) = self.epoll.add(&space.faults, event) {
                    self.shared.fail(format!("faults cannot be waited for: {errno}"));
                }
            }
            Listen::Pause(space) => {
                let mut event = event(space.id.0, EpollFlags::empty());
                let _ = self.epoll.modify(&space.faults, &mut event);
            }
            Listen::Resume(space) => {
                let mut event = event(space.id.0, EpollFlags::EPOLLIN);
                let _ = self.epoll.modify(&space.faults, &mut event);
            }
            Listen::End(space) => {
                let _ = self.epoll.delete(&space.faults);
            }
        }
    }
}
