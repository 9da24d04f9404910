//! Warns once a day of keys that end soon: a workload may run for longer than they are good.

use std::time::{Duration, Instant, SystemTime};

use gms_transport::keys::Identity;

/// As often as an agent does.
const EVERY: Duration = Duration::from_secs(24 * 60 * 60);

/// What else is to be done about a key that this process has read, and reads no more.
const CURE: &str = "a workload that runs keeps the key it was started with: take the new one by 'gms detach PID' and 'gms attach PID --local SIZE --agent HOST:PORT --keys DIR'";

/// See the module's documentation.
pub(crate) struct Reminder {
    identity: Identity,
    due: Instant,
}

impl Reminder {
    /// Of a session that begins `now`, when it has warned already.
    pub(crate) fn new(now: Instant, identity: Identity) -> Reminder {
        Reminder { identity, due: now + EVERY }
    }

    /// What is to be told now, which is `today` by the clock that certificates go by.
    pub(crate) fn poll(&mut self, now: Instant, today: SystemTime) -> Vec<String> {
        if now < self.due {
            return Vec::new();
        }
        self.due = now + EVERY;
        let endings = self.identity.endings(today);
        endings.iter().map(|ending| format!("{ending}; {CURE}")).collect()
    }

    /// When the key ends.
    pub(crate) fn expires(&self) -> SystemTime {
        self.identity.expires()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_that_ends_soon_is_told_each_day_and_another_is_not() {
        let (_, client) = gms_transport::keys::ephemeral().unwrap();
        let (start, expires) = (Instant::now(), client.expires());
        let mut reminder = Reminder::new(start, client);
        let soon = expires - 2 * EVERY;
        assert!(reminder.poll(start, soon).is_empty(), "it was told at the start");
        for day in 1..4_u32 {
            let told = reminder.poll(start + day * EVERY, soon);
            assert!(told.len() == 1 && told[0].contains("in 2 days"), "{told:?}");
            assert!(told[0].contains("gms detach PID") && told[0].contains("gms attach PID"));
            assert!(reminder.poll(start + day * EVERY + EVERY / 2, soon).is_empty());
        }
        let late = reminder.poll(start + 5 * EVERY, expires + EVERY);
        assert!(late[0].starts_with("client.pem has expired, on 20"), "{late:?}");
        assert!(reminder.poll(start + 9 * EVERY, expires - 60 * EVERY).is_empty());
    }
}
