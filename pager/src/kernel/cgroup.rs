//! Whether a process is frozen with its cgroup.

use std::fs;
use std::path::Path;

use gms_agent::cgroup::{self, Group};

/// Whether a process is in a cgroup that is frozen, or is being frozen.
pub fn is_frozen(pid: i32) -> bool {
    cgroup::of_process(&pid.to_string(), "freezer").iter().any(is_group_frozen)
}

fn is_group_frozen(group: &Group) -> bool {
    let has = |dir: &Path, file: &str, wanted: &[&str]| {
        let text = fs::read_to_string(dir.join(file)).unwrap_or_default();
        text.lines().any(|line| wanted.contains(&line.trim()))
    };
    match group {
        Group::V1(dir) => has(dir, "freezer.state", &["FROZEN", "FREEZING"]),
        Group::V2(dir) => {
            has(dir, "cgroup.events", &["frozen 1"]) || has(dir, "cgroup.freeze", &["1"])
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frozen_groups_of_both_versions_are_known() {
        let dir = std::env::temp_dir().join(format!("gms-cgroup-{}", std::process::id()));
        fs::create_dir_all(&dir).unwrap();
        let groups = [Group::V1(dir.clone()), Group::V2(dir.clone())];
        let are_frozen = || [is_group_frozen(&groups[0]), is_group_frozen(&groups[1])];
        assert_eq!(are_frozen(), [false; 2], "there is no file");
        for (state, events, freeze, frozen) in [
            ("THAWED\n", "populated 1\nfrozen 0\n", "0\n", false),
            ("FREEZING\n", "populated 1\nfrozen 0\n", "1\n", true),
            ("FROZEN\n", "populated 1\nfrozen 1\n", "0\n", true),
        ] {
            fs::write(dir.join("freezer.state"), state).unwrap();
            fs::write(dir.join("cgroup.events"), events).unwrap();
            fs::write(dir.join("cgroup.freeze"), freeze).unwrap();
            assert_eq!(are_frozen(), [frozen; 2], "{state}");
        }
        fs::remove_dir_all(dir).unwrap();
    }
}
