//! Values of options, as the command line and the configuration file have them.

use std::fmt;

use clap::ValueEnum;
use gms_policy::{Redundancy, WhenFull};
use serde::de::{self, Deserializer, SeqAccess, Visitor};

pub(super) use gms_agent::cli::size;

/// Who holds a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum KeyRole {
    /// An agent
    Node,
    /// A pager
    Client,
}

/// `--page-size`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum PageSize {
    /// 4 KiB
    #[value(name = "4k", alias = "4K", alias = "4096")]
    Small,
    /// 8 KiB
    #[value(name = "8k", alias = "8K", alias = "8192")]
    Large,
}

impl PageSize {
    /// log2 of the size in bytes.
    pub fn shift(self) -> u8 {
        match self {
            PageSize::Small => 12,
            PageSize::Large => 13,
        }
    }
}

/// `--when-full`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum OnFull {
    /// The program waits until an agent takes pages again
    Wait,
    /// The program goes on and exceeds --local
    Grow,
    /// The program is killed after a second
    Kill,
}

impl From<OnFull> for WhenFull {
    fn from(choice: OnFull) -> WhenFull {
        match choice {
            OnFull::Wait => WhenFull::Wait,
            OnFull::Grow => WhenFull::Grow,
            OnFull::Kill => WhenFull::Kill,
        }
    }
}

/// `--seal`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum Sealing {
    /// Agents hold pages encrypted and authenticated under a key that they never see
    #[default]
    On,
    /// Agents hold pages as they are: for agents of the release before, or where all of them are trusted
    Off,
}

/// Checks that `text` has the form `HOST:PORT` (an IPv6 host in brackets); names are resolved later.
pub fn parse_agent(text: &str) -> Result<String, String> {
    let wrong = || format!("'{text}' is not HOST:PORT (node7:7400, 10.0.0.7:7400, [fd00::7]:7400)");
    let (host, port) = text.rsplit_once(':').ok_or_else(wrong)?;
    let bracketed = host.strip_prefix('[').and_then(|host| host.strip_suffix(']'));
    let host_is_good = match bracketed {
        Some(address) => address.parse::<std::net::Ipv6Addr>().is_ok(),
        None => !host.is_empty() && !host.contains([':', '[', ']', ' ', '/']),
    };
    match port.parse::<u16>() {
        Ok(1..) if host_is_good => Ok(text.to_string()),
        _ => Err(wrong()),
    }
}

/// Reads `page-size`.
pub(super) fn page_size<'de, D: Deserializer<'de>>(from: D) -> Result<Option<PageSize>, D::Error> {
    from.deserialize_any(Scalar { expects: "4k or 8k", read: page_size_of }).map(Some)
}

fn page_size_of(text: &str) -> Result<PageSize, String> {
    clap::ValueEnum::from_str(text, true).map_err(|_| format!("'{text}' is not 4k or 8k"))
}

/// Reads `when-full`.
pub(super) fn when_full<'de, D: Deserializer<'de>>(from: D) -> Result<Option<OnFull>, D::Error> {
    from.deserialize_any(Scalar { expects: "wait, grow or kill", read: when_full_of }).map(Some)
}

fn when_full_of(text: &str) -> Result<OnFull, String> {
    clap::ValueEnum::from_str(text, false)
        .map_err(|_| format!("'{text}' is not wait, grow or kill"))
}

/// Reads `redundancy`.
pub(super) fn redundancy<'de, D: Deserializer<'de>>(
    from: D,
) -> Result<Option<Redundancy>, D::Error> {
    let read = |text: &str| text.parse::<Redundancy>().map_err(|error| error.to_string());
    from.deserialize_any(Scalar { expects: "auto, none, replica:N or parity:K+M", read }).map(Some)
}

/// Reads `seal`.
pub(super) fn sealing<'de, D: Deserializer<'de>>(from: D) -> Result<Option<Sealing>, D::Error> {
    from.deserialize_any(Scalar { expects: "on or off", read: sealing_of }).map(Some)
}

fn sealing_of(text: &str) -> Result<Sealing, String> {
    clap::ValueEnum::from_str(text, false).map_err(|_| format!("'{text}' is not on or off"))
}

/// What is written as a string or a whole number, and means the same.
struct Scalar<T> {
    expects: &'static str,
    read: fn(&str) -> Result<T, String>,
}

impl<T> Visitor<'_> for Scalar<T> {
    type Value = T;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.expects)
    }

    fn visit_str<E: de::Error>(self, text: &str) -> Result<T, E> {
        (self.read)(text).map_err(E::custom)
    }

    fn visit_i64<E: de::Error>(self, number: i64) -> Result<T, E> {
        self.visit_str(&number.to_string())
    }

    fn visit_u64<E: de::Error>(self, number: u64) -> Result<T, E> {
        self.visit_str(&number.to_string())
    }
}

/// Reads `agent`: one, or a list.
pub(super) fn agents<'de, D: Deserializer<'de>>(from: D) -> Result<Vec<String>, D::Error> {
    from.deserialize_any(Agents)
}

struct Agents;

impl<'de> Visitor<'de> for Agents {
    type Value = Vec<String>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("HOST:PORT or a list of them")
    }

    fn visit_str<E: de::Error>(self, text: &str) -> Result<Vec<String>, E> {
        parse_agent(text).map(|agent| vec![agent]).map_err(E::custom)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Vec<String>, A::Error> {
        let mut agents = Vec::new();
        while let Some(text) = list.next_element::<String>()? {
            agents.push(parse_agent(&text).map_err(de::Error::custom)?);
        }
        Ok(agents)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn agents_are_host_and_port() {
        for good in ["node7:7400", "10.0.0.7:1", "[fd00::7]:65535", "a-b.c_d:80"] {
            assert_eq!(parse_agent(good), Ok(good.to_string()));
        }
        for bad in
            ["", "host", "host:", ":80", "host:0", "host:65536", "fd00::7:80", "[x]:80", "a b:80"]
        {
            assert!(parse_agent(bad).is_err(), "{bad}");
        }
    }
}
