//! `--network`: what lies between a pager and its agents, and between the two ends of a floor.

use std::fmt;
use std::fs::{self, File};
use std::net::Ipv4Addr;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;
use std::str::FromStr;

use nix::sched::{CloneFlags, setns};

use crate::error::{BenchError, Trying};
use crate::netns::{Names, SPACES, ip, nft, tool};
use crate::report::Report;
use crate::undo::{Step, Undo};

/// Least MTU of a veth: QUIC needs UDP payloads of 1200 bytes, and IPv4 and UDP take 28.
const MTU_MIN: u16 = 1280;
/// Most of the packets that may be lost, in permille.
const LOSS_MAX: u16 = 500;
/// 198.18.0.0/15 is reserved for tests; each process has a network of four addresses in it.
const NETWORKS: (Ipv4Addr, u32) = (Ipv4Addr::new(198, 18, 0, 0), 1 << 15);

/// What `--network` names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// The loopback interface of this machine.
    Loopback,
    /// A pair of virtual Ethernet devices, with the agents in a network namespace at its far end.
    Veth {
        /// Largest IP packet in bytes.
        mtu: u16,
        /// Of 1000 packets from the agents so many are lost.
        loss_permille: u16,
    },
}

impl FromStr for Kind {
    type Err = String;

    fn from_str(text: &str) -> Result<Kind, String> {
        if text == "loopback" {
            return Ok(Kind::Loopback);
        }
        let rest = text.strip_prefix("veth:");
        let rest = rest.ok_or("give loopback, veth:MTU or veth:MTU:LOSS%, as in veth:1500:1%")?;
        let (mtu, loss) =
            rest.split_once(':').map_or((rest, None), |(mtu, loss)| (mtu, Some(loss)));
        let mtu = mtu.parse().ok().filter(|mtu| *mtu >= MTU_MIN);
        let mtu = mtu.ok_or(format!("the MTU of a veth is {MTU_MIN} to {} bytes", u16::MAX))?;
        let permille = |text: &str| {
            let percent: f64 = text.strip_suffix('%').unwrap_or(text).parse().ok()?;
            let permille = (percent * 10.0).round();
            (1.0..=f64::from(LOSS_MAX)).contains(&permille).then_some(permille as u16)
        };
        let wrong = format!("the loss is 0.1 to {} percent", LOSS_MAX / 10);
        let loss_permille = loss.map_or(Ok(0), |text| permille(text).ok_or(wrong))?;
        Ok(Kind::Veth { mtu, loss_permille })
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Kind::Loopback => f.write_str("loopback"),
            Kind::Veth { mtu, loss_permille: 0 } => write!(f, "veth:{mtu}"),
            Kind::Veth { mtu, loss_permille } => {
                write!(f, "veth:{mtu}:{}%", f64::from(loss_permille) / 10.0)
            }
        }
    }
}

/// The network that a command measures over. What was set up for it goes when this is dropped, or when the benchmark is killed.
pub(crate) struct Network {
    veth: Option<Veth>,
}

struct Veth {
    names: Names,
    mtu: u16,
    loss_permille: u16,
    /// The namespace of the agents.
    space: File,
    near: Ipv4Addr,
    far: Ipv4Addr,
    _undo: Undo,
}

/// As long as this lives the network loses packets.
pub(crate) struct Losing<'a>(&'a Network);

impl Network {
    /// This machine's own.
    pub(crate) const LOOPBACK: Network = Network { veth: None };

    /// Sets it up.
    pub(crate) fn set_up(kind: Kind) -> Result<Network, BenchError> {
        let Kind::Veth { mtu, loss_permille } = kind else { return Ok(Network::LOOPBACK) };
        if !nix::unistd::geteuid().is_root() {
            return Err(BenchError::Needs("--network veth takes root: run it as root".into()));
        }
        let (names, id) = (Names::of(std::process::id()), std::process::id());
        let (first, count) = NETWORKS;
        let addr = |host| Ipv4Addr::from_bits(first.to_bits() + id % count * 4 + host);
        let (near, far) = (addr(1), addr(2));
        tool("ip", "iproute2")?;
        if loss_permille > 0 {
            tool("nft", "nftables")?;
        }
        let mut undo = Undo::new()?;
        undo.add(&Step::RemoveNetwork(id))?;
        let Names { space, near: here, far: there } = &names;
        for line in [
            format!("netns add {space}"),
            format!(
                "link add {here} mtu {mtu} type veth peer name {there} mtu {mtu} netns {space}"
            ),
            format!("addr add {near}/30 dev {here}"),
            format!("link set {here} up"),
            format!("-n {space} addr add {far}/30 dev {there}"),
            format!("-n {space} link set {there} up"),
            format!("-n {space} link set lo up"),
        ] {
            ip(&line)?;
        }
        if loss_permille > 0 {
            // Whole trains of packets would be lost together otherwise: a veth passes on what was sent by one call in one piece.
            ip(&format!("-n {space} link set {there} gso_max_segs 1"))?;
            nft(&format!(
                "add table inet {space}\nadd counter inet {space} lost\nadd chain inet {space} lose {HOOK}\n"
            ))?;
        }
        let path = Path::new(SPACES).join(space);
        let space = File::open(&path).trying(&path.display().to_string())?;
        let veth = Veth { names, mtu, loss_permille, space, near, far, _undo: undo };
        Ok(Network { veth: Some(veth) })
    }

    /// Address of whoever asks.
    pub(crate) fn near(&self) -> Ipv4Addr {
        self.veth.as_ref().map_or(Ipv4Addr::LOCALHOST, |veth| veth.near)
    }

    /// Address at which agents, and the peers of floors, listen.
    pub(crate) fn far(&self) -> Ipv4Addr {
        self.veth.as_ref().map_or(Ipv4Addr::LOCALHOST, |veth| veth.far)
    }

    /// Largest IP packet in bytes; `None` on loopback.
    pub(crate) fn mtu(&self) -> Option<u16> {
        self.veth.as_ref().map(|veth| veth.mtu)
    }

    /// Has `command` start at the far end.
    pub(crate) fn place(&self, command: &mut Command) -> Result<(), BenchError> {
        let Some(veth) = &self.veth else { return Ok(()) };
        let space = veth.space.try_clone().trying("no descriptor for the network namespace")?;
        // SAFETY: between fork and exec the child only makes a system call.
        unsafe { command.pre_exec(move || Ok(setns(&space, CloneFlags::CLONE_NEWNET)?)) };
        Ok(())
    }

    /// Loses packets from now on, if the network is one that does. Floors are measured before: bare datagrams are not sent again.
    pub(crate) fn losing(&self) -> Result<Losing<'_>, BenchError> {
        if let Some(Veth { names, loss_permille: loss_permille @ 1.., .. }) = &self.veth {
            let Names { space, near, .. } = names;
            let dice = format!("numgen random mod 1000 < {loss_permille}");
            nft(&format!(
                "add rule inet {space} lose iifname \"{near}\" {dice} counter name \"lost\" drop\n"
            ))?;
        }
        Ok(Losing(self))
    }

    /// Adds what has crossed it. Loopback has nothing to say.
    pub(crate) fn report(&self, report: &mut Report) -> Result<(), BenchError> {
        let Some(veth) = &self.veth else { return Ok(()) };
        let count = |what: &str| {
            let path = format!("/sys/class/net/{}/statistics/{what}", veth.names.near);
            let text = fs::read_to_string(&path).trying(&path)?;
            text.trim()
                .parse::<f64>()
                .map_err(|error| BenchError::Invalid(format!("{path}: {error}")))
        };
        report.figure("network: from the agents", "MB", count("rx_bytes")? / 1e6);
        report.figure("network: to the agents", "MB", count("tx_bytes")? / 1e6);
        if veth.loss_permille > 0 {
            let text = nft(&format!("list counter inet {} lost\n", veth.names.space))?;
            let lost = counted(&text);
            let lost = lost.ok_or_else(|| BenchError::Invalid(format!("nft says {text}")))?;
            report.figure("network: packets from the agents", "packets", count("rx_packets")?);
            report.figure("network: of these lost", "packets", lost);
        }
        Ok(())
    }
}

impl Drop for Losing<'_> {
    fn drop(&mut self) {
        if let Some(Veth { names, loss_permille: 1.., .. }) = &self.0.veth {
            // If it fails the next floor finds that replies are lost, and says so.
            let _ = nft(&format!("flush chain inet {} lose\n", names.space));
        }
    }
}

/// Packets to this machine's own addresses, before any other filter.
const HOOK: &str = "{ type filter hook input priority -10; policy accept; }";

/// Of `... packets N bytes N ...` the packets.
fn counted(text: &str) -> Option<f64> {
    text.split_once("packets ")?.1.split_whitespace().next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn networks_are_named() {
        let veth = |mtu, loss_permille| Ok(Kind::Veth { mtu, loss_permille });
        for (text, kind) in [
            ("loopback", Ok(Kind::Loopback)),
            ("veth:1500", veth(1500, 0)),
            ("veth:1500:1%", veth(1500, 10)),
            ("veth:65535:0.1", veth(65535, 1)),
            ("veth:1280:50%", veth(1280, 500)),
        ] {
            assert_eq!(text.parse(), kind, "{text}");
        }
        assert_eq!(
            veth(9000, 15).map(|kind: Kind| kind.to_string()),
            Ok::<_, String>("veth:9000:1.5%".into())
        );
        for (text, why) in [
            ("", "veth:MTU"),
            ("veth", "veth:MTU"),
            ("eth0:1500", "veth:MTU"),
            ("veth:1279", "1280 to 65535"),
            ("veth:65536", "1280 to 65535"),
            ("veth::1%", "1280 to 65535"),
            ("veth:1500:", "0.1 to 50"),
            ("veth:1500:0%", "0.1 to 50"),
            ("veth:1500:51%", "0.1 to 50"),
            ("veth:1500:-1%", "0.1 to 50"),
            ("veth:1500:nan", "0.1 to 50"),
            ("veth:1500:1%:2%", "0.1 to 50"),
        ] {
            let error = text.parse::<Kind>().expect_err(text);
            assert!(error.contains(why), "{text}: {error}");
        }
    }

    #[test]
    fn lost_packets_are_counted() {
        let text = "table inet t {\n\tcounter lost {\n\t\tpackets 12 bytes 345\n\t}\n}\n";
        assert_eq!(counted(text), Some(12.0));
        assert_eq!(counted("nothing"), None);
    }
}
