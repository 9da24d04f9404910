//! The control socket while another binary of the pager goes on, and whoever asks for that.

use std::io::{self, ErrorKind};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use gms_transport::text::printable;
use serde::{Deserialize, Serialize};

use super::{
    Awaits, Client, ControlError, REQUEST_DEADLINE, Reply, Request, Server, TEXT_CHARS_MAX,
    Workload, ask_patiently, door_of, id_of,
};
use crate::handed::{Descriptors, Number};

/// For the pager to look at the binary, to come to rest, and for the binary to go on.
const DEADLINE: Duration = Duration::from_secs(20);

/// What the next binary is told of the socket.
#[derive(Debug, Serialize, Deserialize)]
pub struct ServerRecord {
    listener: Number,
    path: PathBuf,
    #[serde(default)]
    file: Option<(u64, u64)>,
    /// Clients that await the upgrade.
    clients: Vec<Number>,
}

impl Server {
    /// What the next binary needs. Clients that are about to ask something else are left out.
    pub(crate) fn hand_over(&self, to: &mut Descriptors) -> ServerRecord {
        let awaiting = self.clients.iter().filter(|client| client.awaits == Awaits::Upgrade);
        ServerRecord {
            listener: to.give(&self.listener),
            path: self.path.clone(),
            file: self.file,
            clients: awaiting.map(|client| to.give(&client.stream)).collect(),
        }
    }

    /// The socket again.
    pub(crate) fn again(record: ServerRecord) -> io::Result<Server> {
        let client = |number: &Number| {
            let stream = UnixStream::from(number.take()?);
            let deadline = Instant::now() + REQUEST_DEADLINE;
            Ok(Client { stream, line: Vec::new(), deadline, awaits: Awaits::Upgrade })
        };
        let clients = record.clients.iter().map(client).collect::<io::Result<_>>()?;
        let listener = UnixListener::from(record.listener.take()?);
        let file = record.file.or_else(|| id_of(&record.path));
        Ok(Server { listener, path: record.path, file, clients })
    }

    /// Tells those who asked for the upgrade what has come of it: for how many milliseconds faults have waited, or why all is as before.
    pub(crate) fn upgraded(&mut self, outcome: Result<f64, String>) {
        self.answer(
            Awaits::Upgrade,
            &match outcome {
                Ok(millis) => Reply::Upgraded(millis),
                Err(reason) => Reply::Error(reason),
            },
        );
    }
}

/// Has a pager execute another binary, which goes on in its place. Returns for how many milliseconds faults have waited.
pub fn upgrade(workload: &Workload, binary: &Path) -> Result<f64, ControlError> {
    let door = door_of(workload)?;
    let failed = |text: &str| {
        let reason = printable(text, TEXT_CHARS_MAX);
        ControlError::NoAnswer { pid: door.pid(), reason }
    };
    let request = Request::Upgrade { binary: binary.to_owned() };
    match ask_patiently(&door, &request, DEADLINE, &mut || false) {
        Ok(Reply::Upgraded(millis)) => Ok(millis),
        Ok(Reply::Error(reason)) => {
            Err(ControlError::NotUpgraded(printable(&reason, TEXT_CHARS_MAX)))
        }
        Ok(_) => Err(failed("it is of another version")),
        Err(error) if error.kind() == ErrorKind::UnexpectedEof => Err(failed("it has ended")),
        Err(error) => Err(failed(&error.to_string())),
    }
}
