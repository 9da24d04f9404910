//! The cgroups that a process is in.

use std::fs;
use std::path::{Path, PathBuf};

/// Most cgroups above one another that are looked at.
const DEPTH_MAX: usize = 64;

/// The directory of a cgroup, by the version of its hierarchy.
#[derive(Debug, PartialEq, Eq)]
pub enum Group {
    /// One controller's.
    V1(PathBuf),
    /// The unified one's.
    V2(PathBuf),
}

/// Those of a process (`self`, or its id) in the hierarchy of v1's `controller`, and in v2's, from its own up to the root of what is mounted.
pub fn of_process(process: &str, controller: &str) -> Vec<Group> {
    let text = |path: &str| fs::read_to_string(path).unwrap_or_default();
    groups(&text(&format!("/proc/{process}/cgroup")), &text("/proc/self/mountinfo"), controller)
}

/// Whether a process is in a cgroup that is frozen, or is being frozen.
pub fn is_frozen(pid: i32) -> bool {
    of_process(&pid.to_string(), "freezer").iter().any(Group::is_frozen)
}

impl Group {
    fn is_frozen(&self) -> bool {
        let has = |dir: &Path, file: &str, wanted: &[&str]| {
            let text = fs::read_to_string(dir.join(file)).unwrap_or_default();
            text.lines().any(|line| wanted.contains(&line.trim()))
        };
        match self {
            Group::V1(dir) => has(dir, "freezer.state", &["FROZEN", "FREEZING"]),
            Group::V2(dir) => {
                has(dir, "cgroup.events", &["frozen 1"]) || has(dir, "cgroup.freeze", &["1"])
            }
        }
    }
}

/// The same by the texts of /proc/PID/cgroup and mountinfo.
fn groups(cgroup: &str, mountinfo: &str, wanted: &str) -> Vec<Group> {
    let mut found = Vec::new();
    for line in cgroup.lines() {
        let mut fields = line.splitn(3, ':').skip(1);
        let (Some(controllers), Some(path)) = (fields.next(), fields.next()) else { continue };
        let v2 = controllers.is_empty();
        if !v2 && !controllers.split(',').any(|controller| controller == wanted) {
            continue;
        }
        let Some((root, mount)) = mount_of(mountinfo, (!v2).then_some(wanted)) else { continue };
        // In a container without a cgroup namespace the mount shows the part below `root`; elsewhere the root is "/".
        let below = Path::new(path).strip_prefix(&root).unwrap_or(Path::new(""));
        let dir = mount.join(below.strip_prefix("/").unwrap_or(below));
        let dirs = dir.ancestors().take_while(|dir| dir.starts_with(&mount)).take(DEPTH_MAX);
        let group = if v2 { Group::V2 } else { Group::V1 };
        found.extend(dirs.map(|dir| group(dir.to_path_buf())));
    }
    found
}

/// Root and mount point of the hierarchy: that of a controller of v1, or v2's.
fn mount_of(mountinfo: &str, controller: Option<&str>) -> Option<(PathBuf, PathBuf)> {
    mountinfo.lines().find_map(|line| {
        let (mount, filesystem) = line.split_once(" - ")?;
        let mut filesystem = filesystem.split(' ');
        let (kind, options) = (filesystem.next()?, filesystem.nth(1)?);
        let wanted = match controller {
            None => kind == "cgroup2",
            Some(name) => kind == "cgroup" && options.split(',').any(|option| option == name),
        };
        let mut fields = mount.split(' ').skip(3);
        let (root, point) = (fields.next()?, fields.next()?);
        wanted.then(|| (unescape(root), unescape(point)))
    })
}

/// Blanks in mountinfo are octal.
fn unescape(text: &str) -> PathBuf {
    text.replace("\\040", " ").replace("\\011", "\t").replace("\\134", "\\").into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cgroups_are_found_where_they_are_mounted() {
        let v2 = "30 25 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n";
        let dirs = |dirs: &[&str]| dirs.iter().map(|dir| Group::V2(dir.into())).collect::<Vec<_>>();
        assert_eq!(
            groups("0::/a.slice/b.scope\n", v2, "memory"),
            dirs(&["/sys/fs/cgroup/a.slice/b.scope", "/sys/fs/cgroup/a.slice", "/sys/fs/cgroup"])
        );
        // Inside a container with a cgroup namespace.
        assert_eq!(groups("0::/\n", v2, "memory"), dirs(&["/sys/fs/cgroup"]));
        // v1, without a cgroup namespace, beside a v2 without the controller.
        let v1 =
            "41 32 0:37 /docker/c1 /sys/fs/cgroup/memory ro,nosuid - cgroup cgroup rw,memory\n";
        assert_eq!(
            groups("9:name=systemd:/\n4:memory:/docker/c1\n0::/x\n", v1, "memory"),
            [Group::V1("/sys/fs/cgroup/memory".into())]
        );
        assert!(groups("", v2, "memory").is_empty() && groups("0::/a\n", "", "memory").is_empty());
    }

    #[test]
    fn frozen_groups_of_both_versions_are_known() {
        let dir = std::env::temp_dir().join(format!("gms-cgroup-{}", std::process::id()));
        fs::create_dir_all(&dir).unwrap();
        let (v1, v2) = (Group::V1(dir.clone()), Group::V2(dir.clone()));
        assert!(!v1.is_frozen() && !v2.is_frozen(), "there is no file");
        for (state, events, freeze, frozen) in [
            ("THAWED\n", "populated 1\nfrozen 0\n", "0\n", false),
            ("FREEZING\n", "populated 1\nfrozen 0\n", "1\n", true),
            ("FROZEN\n", "populated 1\nfrozen 1\n", "0\n", true),
        ] {
            fs::write(dir.join("freezer.state"), state).unwrap();
            fs::write(dir.join("cgroup.events"), events).unwrap();
            fs::write(dir.join("cgroup.freeze"), freeze).unwrap();
            assert_eq!([v1.is_frozen(), v2.is_frozen()], [frozen; 2], "{state}");
        }
        fs::remove_dir_all(dir).unwrap();
    }
}
