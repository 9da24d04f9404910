//! A temporary directory.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

use crate::error::{BenchError, Trying};

/// A directory which goes when it is dropped.
pub(crate) struct Scratch(PathBuf);

impl Scratch {
    /// A new one.
    pub(crate) fn new() -> Result<Scratch, BenchError> {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let count = COUNT.fetch_add(1, Ordering::Relaxed);
        let path = std::env::temp_dir().join(format!("gms-bench-{}-{count}", std::process::id()));
        fs::create_dir_all(&path).trying("no temporary directory")?;
        Ok(Scratch(path))
    }

    /// A path in it.
    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }
}

impl AsRef<Path> for Scratch {
    fn as_ref(&self) -> &Path {
        &self.0
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        // What is left is the system's to clean.
        let _ = fs::remove_dir_all(&self.0);
    }
}
