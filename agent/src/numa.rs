//! Where a machine's memory is not equally near to all CPUs, each thread stays on the CPUs of one node, and so does the
//! one which warms its part of the slab: the kernel takes memory from the node of the thread that touches it first.

use nix::sched::{CpuSet, sched_getaffinity, sched_setaffinity};
use nix::unistd::Pid;
use std::fs;
use std::path::Path;

/// The CPUs of each node, as far as this process may use them. Empty where all are of one node.
#[derive(Debug, Default)]
pub struct Nodes(Vec<CpuSet>);

impl Nodes {
    /// Those of this machine. What cannot be read is taken for a machine without nodes.
    pub fn read() -> Self {
        let own = Pid::from_raw(0);
        sched_getaffinity(own).map_or(Self::default(), |own| Self::under(Path::new("/"), &own))
    }

    /// As [`Nodes::read`], in a system whose files are below `root`.
    fn under(root: &Path, allowed: &CpuSet) -> Self {
        let dir = root.join("sys/devices/system/node");
        let read = |file: &str| fs::read_to_string(dir.join(file)).unwrap_or_default();
        let online = read("online");
        let cpus = |node| {
            let mut set = CpuSet::new();
            let list = read(&format!("node{node}/cpulist"));
            let ours = |cpu: &usize| allowed.is_set(*cpu).unwrap_or(false);
            let count = numbers(&list).filter(ours).filter(|cpu| set.set(*cpu).is_ok()).count();
            (count > 0).then_some(set)
        };
        let nodes: Vec<CpuSet> = numbers(&online).filter_map(cpus).collect();
        Self(if nodes.len() > 1 { nodes } else { Vec::new() })
    }

    /// The CPUs of thread `number`; `None`: any.
    pub fn of_thread(&self, number: usize) -> Option<CpuSet> {
        self.0.get(number % self.0.len().max(1)).copied()
    }
}

/// Keeps the calling thread on these CPUs, if they are known.
pub fn stay_on(cpus: Option<CpuSet>) {
    if let Some(cpus) = cpus
        && let Err(error) = sched_setaffinity(Pid::from_raw(0), &cpus)
    {
        tracing::warn!(%error, "cannot keep a thread on the CPUs of its node");
    }
}

/// The numbers of a list as in "0-3,8,10-11", below [`CpuSet::count`].
fn numbers(list: &str) -> impl Iterator<Item = usize> {
    let range = |part: &str| {
        let (first, last) = part.trim().split_once('-').unwrap_or((part.trim(), part.trim()));
        let (first, last): (usize, usize) = (first.parse().ok()?, last.parse().ok()?);
        Some(first..(last + 1).min(CpuSet::count()))
    };
    list.split(',').filter_map(range).flatten()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn threads_are_divided_among_the_nodes_that_have_cpus_for_us() {
        let dir = std::env::temp_dir().join(format!("gms-nodes-{}", std::process::id()));
        let nodes = dir.join("sys/devices/system/node");
        let files = [("node0", "0-3\n"), ("node1", "4,6-7\n"), ("node2", "\n"), ("node3", "5\n")];
        for (node, cpus) in files {
            fs::create_dir_all(nodes.join(node)).expect("a folder");
            fs::write(nodes.join(node).join("cpulist"), cpus).expect("a file");
        }
        fs::write(nodes.join("online"), "0-3\n").expect("a file");
        let mut allowed = CpuSet::new();
        [1, 2, 6, 7].into_iter().for_each(|cpu| allowed.set(cpu).expect("a CPU"));
        let cpus = |found: &Nodes, thread| -> Vec<usize> {
            let set = found.of_thread(thread);
            (0..16).filter(|cpu| set.is_some_and(|set| set.is_set(*cpu).unwrap())).collect()
        };
        let found = Nodes::under(&dir, &allowed);
        let of = [0, 1, 2].map(|thread| cpus(&found, thread));
        assert_eq!(of, [vec![1, 2], vec![6, 7], vec![1, 2]]);
        // One node is none.
        fs::write(nodes.join("online"), "0\n").expect("a file");
        assert_eq!(Nodes::under(&dir, &allowed).of_thread(0), None);
        fs::remove_dir_all(&dir).expect("removed");
        assert_eq!(Nodes::under(&dir, &allowed).of_thread(1), None);
        assert_eq!(numbers("1,x,3-2,5-99999999999").count(), 1 + CpuSet::count() - 5);
    }
}
