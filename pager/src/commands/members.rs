//! `gms members`: which agents there are, as one of them knows.

use std::fmt::Write;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
use std::time::{Duration, Instant};

use gms_policy::PageCount;
use gms_transport::keys::{self, Role};
use gms_transport::message::{Control, MemberEntry, Op, Status, WorkloadId};
use gms_transport::{CloseCode, Event, PeerId, Quic, Transport};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use serde::Serialize;

use super::{Failure, print};
use crate::cli::MembersArgs;
use crate::json;
use crate::session::{SessionError, resolve};
use crate::size::Human;

/// An agent that has not answered after this does not.
const DEADLINE: Duration = Duration::from_secs(5);
/// An answer is looked for at least this often.
const LOOK_MS: u16 = 100;

/// A member of the cluster.
#[derive(Debug, Serialize)]
struct Member {
    /// Id in its certificate.
    node: String,
    address: SocketAddr,
    /// `--zone`, if it has one.
    zone: Option<String>,
    state: State,
    /// Counts its starts.
    incarnation: u64,
    /// What it exports, and how much of that is free; none if it has not said so yet.
    export_bytes: Option<u64>,
    free_bytes: Option<u64>,
    /// How long ago it said so.
    load_age_s: Option<f64>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
enum State {
    Alive,
    /// It does not answer, and is gone in some seconds unless it does.
    Suspect,
}

/// Prints the members as an agent knows them, itself the first.
pub(super) fn members(args: &MembersArgs) -> Result<u8, Failure> {
    let agent = resolve(&args.agent)?.socket;
    let asked = ask(args, agent)
        .map_err(|reason| SessionError::Agent { addr: args.agent.clone(), reason })?;
    let members: Vec<Member> = asked.iter().map(|entry| member(entry, agent)).collect();
    if args.json {
        print(&json::lines(&members)?)?;
    } else {
        print(table(&members).as_bytes())?;
    }
    Ok(0)
}

fn member(entry: &MemberEntry, asked: SocketAddr) -> Member {
    let bytes = |frames: u32| PageCount(frames.into()).bytes().0;
    let has_load = entry.load_age_ms != u32::MAX;
    let address = match entry.addr() {
        // One that listens at all addresses is where it was asked.
        addr if addr.ip().is_unspecified() => asked,
        addr => addr,
    };
    Member {
        node: PeerId::Issued(entry.node).to_string(),
        address,
        zone: Some(entry.zone().to_string()).filter(|zone| !zone.is_empty()),
        state: if entry.is_suspect() { State::Suspect } else { State::Alive },
        incarnation: entry.incarnation,
        export_bytes: has_load.then(|| bytes(entry.frames)),
        free_bytes: has_load.then(|| bytes(entry.frames_free)),
        load_age_s: has_load.then(|| f64::from(entry.load_age_ms) / 1e3),
    }
}

fn table(members: &[Member]) -> String {
    let zone = |member: &Member| member.zone.clone().unwrap_or_else(|| "-".into());
    let wide =
        members.iter().map(|member| member.address.to_string().len()).max().unwrap_or(0).max(7);
    let zone_wide = members.iter().map(|member| zone(member).len()).max().unwrap_or(0).max(4);
    let mut text = format!(
        "{:32}  {:wide$}  {:zone_wide$}  {:7}  {:>8}  {:>8}  {}\n",
        "NODE", "ADDRESS", "ZONE", "STATE", "FREE", "EXPORT", "INCARNATION"
    );
    for member in members {
        let memory =
            |bytes: Option<u64>| bytes.map_or("-".into(), |bytes| Human(bytes).to_string());
        let (free, export) = (memory(member.free_bytes), memory(member.export_bytes));
        let state = match member.state {
            State::Alive => "alive",
            State::Suspect => "suspect",
        };
        let (node, address, zone) = (&member.node, member.address.to_string(), zone(member));
        // Writing to memory does not fail.
        let _ = writeln!(
            text,
            "{node}  {address:wide$}  {zone:zone_wide$}  {state:7}  {free:>8}  {export:>8}  {}",
            member.incarnation
        );
    }
    text
}

/// Who is a member by the word of an agent; or why it does not say.
fn ask(args: &MembersArgs, agent: SocketAddr) -> Result<Vec<MemberEntry>, String> {
    let identity = keys::load(&args.keys, Role::Client).map_err(|error| error.to_string())?;
    let any = match agent {
        SocketAddr::V4(_) => SocketAddr::from((Ipv4Addr::UNSPECIFIED, 0)),
        SocketAddr::V6(_) => SocketAddr::from((Ipv6Addr::UNSPECIFIED, 0)),
    };
    let mut quic = Quic::client(any, &identity).map_err(|error| error.to_string())?;
    let now = Instant::now();
    let link = quic.connect(now, agent).map_err(|error| error.to_string())?;
    let end = now + DEADLINE;
    let (mut answer, mut told) = (None, Vec::new());
    loop {
        let now = Instant::now();
        quic.drive(now).map_err(|error| format!("UDP: {error}"))?;
        while let Some(event) = quic.poll(now) {
            match event {
                Event::Connected { .. } => {
                    let ask = Control::request(Op::Members, 1, WorkloadId::default());
                    quic.request(now, link, &ask, &[]).map_err(|error| error.to_string())?;
                }
                Event::Control { control, .. } => answer = Some(control.status()),
                // As much as the control message has announced.
                Event::Payload { bytes, .. } => told.extend_from_slice(&bytes),
                Event::Complete { .. } => {
                    quic.close(now, link, CloseCode::Goodbye);
                    // The agent sees the end of the link in any case.
                    let _ = quic.flush(now);
                    return members_of(answer, &told);
                }
                Event::Aborted { reason, .. } => {
                    return Err(format!("gives no answer ({reason:?})"));
                }
                Event::Closed { reason, .. } => return Err(reason.to_string()),
            }
        }
        quic.flush(now).map_err(|error| format!("UDP: {error}"))?;
        if now >= end {
            return Err("does not answer: check the address, and that its UDP port is open".into());
        }
        let until = quic.deadline().unwrap_or(end).min(end).saturating_duration_since(now);
        let ms = until.as_millis().min(LOOK_MS.into()) as u16;
        // Woken by a packet; otherwise the transport's timers are looked at.
        let _ = poll(&mut [PollFd::new(quic.fd(), PollFlags::POLLIN)], PollTimeout::from(ms));
    }
}

/// The members of a whole answer.
fn members_of(status: Option<Status>, told: &[u8]) -> Result<Vec<MemberEntry>, String> {
    match status {
        Some(Status::Ok) => {
            MemberEntry::read_all(told).ok_or_else(|| "tells what are no members".into())
        }
        Some(Status::Draining) => {
            Err("is about to end, and no member any more: ask another one".into())
        }
        Some(Status::Unsupported) => {
            Err("knows no members: it speaks an older version of the protocol".into())
        }
        other => Err(format!("does not say who is a member ({other:?})")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use gms_transport::message::Zone;
    use zerocopy::IntoBytes;

    #[test]
    fn a_member_is_one_line_and_what_is_not_known_is_a_dash() {
        let asked = ([10, 0, 0, 1], 7400).into();
        let zone = "rack-7".parse().expect("a zone");
        let own = MemberEntry::new([1; 16], ([0; 4], 7400).into(), 5, zone).with_load(1024, 512, 0);
        let other = MemberEntry::new([2; 16], ([10, 0, 0, 2], 7400).into(), 6, Zone::default());
        let members =
            Vec::from_iter([own, other.suspected()].iter().map(|entry| member(entry, asked)));
        let text = table(&members);
        let lines =
            Vec::from_iter(text.lines().map(|line| Vec::from_iter(line.split_whitespace())));
        let (one, two) = ("01".repeat(16), "02".repeat(16));
        assert_eq!(
            lines[1],
            [&one, "10.0.0.1:7400", "rack-7", "alive", "2", "MiB", "4", "MiB", "5"]
        );
        assert_eq!(lines[2], [&two, "10.0.0.2:7400", "-", "suspect", "-", "-", "6"]);
        let json = serde_json::to_value(&members).expect("JSON");
        assert_eq!(
            (&json[0]["zone"], &json[0]["free_bytes"]),
            (&"rack-7".into(), &(2 << 20).into())
        );
        assert!(json[1]["zone"].is_null() && json[1]["load_age_s"].is_null(), "{json}");
        assert_eq!(json[1]["state"], "suspect");
    }

    #[test]
    fn an_answer_without_members_says_what_to_do() {
        let entry = MemberEntry::new([1; 16], ([10, 0, 0, 1], 7).into(), 5, Zone::default());
        assert_eq!(members_of(Some(Status::Ok), entry.as_bytes()), Ok(vec![entry]));
        assert!(members_of(Some(Status::Ok), &[7; 79]).is_err());
        let left = members_of(Some(Status::Draining), &[]).expect_err("no members");
        assert!(left.contains("ask another"), "{left}");
    }
}
