//! `gms upgrade`, and what it has the pager execute.

use std::path::PathBuf;

use super::detach::no_workload;
use super::{Failure, print, run};
use crate::cli::AdoptArgs;
use crate::control;
use crate::exit::EXIT_GMS;
use crate::launch::answer_probe;

/// Has another binary go on with a workload.
pub(super) fn upgrade(pid: i32, binary: Option<PathBuf>) -> Result<u8, Failure> {
    let Some(workload) = control::find(pid) else { return Err(no_workload(pid)) };
    let own = || std::env::current_exe();
    let binary = binary.map_or_else(own, std::path::absolute)?;
    let millis = control::upgrade(&workload, &binary)?;
    print(format!("upgraded in {millis:.0} ms\n").as_bytes())?;
    Ok(0)
}

/// Goes on with what another binary was doing, or says whether it could.
pub(super) fn adopt(args: &AdoptArgs) -> Result<u8, Failure> {
    if let Some(needed) = args.probe {
        let known = answer_probe(needed).map_err(|lack| Failure::new(EXIT_GMS, lack))?;
        print(format!("{known}\n").as_bytes())?;
        return Ok(0);
    }
    // Before there is a key: it is in no core dump, and no other process of the user reads it.
    nix::sys::prctl::set_dumpable(false).map_err(std::io::Error::from)?;
    // What executes a binary by its descriptor is called by the number of that.
    let _ = nix::sys::prctl::set_name(c"gms");
    let number = args.number.unwrap_or(-1);
    match args.died {
        Some(died) => run::inherit(number, died),
        None => run::go_on(number, args.instead.as_deref()),
    }
}
