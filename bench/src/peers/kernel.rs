//! What a guest needs: a kernel, its modules, and programs of the host.

use std::fs;
use std::path::{Path, PathBuf};

use crate::error::BenchError;

/// What the guest loads, each after what it needs; what is not there is taken to be built in.
const MODULES: [&str; 15] = [
    "netfs",
    "9pnet",
    "9pnet_virtio",
    "9p",
    "overlay",
    "configfs",
    "nbd",
    "brd",
    "nvme-keyring",
    "nvme-auth",
    "nvme-core",
    "nvme-fabrics",
    "nvme-tcp",
    "nvmet",
    "nvmet-tcp",
];
/// Without this file the guest has no root.
const NEEDED: &str = "9pnet_virtio";
/// The first version with UFFDIO_MOVE.
const VERSION_MIN: (u32, u32) = (6, 8);
/// Folders deep that modules lie.
const DEPTH_MAX: u32 = 8;
/// Programs and the packages of Debian which have them.
const PROGRAMS: [(&str, &str); 3] = [
    ("qemu-system-x86_64", "qemu-system-x86"),
    ("nbd-server", "nbd-server"),
    ("nbd-client", "nbd-client"),
];

/// A kernel that can be booted.
#[derive(Debug)]
pub(super) struct Kernel {
    /// The image.
    pub image: PathBuf,
    /// Files of its modules, in the order in which they are loaded.
    pub modules: Vec<PathBuf>,
}

/// What is there.
#[derive(Debug)]
pub(super) struct Needs {
    /// The kernel.
    pub kernel: Kernel,
    /// The emulator.
    pub qemu: PathBuf,
}

impl Needs {
    /// Looks for everything; `dir`: where a package of a kernel was unpacked, else where it is installed.
    pub(super) fn find(dir: Option<&Path>) -> Result<Needs, BenchError> {
        let missing: Vec<&str> = PROGRAMS
            .iter()
            .filter(|(name, _)| program(name).is_none())
            .map(|(_, of)| *of)
            .collect();
        let root = dir.unwrap_or(Path::new("/"));
        match (Kernel::find(root), program(PROGRAMS[0].0)) {
            (Some(kernel), Some(qemu)) if missing.is_empty() => Ok(Needs { kernel, qemu }),
            (kernel, _) => Err(BenchError::Needs(problem(root, kernel.is_none(), &missing))),
        }
    }
}

fn problem(root: &Path, no_kernel: bool, missing: &[&str]) -> String {
    let mut text = String::from("the guest needs");
    if !missing.is_empty() {
        text += &format!(" the Debian packages {} (apt-get install)", missing.join(", "));
    }
    if no_kernel {
        let and = if missing.is_empty() { "" } else { ", and" };
        text += &format!(
            "{and} a kernel of at least 6.8 with its modules, of which there is none in {}: unpack Debian's with \
             `apt-get download $(apt-cache depends linux-image-6.12-amd64 | sed -n 's/.*Depends: //p') && dpkg-deb -x \
             linux-image-6.12*.deb DIR`, and name it by --kernel DIR",
            root.display()
        );
    }
    text + "; --only host does without a guest"
}

/// The path of a program.
pub(super) fn program(name: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let dirs = std::env::split_paths(&path).chain(["/usr/sbin".into(), "/sbin".into()]);
    dirs.map(|dir| dir.join(name)).find(|path| path.is_file())
}

impl Kernel {
    /// The newest below `root`.
    fn find(root: &Path) -> Option<Kernel> {
        let images = fs::read_dir(root.join("boot")).ok()?.filter_map(Result::ok);
        let named = |image: fs::DirEntry| {
            let name = image.file_name().into_string().ok()?;
            Some((name.strip_prefix("vmlinuz-")?.to_owned(), image.path()))
        };
        let mut images: Vec<(String, PathBuf)> = images.filter_map(named).collect();
        images.retain(|(release, _)| version(release) >= Some((VERSION_MIN.0, VERSION_MIN.1, 0)));
        images.sort_by_key(|(release, _)| version(release));
        images.into_iter().rev().find_map(|(release, image)| {
            let modules = modules(&root.join("lib/modules").join(release));
            let has_root = modules.iter().any(|path| stem(path) == Some(NEEDED));
            has_root.then_some(Kernel { image, modules })
        })
    }
}

/// Of 6.12.9+deb13: 6, 12 and 9.
fn version(release: &str) -> Option<(u32, u32, u32)> {
    let mut parts = release.split(|c: char| !c.is_ascii_digit()).map(str::parse::<u32>);
    Some((parts.next()?.ok()?, parts.next()?.ok()?, parts.next()?.unwrap_or(0)))
}

fn stem(path: &Path) -> Option<&str> {
    path.file_name()?.to_str()?.split('.').next()
}

/// Those of [`MODULES`] that are below `dir`.
fn modules(dir: &Path) -> Vec<PathBuf> {
    let mut all = Vec::new();
    collect(dir, DEPTH_MAX, &mut all);
    let of = |name: &&str| all.iter().find(|path| stem(path) == Some(name)).cloned();
    MODULES.iter().filter_map(of).collect()
}

fn collect(dir: &Path, depth: u32, into: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(dir).into_iter().flatten().filter_map(Result::ok) {
        let is_module = |name: &str| name.contains(".ko");
        match entry.file_type() {
            Ok(kind) if kind.is_dir() && depth > 0 => collect(&entry.path(), depth - 1, into),
            Ok(kind) if kind.is_file() && entry.file_name().to_str().is_some_and(is_module) => {
                into.push(entry.path());
            }
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scratch::Scratch;

    #[test]
    fn the_newest_kernel_with_modules_is_found() {
        let root = Scratch::new().expect("a directory");
        let make = |path: &str| {
            let path = root.path(path);
            fs::create_dir_all(path.parent().expect("a parent")).expect("directories");
            fs::write(path, "").expect("a file");
        };
        for release in ["6.1.0-47-amd64", "6.12.9+deb13-amd64", "6.12.88-amd64", "6.13.1-bare"] {
            make(&format!("boot/vmlinuz-{release}"));
        }
        let named = || Kernel::find(root.as_ref());
        assert!(named().is_none(), "none has modules");
        for (release, name) in [
            ("6.1.0-47-amd64", "net/9p/9pnet_virtio.ko"),
            ("6.12.9+deb13-amd64", "net/9p/9pnet_virtio.ko"),
            ("6.12.88-amd64", "net/9p/9pnet_virtio.ko.xz"),
            ("6.12.88-amd64", "fs/9p/9p.ko.xz"),
            ("6.12.88-amd64", "fs/9p/other.ko.xz"),
            ("6.12.88-amd64", "net/9p/9pnet.ko.xz"),
            ("6.13.1-bare", "fs/9p/9p.ko.xz"),
        ] {
            make(&format!("lib/modules/{release}/kernel/{name}"));
        }
        let found = named().expect("a kernel");
        assert!(found.image.ends_with("vmlinuz-6.12.88-amd64"), "{found:?}");
        let order: Vec<&str> = found.modules.iter().filter_map(|path| stem(path)).collect();
        assert_eq!(order, ["9pnet", "9pnet_virtio", "9p"]);
    }

    #[test]
    fn what_is_missing_is_named() {
        let text = problem(Path::new("/srv/k"), true, &["qemu-system-x86", "nbd-client"]);
        for part in ["packages qemu-system-x86, nbd-client", "none in /srv/k", "--kernel DIR"] {
            assert!(text.contains(part), "{part} is not in {text}");
        }
        assert!(!problem(Path::new("/"), false, &["nbd-client"]).contains("kernel of"));
    }
}
