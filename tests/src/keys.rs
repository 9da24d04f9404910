//! Keys of the cluster that the tests' pagers and agents belong to.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::time::SystemTime;

use crate::program::Program;
use crate::stage::{binary, cache_dir};

/// Keys of the cluster that all tests share, made once for each build of gms.
pub fn keys() -> &'static Path {
    static KEYS: OnceLock<PathBuf> = OnceLock::new();
    KEYS.get_or_init(|| {
        let gms = binary("gms");
        let built = gms.metadata().and_then(|file| file.modified()).expect("age of gms");
        let built = built.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_nanos();
        let dir = cache_dir().join(format!("keys-{built}"));
        if !dir.exists() {
            let draft = dir.with_extension(std::process::id().to_string());
            let line = [gms.as_os_str(), OsStr::new("keys"), OsStr::new("init"), draft.as_os_str()];
            Program::new(line).finish().expect_code(0);
            std::fs::rename(&draft, &dir).expect("keys of the tests");
        }
        dir
    })
}
