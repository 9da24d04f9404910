//! Network namespaces joined to this one by a veth pair, for links that can be slowed.

use std::ffi::OsString;
use std::net::Ipv4Addr;

use crate::program::{Outcome, Program, tool};

/// Largest packets of the link in bytes: as on a datacentre network.
const MTU: &str = "9000";

/// 198.18.0.0/15 is reserved for tests.
const FIRST: Ipv4Addr = Ipv4Addr::new(198, 18, 0, 0);
/// Networks of four addresses in it.
const NETWORKS: u32 = 1 << 15;

/// A namespace with one link to this one, removed when dropped.
pub struct Namespace {
    name: String,
    link: String,
    index: u8,
}

fn run(program: &str, line: &str) -> Outcome {
    let argv = std::iter::once(OsString::from(tool(program)))
        .chain(line.split_whitespace().map(Into::into));
    Program::new(argv).finish()
}

impl Namespace {
    /// Makes namespace `index` (0 to 7) of this process.
    pub fn new(index: u8) -> Namespace {
        let id = std::process::id();
        let space =
            Namespace { name: format!("gms-{id}-{index}"), link: format!("g{id}x{index}"), index };
        let (name, link, inner) = (&space.name, &space.link, format!("g{id}y{index}"));
        let (here, there) = (space.outer_addr(), space.inner_addr());
        for line in [
            format!("netns add {name}"),
            format!("link add {link} mtu {MTU} type veth peer name {inner} mtu {MTU} netns {name}"),
            format!("addr add {here}/30 dev {link}"),
            format!("link set {link} up"),
            format!("-n {name} addr add {there}/30 dev {inner}"),
            format!("-n {name} link set {inner} up"),
            format!("-n {name} link set lo up"),
        ] {
            run("ip", &line).expect_code(0);
        }
        space
    }

    /// A network of four addresses that no other run of the tests has at the same time.
    fn addr(&self, host: u32) -> Ipv4Addr {
        let block = (std::process::id() * 8 + u32::from(self.index)) % NETWORKS;
        Ipv4Addr::from_bits(FIRST.to_bits() + block * 4 + host)
    }

    fn outer_addr(&self) -> Ipv4Addr {
        self.addr(1)
    }

    /// Address inside.
    pub fn inner_addr(&self) -> Ipv4Addr {
        self.addr(2)
    }

    /// Slows both directions to so many megabits a second, with a queue that delays instead of dropping.
    pub fn slow_down(&self, megabits: u32) {
        let inner = self.link.replace('x', "y");
        for device in [
            format!("-n {} qdisc add dev {inner}", self.name),
            format!("qdisc add dev {}", self.link),
        ] {
            run("tc", &format!("{device} root tbf rate {megabits}mbit burst 64kb latency 500ms"))
                .expect_code(0);
        }
    }

    /// Nothing gets through in either direction, and nobody is told.
    pub fn cut(&self) {
        self.set_inner("down");
    }

    /// Everything gets through again.
    pub fn mend(&self) {
        self.set_inner("up");
    }

    fn set_inner(&self, state: &str) {
        let inner = self.link.replace('x', "y");
        run("ip", &format!("-n {} link set {inner} {state}", self.name)).expect_code(0);
    }

    /// Command line prefix that enters it.
    pub(crate) fn enter(&self) -> Vec<OsString> {
        let ip: OsString = tool("ip").into();
        [ip, "netns".into(), "exec".into(), (&self.name).into()].to_vec()
    }
}

impl Drop for Namespace {
    fn drop(&mut self) {
        // The pair goes with either of its ends; a failure here must not hide the test's own.
        run("ip", &format!("link del {}", self.link));
        run("ip", &format!("netns del {}", self.name));
    }
}
