//! Limits of the cgroups that this process is in.
//!
//! `/proc/self/cgroup` says the path of the process's cgroup in each hierarchy, `/proc/self/mountinfo` where which
//! part of a hierarchy is mounted. Both count paths from the root of the process's cgroup namespace; what lies
//! outside of that is `..`.

use super::{Limit, number, read};
use std::path::{Path, PathBuf};

/// A version of cgroups: how its hierarchy is found, and how it counts memory.
struct Version {
    file_system: &'static str,
    /// The controller that a hierarchy must have; none is named where one hierarchy has them all.
    controller: &'static str,
    limits: &'static [&'static str],
    usage: &'static str,
    /// The line of `memory.stat` that says how much of the usage is page cache that can be dropped.
    droppable: &'static str,
}

/// A machine may have both mounted; memory is then counted by one of them, and the other has no such files.
const VERSIONS: [Version; 2] = [
    Version {
        file_system: "cgroup2",
        controller: "",
        limits: &["memory.max", "memory.high"],
        usage: "memory.current",
        droppable: "inactive_file",
    },
    Version {
        file_system: "cgroup",
        controller: "memory",
        limits: &["memory.limit_in_bytes"],
        usage: "memory.usage_in_bytes",
        droppable: "total_inactive_file",
    },
];

/// No limit, in version 1: the largest number of whole pages, whatever the size of a page.
const UNLIMITED: u64 = 1 << 62;

/// The limits of the process's cgroups and of all above them that can be seen.
pub(super) fn limits(root: &Path) -> Vec<Limit> {
    let proc = root.join("proc/self");
    let (Some(memberships), Some(mounts)) = (read(&proc.join("cgroup")), read(&proc.join("mountinfo")))
    else {
        return Vec::new();
    };
    let mut limits = Vec::new();
    for version in &VERSIONS {
        let Some(own) = version.own_path(&memberships) else { continue };
        for mount in version.mounts(&mounts) {
            for (path, folder) in mount.lineage(&names(own)) {
                limits.extend(version.limits_of(&path, &root.join(folder)));
            }
        }
    }
    limits
}

impl Version {
    /// The process's cgroup: from a line `number:controllers:path`, in which nothing is escaped.
    fn own_path<'a>(&self, memberships: &'a str) -> Option<&'a str> {
        memberships.lines().find_map(|line| {
            let (controllers, path) = line.split_once(':')?.1.split_once(':')?;
            controllers.split(',').any(|name| name == self.controller).then_some(path)
        })
    }

    /// Where this version's hierarchy is mounted.
    fn mounts(&self, mountinfo: &str) -> impl Iterator<Item = Mount> {
        mountinfo.lines().filter_map(|line| {
            let (place, kind) = line.split_once(" - ")?;
            let mut kind = kind.split(' ');
            let ours = kind.next()? == self.file_system
                && (self.controller.is_empty()
                    || kind.nth(1)?.split(',').any(|name| name == self.controller));
            let mut place = place.split(' ').skip(3).map(unescaped);
            ours.then_some(Mount { top: place.next()?, point: place.next()? })
        })
    }

    fn limits_of(&self, path: &str, folder: &Path) -> Vec<Limit> {
        let bytes = |file| read(&folder.join(file))?.trim().parse::<u64>().ok();
        let Some(usage) = bytes(self.usage) else { return Vec::new() };
        let stat = read(&folder.join("memory.stat")).unwrap_or_default();
        let used = usage.saturating_sub(number(&stat, self.droppable).unwrap_or(0));
        (self.limits.iter())
            .filter_map(|file| Some((file, bytes(file).filter(|&bytes| bytes < UNLIMITED)?)))
            .map(|(file, bytes)| Limit::Cgroup { path: path.to_owned(), file, bytes, used })
            .collect()
    }
}

/// A part of a hierarchy, mounted.
struct Mount {
    /// The cgroup that is mounted; those below it are its folders.
    top: String,
    /// The folder it is mounted at.
    point: String,
}

impl Mount {
    /// The cgroup `own` and those above it, down from `own`, as far as this mount shows them: paths and folders.
    fn lineage(&self, own: &[&str]) -> Vec<(String, PathBuf)> {
        let top = names(&self.top);
        let below = match own.strip_prefix(&*top) {
            Some([first, ..]) if *first == ".." => return Vec::new(),
            Some(below) => below,
            // The mount begins above the namespace, which is above `own`: folders between have no name here.
            None if top.iter().all(|name| *name == "..") => &[],
            None => return Vec::new(),
        };
        let point = PathBuf::from_iter(names(&self.point));
        (0..=below.len())
            .rev()
            .map(|depth| {
                let path = format!("/{}", [&*top, &below[..depth]].concat().join("/"));
                (path, point.join(PathBuf::from_iter(&below[..depth])))
            })
            .collect()
    }
}

/// The names that a path consists of.
fn names(path: &str) -> Vec<&str> {
    path.split('/').filter(|name| !name.is_empty()).collect()
}

/// A field of `mountinfo`, in which white space and backslashes are a backslash and three octal digits.
fn unescaped(field: &str) -> String {
    let mut parts = field.split('\\');
    let mut text = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        match part.get(..3).and_then(|digits| u8::from_str_radix(digits, 8).ok()) {
            Some(code) => {
                text.push(char::from(code));
                text.push_str(&part[3..]);
            }
            None => text.extend(["\\", part]),
        }
    }
    text
}
