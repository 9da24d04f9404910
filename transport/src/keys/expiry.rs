//! Certificates that end soon, and the day on which they do.

use std::time::{Duration, SystemTime};

use x509_parser::time::ASN1Time;

use super::{CA, Identity};

/// How long before the end of a certificate its holder is warned.
pub const NOTICE: Duration = Duration::from_secs(30 * DAY_S);
/// Seconds of a day.
const DAY_S: u64 = 86400;

/// A certificate that ends within [`NOTICE`], or has ended.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{file} {}: {cure}", when(*until, *left_days))]
pub struct Ending {
    file: String,
    /// Seconds from 1970.
    until: u64,
    /// Whole days; none once it has ended.
    left_days: Option<u64>,
    cure: &'static str,
}

impl Identity {
    /// Its certificate and that of its authority, if they end within [`NOTICE`] of `now`.
    pub fn endings(&self, now: SystemTime) -> Vec<Ending> {
        let [own, _] = self.role().files();
        let renew = "renew it by `gms keys renew` where it was issued, and copy it here (an agent reads it at SIGHUP)";
        let again = "make new keys for all of the cluster by `gms keys init`";
        let ends = [(own, self.bearer.until, renew), (CA.to_owned(), self.authority_until, again)];
        let ending = |(file, until, cure)| {
            let left_s = is_near(until, now)?;
            let left_days = (left_s > 0).then_some(left_s / DAY_S);
            Some(Ending { file, until, left_days, cure })
        };
        ends.into_iter().filter_map(ending).collect()
    }
}

/// The seconds that are left until `until` (from 1970), if they are no more than [`NOTICE`].
pub(super) fn is_near(until: u64, now: SystemTime) -> Option<u64> {
    let now = now.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    Some(until.saturating_sub(now.as_secs())).filter(|&left| left <= NOTICE.as_secs())
}

fn when(until: u64, left_days: Option<u64>) -> String {
    match left_days {
        Some(days) => format!("expires on {}, in {days} days", day(until)),
        None => format!("has expired, on {}", day(until)),
    }
}

/// The day of a time (seconds from 1970), in UTC: 2028-11-22.
pub(super) fn day(seconds: u64) -> String {
    let time = i64::try_from(seconds).ok().and_then(|time| ASN1Time::from_timestamp(time).ok());
    time.map_or("?".into(), |time| time.to_datetime().date().to_string())
}

#[cfg(test)]
mod tests {
    use super::super::ephemeral;
    use super::*;

    #[test]
    fn a_certificate_is_told_a_month_before_its_end() {
        let (node, client) = ephemeral().unwrap();
        let told = |identity: &Identity, before: Duration| {
            let endings = identity.endings(identity.expires() - before);
            endings.iter().map(ToString::to_string).collect::<Vec<_>>()
        };
        let day = Duration::from_secs(DAY_S);
        assert_eq!(told(&client, NOTICE + Duration::from_secs(1)), Vec::<String>::new());
        for (identity, file) in [(&node, "node.pem"), (&client, "client.pem")] {
            for (left, says) in [(NOTICE, "in 30 days"), (3 * day / 2, "in 1 days")] {
                let told = told(identity, left);
                assert_eq!(told.len(), 1, "{told:?}");
                assert!(told[0].starts_with(&format!("{file} expires on 20")), "{told:?}");
                assert!(told[0].contains(says) && told[0].contains("gms keys renew"), "{told:?}");
            }
        }
        // The authority's end is ten years away, and then all have ended.
        let late = node.expires() + 8 * 365 * day - day;
        let told: Vec<String> = node.endings(late).iter().map(ToString::to_string).collect();
        assert!(told.len() == 2 && told[0].starts_with("node.pem has expired, on 20"), "{told:?}");
        assert!(told[1].starts_with("ca.pem expires on 20") && told[1].contains("gms keys init"));
    }
}
