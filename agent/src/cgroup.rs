//! The cgroups that a process is in.

use std::fs;
use std::path::{Component, Path, PathBuf};

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
    under(Path::new("/"), process, controller)
}

/// As [`of_process`], in a system whose files are below `root`.
pub(crate) fn under(root: &Path, process: &str, controller: &str) -> Vec<Group> {
    let text = |path: &str| fs::read_to_string(root.join(path)).unwrap_or_default();
    let (cgroup, mounts) = (text(&format!("proc/{process}/cgroup")), text("proc/self/mountinfo"));
    groups(root, &cgroup, &mounts, controller)
}

/// The same by the texts of /proc/PID/cgroup and mountinfo.
fn groups(root: &Path, cgroup: &str, mountinfo: &str, wanted: &str) -> Vec<Group> {
    let mut found = Vec::new();
    for line in cgroup.lines() {
        let mut fields = line.splitn(3, ':').skip(1);
        let (Some(controllers), Some(path)) = (fields.next(), fields.next()) else { continue };
        let v2 = controllers.is_empty();
        if !v2 && !controllers.split(',').any(|controller| controller == wanted) {
            continue;
        }
        let Some((base, mount)) = mount_of(mountinfo, (!v2).then_some(wanted)) else { continue };
        // In a container without a cgroup namespace the mount shows the part below `base`; elsewhere that is "/".
        let below = Path::new(path).strip_prefix(&base).unwrap_or(Path::new(""));
        // A group outside of the namespace is "/../..": what is mounted does not show it.
        let is_plain = |part: &Component<'_>| matches!(part, Component::Normal(_));
        let below: PathBuf = below.components().filter(is_plain).collect();
        let mount = root.join(mount.strip_prefix("/").unwrap_or(&mount));
        let dirs = below.ancestors().take(DEPTH_MAX).map(|dir| mount.join(dir));
        found.extend(dirs.map(if v2 { Group::V2 } else { Group::V1 }));
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
        let found = |cgroup, mounts| groups(Path::new("/"), cgroup, mounts, "memory");
        let v2 = "30 25 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n";
        let dirs = |dirs: &[&str]| dirs.iter().map(|dir| Group::V2(dir.into())).collect::<Vec<_>>();
        assert_eq!(
            found("0::/a.slice/b.scope\n", v2),
            dirs(&["/sys/fs/cgroup/a.slice/b.scope", "/sys/fs/cgroup/a.slice", "/sys/fs/cgroup"])
        );
        // Inside a container with a cgroup namespace, and outside of the one that is mounted.
        assert_eq!(found("0::/\n", v2), dirs(&["/sys/fs/cgroup"]));
        assert_eq!(found("0::/../..\n", v2), dirs(&["/sys/fs/cgroup"]));
        // v1, without a cgroup namespace, beside a v2 without the controller.
        let v1 =
            "41 32 0:37 /docker/c1 /sys/fs/cgroup/memory ro,nosuid - cgroup cgroup rw,memory\n";
        assert_eq!(
            found("9:name=systemd:/\n4:memory:/docker/c1\n0::/x\n", v1),
            [Group::V1("/sys/fs/cgroup/memory".into())]
        );
        assert!(found("", v2).is_empty() && found("0::/a\n", "").is_empty());
    }
}
