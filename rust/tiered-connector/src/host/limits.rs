//! How much memory this process may still use, and which limit says so.

mod cgroups;
#[cfg(test)]
mod tests;

use rustix::process::{Resource, getrlimit};
use std::path::Path;
use std::{fmt, fs};

/// What this process may still use of memory.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Usable {
    /// How much, in bytes; `u64::MAX` if no limit is known.
    pub bytes: u64,
    /// The limit that leaves the least.
    pub by: Limit,
}

/// Something that limits a process's memory, as it was when it was read. Its `Display` is a part of a sentence.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Limit {
    /// The machine's memory.
    Machine {
        /// What the kernel can give without swapping, in bytes.
        available: u64,
    },
    /// A cgroup of the process, or one above it.
    Cgroup {
        /// Its path, as `/proc/self/cgroup` has paths.
        path: String,
        /// The file that says the limit.
        file: &'static str,
        /// The limit in bytes.
        bytes: u64,
        /// Bytes in use by all processes of the cgroup, without page cache that can be dropped.
        used: u64,
    },
    /// A soft limit of the process, as `ulimit` sets them.
    Process {
        /// Its name.
        resource: &'static str,
        /// The limit in bytes.
        bytes: u64,
        /// Bytes that the process has of it.
        used: u64,
    },
    /// Nothing that could be read says a limit.
    Unknown,
}

/// What this process may still use. `root` is the folder that has `proc` and the mount points: `/`.
///
/// The least of what the machine, each of the process's cgroups with all above it (both versions of cgroups),
/// and the process's own soft limits leave. A limit that cannot be read, or whose usage cannot, does not count.
pub fn usable(root: &Path) -> Usable {
    least(root, soft_limits())
}

fn least(root: &Path, soft_limits: Vec<SoftLimit>) -> Usable {
    let status = read(&root.join("proc/self/status")).unwrap_or_default();
    let by = (machine(root).into_iter())
        .chain(cgroups::limits(root))
        .chain(soft_limits.into_iter().filter_map(|limit| limit.against(&status)))
        .min_by_key(Limit::left)
        .unwrap_or(Limit::Unknown);
    Usable { bytes: by.left(), by }
}

/// What limits memory that this process keeps from being swapped, if something does. `root` is as in [`usable`].
pub(super) fn locked(root: &Path) -> Option<Limit> {
    let limit = SoftLimit::of("RLIMIT_MEMLOCK", "VmLck:", Resource::Memlock)?;
    limit.against(&read(&root.join("proc/self/status"))?)
}

fn machine(root: &Path) -> Option<Limit> {
    let available = kibibytes(&read(&root.join("proc/meminfo"))?, "MemAvailable:")?;
    Some(Limit::Machine { available })
}

/// A limit that `setrlimit` set.
#[derive(PartialEq, Eq, Debug)]
struct SoftLimit {
    resource: &'static str,
    /// The line of `/proc/self/status` that says what the process has of it.
    usage: &'static str,
    bytes: u64,
}

fn soft_limits() -> Vec<SoftLimit> {
    let limits = [("RLIMIT_AS", "VmSize:", Resource::As), ("RLIMIT_DATA", "VmData:", Resource::Data)];
    limits.into_iter().filter_map(|(resource, usage, id)| SoftLimit::of(resource, usage, id)).collect()
}

impl SoftLimit {
    fn of(resource: &'static str, usage: &'static str, id: Resource) -> Option<SoftLimit> {
        Some(SoftLimit { resource, usage, bytes: getrlimit(id).current? })
    }

    fn against(self, status: &str) -> Option<Limit> {
        let used = kibibytes(status, self.usage)?;
        Some(Limit::Process { resource: self.resource, bytes: self.bytes, used })
    }
}

impl Limit {
    /// How much it leaves, in bytes.
    fn left(&self) -> u64 {
        match self {
            Limit::Machine { available } => *available,
            Limit::Cgroup { bytes, used, .. } | Limit::Process { bytes, used, .. } => {
                bytes.saturating_sub(*used)
            }
            Limit::Unknown => u64::MAX,
        }
    }
}

impl fmt::Display for Limit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Limit::Machine { available } => write!(f, "/proc/meminfo: MemAvailable is {available}"),
            Limit::Cgroup { path, file, bytes, used } => {
                write!(f, "cgroup {path}: {file} is {bytes} and {used} are in use")
            }
            Limit::Process { resource, bytes, used } => {
                write!(f, "{resource} is {bytes} and {used} are in use")
            }
            Limit::Unknown => f.write_str("no limit is known"),
        }
    }
}

/// The text of a file, if it can be read. Bytes that are no UTF-8 spoil only what they are part of.
pub(super) fn read(path: &Path) -> Option<String> {
    Some(String::from_utf8_lossy(&fs::read(path).ok()?).into_owned())
}

/// The number behind `name`, at the beginning of a line.
fn number(text: &str, name: &str) -> Option<u64> {
    let mut words =
        text.lines().map(str::split_whitespace).find(|words| words.clone().next() == Some(name))?;
    words.nth(1)?.parse().ok()
}

/// In bytes what [`number`] gives in KiB.
fn kibibytes(text: &str, name: &str) -> Option<u64> {
    number(text, name)?.checked_mul(1 << 10)
}
