//! Congestion control: CUBIC (RFC 9438), but a link may always have some packets under way.
//!
//! CUBIC takes each loss for a full queue. With one packet in a hundred lost at random its window comes down to a dozen packets, less than a page
//! vector, though nothing is full. On a LAN a floor does no harm: it is what a path holds, and a path that carries nothing is tried by single probes.

use std::any::Any;
use std::sync::Arc;
use std::time::Instant;

use quinn_proto::RttEstimator;
use quinn_proto::congestion::{Controller, ControllerFactory, ControllerMetrics, CubicConfig};

use super::limits::{INITIAL_WINDOW, WINDOW_MIN};

/// Makes a controller for each link.
pub(super) struct Config;

/// CUBIC with a floor.
struct Floored(Box<dyn Controller>);

impl ControllerFactory for Config {
    fn build(self: Arc<Self>, now: Instant, mtu: u16) -> Box<dyn Controller> {
        let mut cubic = CubicConfig::default();
        cubic.initial_window(INITIAL_WINDOW);
        Box::new(Floored(Arc::new(cubic).build(now, mtu)))
    }
}

impl Controller for Floored {
    fn on_ack(
        &mut self,
        now: Instant,
        sent: Instant,
        bytes: u64,
        app_limited: bool,
        rtt: &RttEstimator,
    ) {
        self.0.on_ack(now, sent, bytes, app_limited, rtt);
    }

    fn on_congestion_event(
        &mut self,
        now: Instant,
        sent: Instant,
        persistent: bool,
        lost_bytes: u64,
    ) {
        self.0.on_congestion_event(now, sent, persistent, lost_bytes);
    }

    fn on_mtu_update(&mut self, mtu: u16) {
        self.0.on_mtu_update(mtu);
    }

    fn window(&self) -> u64 {
        self.0.window().max(WINDOW_MIN)
    }

    fn metrics(&self) -> ControllerMetrics {
        self.0.metrics()
    }

    fn clone_box(&self) -> Box<dyn Controller> {
        Box::new(Floored(self.0.clone_box()))
    }

    fn initial_window(&self) -> u64 {
        self.0.initial_window()
    }

    fn into_any(self: Box<Self>) -> Box<dyn Any> {
        self
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn losses_leave_a_link_what_its_path_holds() {
        let start = Instant::now();
        let mut controller = Arc::new(Config).build(start, 1472);
        assert_eq!(controller.window(), INITIAL_WINDOW);
        let at = |number: u64| start + Duration::from_millis(number);
        (1..4)
            .for_each(|number| controller.on_congestion_event(at(number), at(number), false, 1472));
        assert!(controller.window() < INITIAL_WINDOW && controller.window() > WINDOW_MIN);
        (4..99)
            .for_each(|number| controller.on_congestion_event(at(number), at(number), true, 1472));
        assert_eq!(controller.window(), WINDOW_MIN);
        assert_eq!(controller.clone_box().window(), WINDOW_MIN);
    }
}
