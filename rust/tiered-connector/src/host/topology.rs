//! NUMA: which processors are near which memory. Memory comes to lie near the thread that first touches it.

use super::limits::read;
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use std::fs;
use std::marker::PhantomData;
use std::path::Path;
use thiserror::Error;

#[cfg(test)]
mod tests;

/// A node: memory, and the processors that are near it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Node {
    /// Its number.
    pub number: u32,
    /// Its processors, of those that the system's calls can name; perhaps none.
    pub cpus: CpuSet,
}

/// A node was asked for that is not there.
#[derive(Clone, PartialEq, Eq, Debug, Error)]
#[error("host_numa_node={asked}: there is no such node; {}", what_there_is(.there))]
pub struct NoSuchNode {
    /// Its number.
    pub asked: u32,
    /// Those that there are.
    pub there: Vec<u32>,
}

/// Why threads run where they ran before.
#[derive(Clone, PartialEq, Eq, Debug, Error)]
#[error("the threads of the host tier are not bound to NUMA node {node}: {why}")]
pub struct NotBound {
    /// The node.
    pub node: u32,
    /// The reason.
    pub why: String,
}

/// The node for host memory: `asked` if given, else the one that `device`, an address on the PCI bus, is near, if that is
/// known and there are others. `root` is the folder that has `sys`: `/`.
///
/// # Errors
/// There is no node `asked`.
pub fn node_for(root: &Path, asked: Option<u32>, device: Option<&str>) -> Result<Option<Node>, NoSuchNode> {
    let nodes = nodes(root);
    let near = || device.filter(|_| nodes.len() > 1).and_then(|device| near(root, device));
    let node = asked.or_else(near).and_then(|number| nodes.iter().find(|node| node.number == number));
    match (asked, node) {
        (Some(asked), None) => {
            Err(NoSuchNode { asked, there: nodes.iter().map(|node| node.number).collect() })
        }
        (_, node) => Ok(node.cloned()),
    }
}

/// The nodes of the machine, by number; none where the system names none.
fn nodes(root: &Path) -> Vec<Node> {
    let folder = fs::read_dir(root.join("sys/devices/system/node")).into_iter().flatten();
    let mut nodes: Vec<Node> = folder
        .filter_map(|entry| {
            let entry = entry.ok()?;
            let number = entry.file_name().to_str()?.strip_prefix("node")?.parse().ok()?;
            Some(Node { number, cpus: cpus(&read(&entry.path().join("cpulist"))?)? })
        })
        .collect();
    nodes.sort_by_key(|node| node.number);
    nodes
}

/// The number of the node that a device is near; the system says -1 where it does not know.
fn near(root: &Path, device: &str) -> Option<u32> {
    let file = root.join("sys/bus/pci/devices").join(device.to_lowercase()).join("numa_node");
    read(&file)?.trim().parse().ok()
}

/// Processors as the system lists them: `0-3,8`.
fn cpus(listed: &str) -> Option<CpuSet> {
    let mut cpus = CpuSet::new();
    for part in listed.trim().split(',').filter(|part| !part.is_empty()) {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (first, last): (usize, usize) = (first.parse().ok()?, last.parse().ok()?);
        (first..=last.min(CpuSet::MAX_CPU - 1)).for_each(|cpu| cpus.set(cpu));
    }
    Some(cpus)
}

fn what_there_is(nodes: &[u32]) -> String {
    match nodes {
        [] => "this system names none".to_owned(),
        _ => format!("this machine has {}", nodes.iter().map(u32::to_string).collect::<Vec<_>>().join(", ")),
    }
}

/// While this is there, the thread that made it runs on the processors of a node. Threads that it starts meanwhile do for
/// ever.
pub struct Stay {
    before: CpuSet,
    /// It is about the thread that it is in.
    _here: PhantomData<*const ()>,
}

impl Node {
    /// Keeps this thread, and those that it starts, on those of the node's processors that it may use.
    ///
    /// # Errors
    /// It may use none of them, or the system refuses. Nothing has changed then.
    pub fn stay(&self) -> Result<Stay, NotBound> {
        let not_bound = |why| NotBound { node: self.number, why };
        let refused = |error: rustix::io::Errno| not_bound(format!("the system refuses: {error}"));
        let before = sched_getaffinity(None).map_err(refused)?;
        let mut cpus = CpuSet::new();
        (0..CpuSet::MAX_CPU)
            .filter(|&cpu| before.is_set(cpu) && self.cpus.is_set(cpu))
            .for_each(|cpu| cpus.set(cpu));
        if cpus.count() == 0 {
            return Err(not_bound("this process may run on none of its processors".to_owned()));
        }
        sched_setaffinity(None, &cpus).map_err(refused)?;
        Ok(Stay { before, _here: PhantomData })
    }
}

impl Drop for Stay {
    fn drop(&mut self) {
        _ = sched_setaffinity(None, &self.before); // where it was a moment ago
    }
}
