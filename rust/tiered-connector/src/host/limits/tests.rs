//! Trees of files as kernels and container runtimes lay them out.

use super::{Limit, SoftLimit, Usable, least, number, read, soft_limits, usable};
use crate::host::tree::Tree;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use std::fs;
use std::path::Path;

const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;

const V1_MOUNT: &str = "33 30 0:29 / /sys/fs/cgroup/memory rw,nosuid shared:15 - cgroup cgroup rw,memory";
const V2_MOUNT: &str = "30 23 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate";
/// As systemd mounts it beside version 1.
const UNIFIED_MOUNT: &str = "31 30 0:27 / /sys/fs/cgroup/unified rw shared:5 - cgroup2 cgroup2 rw";
const V1_UNLIMITED: &str = "9223372036854771712";

/// The files of a machine with 48 GiB to give.
struct Machine(Tree);

impl Machine {
    fn new(memberships: &str, mounts: &[&str]) -> Machine {
        Machine(Tree::default())
            .file(
                "proc/meminfo",
                "MemTotal:       67108864 kB\nMemFree:  1024 kB\nMemAvailable:   50331648 kB\n",
            )
            .file("proc/self/cgroup", memberships)
            .file("proc/self/mountinfo", mounts.join("\n"))
    }

    fn file(self, path: &str, content: impl AsRef<[u8]>) -> Machine {
        Machine(self.0.file(path, content))
    }

    fn without(self, path: &str) -> Machine {
        fs::remove_file(self.0.root().join(path)).unwrap();
        self
    }

    /// A cgroup of version 1: its limit, its usage, and how much of that is page cache that can be dropped.
    fn v1(self, folder: &str, limit: &str, usage: u64, droppable: u64) -> Machine {
        let stat = format!("cache 1\ninactive_file 7\ntotal_cache 3\ntotal_inactive_file {droppable}\n");
        self.file(&format!("{folder}/memory.limit_in_bytes"), format!("{limit}\n"))
            .file(&format!("{folder}/memory.usage_in_bytes"), format!("{usage}\n"))
            .file(&format!("{folder}/memory.stat"), stat)
    }

    /// A cgroup of version 2, likewise.
    fn v2(self, folder: &str, limit: &str, usage: u64, droppable: u64) -> Machine {
        let stat = format!("anon 5\nfile 7\nactive_file 9\ninactive_file {droppable}\n");
        self.file(&format!("{folder}/memory.max"), format!("{limit}\n"))
            .file(&format!("{folder}/memory.high"), "max\n")
            .file(&format!("{folder}/memory.current"), format!("{usage}\n"))
            .file(&format!("{folder}/memory.stat"), stat)
    }

    /// What a process without soft limits may use.
    fn usable(&self) -> Usable {
        least(self.0.root(), Vec::new())
    }
}

fn cgroup(path: &str, file: &'static str, bytes: u64, used: u64) -> Usable {
    Usable {
        bytes: bytes.saturating_sub(used),
        by: Limit::Cgroup { path: path.to_owned(), file, bytes, used },
    }
}

/// The machine's own 48 GiB: 50331648 KiB.
fn all_of_the_machine() -> Usable {
    Usable { bytes: 51_539_607_552, by: Limit::Machine { available: 51_539_607_552 } }
}

#[test]
fn without_cgroups_it_is_what_the_machine_has_available() {
    assert_eq!(Machine::new("", &[]).usable(), all_of_the_machine());
    let bare = Machine::new("", &[]).without("proc/self/cgroup").without("proc/self/mountinfo");
    assert_eq!(bare.usable(), all_of_the_machine());
}

#[test]
fn where_nothing_says_a_limit_none_is_known() {
    let silent = Machine::new("", &[]).without("proc/meminfo");
    assert_eq!(silent.usable(), Usable { bytes: u64::MAX, by: Limit::Unknown });
}

#[test]
fn version_2_leaves_its_limit_without_what_is_in_use_and_cannot_be_dropped() {
    let machine =
        Machine::new("0::/a\n", &[V2_MOUNT]).v2("sys/fs/cgroup/a", "4294967296", 1536 * MIB, 512 * MIB);
    assert_eq!(machine.usable(), cgroup("/a", "memory.max", 4 * GIB, GIB));
}

#[test]
fn the_throttling_limit_of_version_2_counts_too() {
    let machine = Machine::new("0::/a\n", &[V2_MOUNT])
        .v2("sys/fs/cgroup/a", "4294967296", GIB, 0)
        .file("sys/fs/cgroup/a/memory.high", "3221225472\n");
    assert_eq!(machine.usable(), cgroup("/a", "memory.high", 3 * GIB, GIB));
}

#[test]
fn a_parent_of_version_2_that_leaves_less_decides() {
    let machine = Machine::new("0::/a/b/c\n", &[V2_MOUNT])
        .v2("sys/fs/cgroup/a", "17179869184", GIB, 0) // 15 GiB left
        .v2("sys/fs/cgroup/a/b", "8589934592", 6 * GIB, 0) // 2 GiB left
        .v2("sys/fs/cgroup/a/b/c", "4294967296", GIB, 0); // 3 GiB left
    assert_eq!(machine.usable(), cgroup("/a/b", "memory.max", 8 * GIB, 6 * GIB));
}

#[test]
fn cgroups_beside_the_lineage_do_not_count() {
    let machine = Machine::new("0::/a/b\n", &[V2_MOUNT])
        .v2("sys/fs/cgroup/a", "max", 0, 0)
        .v2("sys/fs/cgroup/a/b", "4294967296", 0, 0)
        .v2("sys/fs/cgroup/a/b/child", "1048576", 0, 0)
        .v2("sys/fs/cgroup/a/sibling", "1048576", 0, 0);
    assert_eq!(machine.usable(), cgroup("/a/b", "memory.max", 4 * GIB, 0));
}

#[test]
fn a_cgroup_without_a_limit_leaves_the_machine() {
    let machine = Machine::new(
        "0::/a
",
        &[V2_MOUNT],
    )
    .v2("sys/fs/cgroup/a", "max", GIB, 0);
    assert_eq!(machine.usable(), all_of_the_machine());
}

#[test]
fn the_number_that_version_1_has_for_no_limit_is_none() {
    let machine = Machine::new(
        "4:memory:/a
",
        &[V1_MOUNT],
    )
    .v1("sys/fs/cgroup/memory/a", V1_UNLIMITED, GIB, 0)
    .without("proc/meminfo");
    assert_eq!(machine.usable().by, Limit::Unknown);
}

#[test]
fn version_1_leaves_its_limit_without_what_is_in_use_and_cannot_be_dropped() {
    let machine = Machine::new("9:cpu,cpuacct:/x\n4:memory:/a\n", &[V1_MOUNT]).v1(
        "sys/fs/cgroup/memory/a",
        "2147483648",
        768 * MIB,
        256 * MIB,
    );
    assert_eq!(machine.usable(), cgroup("/a", "memory.limit_in_bytes", 2 * GIB, 512 * MIB));
}

#[test]
fn a_parent_of_version_1_that_leaves_less_decides() {
    let machine = Machine::new("4:memory:/a/b\n", &[V1_MOUNT])
        .v1("sys/fs/cgroup/memory", V1_UNLIMITED, 30 * GIB, 0)
        .v1("sys/fs/cgroup/memory/a", "8589934592", 7 * GIB, 0) // 1 GiB left
        .v1("sys/fs/cgroup/memory/a/b", "4294967296", 2 * GIB, 0); // 2 GiB left
    assert_eq!(machine.usable(), cgroup("/a", "memory.limit_in_bytes", 8 * GIB, 7 * GIB));
}

#[test]
fn memory_may_share_its_hierarchy_of_version_1_with_other_controllers() {
    let mount = "33 30 0:29 / /cg rw - cgroup cgroup rw,cpuset,memory";
    let machine = Machine::new("4:cpuset,memory:/a\n", &[mount]).v1("cg/a", "2147483648", GIB, 0);
    assert_eq!(machine.usable(), cgroup("/a", "memory.limit_in_bytes", 2 * GIB, GIB));
}

#[test]
fn hierarchies_of_version_1_without_memory_do_not_count() {
    let cpu = "32 30 0:28 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu";
    let machine = Machine::new("3:cpu:/a\n4:memory:/a\n", &[cpu]).v1("sys/fs/cgroup/cpu/a", "1048576", 0, 0);
    assert_eq!(machine.usable(), all_of_the_machine());
}

#[test]
fn a_hybrid_counts_memory_in_version_1_where_that_has_the_controller() {
    let machine = Machine::new("4:memory:/a\n1:name=systemd:/b\n0::/b\n", &[V1_MOUNT, UNIFIED_MOUNT])
        .v1("sys/fs/cgroup/memory/a", "2147483648", GIB, 0)
        .file("sys/fs/cgroup/unified/b/cgroup.procs", "1\n");
    assert_eq!(machine.usable(), cgroup("/a", "memory.limit_in_bytes", 2 * GIB, GIB));
}

#[test]
fn a_hybrid_counts_memory_in_version_2_where_that_has_the_controller() {
    let cpu = "32 30 0:28 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu";
    let machine = Machine::new("3:cpu:/a\n0::/b\n", &[cpu, UNIFIED_MOUNT]).v2(
        "sys/fs/cgroup/unified/b",
        "2147483648",
        GIB,
        0,
    );
    assert_eq!(machine.usable(), cgroup("/b", "memory.max", 2 * GIB, GIB));
}

#[test]
fn the_root_of_a_cgroup_namespace_is_at_the_mount_point() {
    let machine = Machine::new("0::/\n", &[V2_MOUNT]).v2("sys/fs/cgroup", "3221225472", GIB, 0);
    assert_eq!(machine.usable(), cgroup("/", "memory.max", 3 * GIB, GIB));
}

#[test]
fn a_container_sees_its_own_cgroup_at_the_mount_point() {
    let v1 = "33 30 0:29 /docker/4f2a /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory";
    let machine = Machine::new("4:memory:/docker/4f2a\n", &[v1])
        .v1("sys/fs/cgroup/memory", "2147483648", GIB, 0)
        // A container in this container may have the same name.
        .v1("sys/fs/cgroup/memory/docker/4f2a", "1048576", 0, 0);
    assert_eq!(machine.usable(), cgroup("/docker/4f2a", "memory.limit_in_bytes", 2 * GIB, GIB));

    let v2 = "30 23 0:26 /docker/4f2a /sys/fs/cgroup ro - cgroup2 cgroup rw";
    let machine = Machine::new("0::/docker/4f2a/worker\n", &[v2])
        .v2("sys/fs/cgroup", "4294967296", 2 * GIB, 0)
        .v2("sys/fs/cgroup/worker", "4294967296", GIB, 0);
    assert_eq!(machine.usable(), cgroup("/docker/4f2a", "memory.max", 4 * GIB, 2 * GIB));
}

#[test]
fn a_process_outside_its_namespace_is_found_below_a_mount_from_outside() {
    let mount = "30 23 0:26 /../.. /sys/fs/cgroup rw - cgroup2 cgroup2 rw";
    let above = Machine::new("0::/../..\n", &[mount]).v2("sys/fs/cgroup", "3221225472", GIB, 0);
    assert_eq!(above.usable(), cgroup("/../..", "memory.max", 3 * GIB, GIB));
    let beside = Machine::new("0::/../../b\n", &[mount]).v2("sys/fs/cgroup/b", "2147483648", GIB, 0);
    assert_eq!(beside.usable(), cgroup("/../../b", "memory.max", 2 * GIB, GIB));
}

#[test]
fn a_mount_from_above_the_namespace_shows_its_top_only() {
    // The namespace's root is two folders below the mount point, and nothing says which.
    let mount = "30 23 0:26 /../.. /sys/fs/cgroup rw - cgroup2 cgroup2 rw";
    let machine = Machine::new("0::/a\n", &[mount]).v2("sys/fs/cgroup", "3221225472", GIB, 0).v2(
        "sys/fs/cgroup/a",
        "1048576",
        0,
        0,
    );
    assert_eq!(machine.usable(), cgroup("/../..", "memory.max", 3 * GIB, GIB));
}

#[test]
fn a_process_outside_all_that_is_mounted_has_no_cgroup_here() {
    for (own, top) in [("/..", "/"), ("/../b", "/"), ("/", "/../b"), ("/ab", "/a")] {
        let mount = format!("30 23 0:26 {top} /sys/fs/cgroup rw - cgroup2 cgroup2 rw");
        let machine = Machine::new(&format!("0::{own}\n"), &[&mount])
            .v2("sys/fs/cgroup", "1048576", 0, 0)
            .v2("sys/fs", "1048576", 0, 0);
        assert_eq!(machine.usable(), all_of_the_machine(), "a process in {own}, {top} mounted");
    }
}

#[test]
fn mountinfo_escapes_names_and_proc_self_cgroup_does_not() {
    let mount = r"30 23 0:26 /my\040pod\134x2d /sys/fs/c\040g\011\134x rw - cgroup2 cgroup2 rw";
    let machine = Machine::new("0::/my pod\\x2d/a:b \\040\n", &[mount])
        .v2("sys/fs/c g\t\\x", "max", 0, 0)
        .v2("sys/fs/c g\t\\x/a:b \\040", "2147483648", GIB, 0);
    assert_eq!(machine.usable(), cgroup("/my pod\\x2d/a:b \\040", "memory.max", 2 * GIB, GIB));
}

#[test]
fn a_hierarchy_that_is_mounted_twice_shows_what_either_mount_shows() {
    let own = "41 23 0:26 /a/b /mnt/own rw - cgroup2 cgroup2 rw";
    let machine = Machine::new("0::/a/b\n", &[own, V2_MOUNT]).v2("mnt/own", "4294967296", GIB, 0).v2(
        "sys/fs/cgroup/a",
        "3221225472",
        2 * GIB,
        0,
    );
    assert_eq!(machine.usable(), cgroup("/a", "memory.max", 3 * GIB, 2 * GIB));
}

#[test]
fn a_cgroup_that_was_deleted_leaves_those_above_it() {
    let machine =
        Machine::new("0::/a/b (deleted)\n", &[V2_MOUNT]).v2("sys/fs/cgroup/a", "2147483648", GIB, 0);
    assert_eq!(machine.usable(), cgroup("/a", "memory.max", 2 * GIB, GIB));
}

#[test]
fn usage_above_the_limit_leaves_nothing() {
    let machine = Machine::new("0::/a\n", &[V2_MOUNT]).v2("sys/fs/cgroup/a", "1073741824", 2 * GIB, 0);
    assert_eq!(machine.usable(), cgroup("/a", "memory.max", GIB, 2 * GIB));
    assert_eq!(machine.usable().bytes, 0);
}

#[test]
fn more_cache_to_drop_than_usage_is_no_usage() {
    let machine = Machine::new("0::/a\n", &[V2_MOUNT]).v2("sys/fs/cgroup/a", "1073741824", MIB, GIB);
    assert_eq!(machine.usable(), cgroup("/a", "memory.max", GIB, 0));
}

#[test]
fn a_limit_or_a_usage_that_cannot_be_read_does_not_count() {
    // A folder in place of a file can be read by nobody, whatever the rights.
    for file in ["memory.max", "memory.current"] {
        let path = format!("sys/fs/cgroup/a/{file}");
        for garbage in [&b"12 apples"[..], b"", b"-1", b"\xff\xfe", b"99999999999999999999999"] {
            let machine = Machine::new("0::/a\n", &[V2_MOUNT])
                .v2("sys/fs/cgroup/a", "1073741824", 0, 0)
                .file(&path, garbage);
            assert_eq!(machine.usable(), all_of_the_machine(), "{file} is {garbage:?}");
        }
        let machine =
            Machine::new("0::/a\n", &[V2_MOUNT]).v2("sys/fs/cgroup/a", "1073741824", 0, 0).without(&path);
        assert_eq!(machine.usable(), all_of_the_machine(), "{file} is missing");
        let machine = machine.file(&format!("{path}/in-a-folder"), "");
        assert_eq!(machine.usable(), all_of_the_machine(), "{file} cannot be read");
    }
}

#[test]
fn without_a_number_of_droppable_cache_all_usage_counts() {
    let machine = Machine::new("0::/a\n", &[V2_MOUNT])
        .v2("sys/fs/cgroup/a", "4294967296", 2 * GIB, GIB)
        .file("sys/fs/cgroup/a/memory.stat", "inactive_file\nfile 7\n");
    assert_eq!(machine.usable(), cgroup("/a", "memory.max", 4 * GIB, 2 * GIB));
    let machine = machine.without("sys/fs/cgroup/a/memory.stat");
    assert_eq!(machine.usable(), cgroup("/a", "memory.max", 4 * GIB, 2 * GIB));
}

#[test]
fn garbage_in_proc_hides_only_what_it_says() {
    let machine = Machine::new("nonsense\n\n0::/a\n", &["", "1 2 3", "7 - cgroup2", "a - b - c", V2_MOUNT])
        .v2("sys/fs/cgroup/a", "2147483648", GIB, 0)
        .file("proc/meminfo", "MemAvailable: much\n");
    assert_eq!(machine.usable(), cgroup("/a", "memory.max", 2 * GIB, GIB));
    let foreign = [b"29 1 8:1 / /mnt/\xff rw - ext4 /dev/sda rw\n", V2_MOUNT.as_bytes()].concat();
    assert_eq!(
        machine.file("proc/self/mountinfo", foreign).usable(),
        cgroup("/a", "memory.max", 2 * GIB, GIB)
    );
}

#[test]
fn a_machine_with_less_than_its_cgroups_decides() {
    let machine = Machine::new("0::/a\n", &[V2_MOUNT]).v2("sys/fs/cgroup/a", "68719476736", 0, 0);
    assert_eq!(machine.usable(), all_of_the_machine());
}

#[test]
fn soft_limits_leave_what_the_process_does_not_have_yet() {
    let machine = Machine::new("", &[])
        .file("proc/self/status", "VmPeak:\t 9999999 kB\nVmSize:\t 1048576 kB\nVmData:\t  524288 kB\n");
    let limit = |resource, usage, bytes| SoftLimit { resource, usage, bytes };
    // 3 GiB − 1048576 KiB = 2 GiB; 2 GiB − 524288 KiB = 1.5 GiB.
    let address_space = || limit("RLIMIT_AS", "VmSize:", 3 * GIB);
    let data = limit("RLIMIT_DATA", "VmData:", 2 * GIB);
    let by = Limit::Process { resource: "RLIMIT_AS", bytes: 3 * GIB, used: GIB };
    assert_eq!(least(machine.0.root(), vec![address_space()]), Usable { bytes: 2 * GIB, by });
    let by = Limit::Process { resource: "RLIMIT_DATA", bytes: 2 * GIB, used: 512 * MIB };
    assert_eq!(least(machine.0.root(), vec![address_space(), data]), Usable { bytes: 1536 * MIB, by });
}

#[test]
fn a_soft_limit_without_a_known_usage_does_not_count() {
    let limit = || SoftLimit { resource: "RLIMIT_AS", usage: "VmSize:", bytes: GIB };
    let machine = Machine::new("", &[]);
    assert_eq!(least(machine.0.root(), vec![limit()]), all_of_the_machine());
    let machine = machine.file("proc/self/status", "VmSize:\t lots\n");
    assert_eq!(least(machine.0.root(), vec![limit()]), all_of_the_machine());
}

#[test]
fn soft_limits_are_those_that_were_set_for_this_process() {
    let set = |resource, bytes: u64| {
        let maximum = getrlimit(resource).maximum;
        let current = maximum.map_or(bytes, |maximum| maximum.min(bytes));
        setrlimit(resource, Rlimit { current: Some(current), maximum }).unwrap();
        current
    };
    // Far more than a process of tests needs.
    let (address_space, data) = (set(Resource::As, 1 << 46), set(Resource::Data, 1 << 45));
    let limit = |resource, usage, bytes| SoftLimit { resource, usage, bytes };
    assert_eq!(
        soft_limits(),
        [limit("RLIMIT_AS", "VmSize:", address_space), limit("RLIMIT_DATA", "VmData:", data)]
    );
}

#[test]
fn each_limit_can_be_told() {
    let told = [
        (Limit::Machine { available: 7 }, "/proc/meminfo: MemAvailable is 7"),
        (
            cgroup("/a/b", "memory.max", 4 * GIB, GIB).by,
            "cgroup /a/b: memory.max is 4294967296 and 1073741824 are in use",
        ),
        (Limit::Process { resource: "RLIMIT_AS", bytes: 9, used: 2 }, "RLIMIT_AS is 9 and 2 are in use"),
        (Limit::Unknown, "no limit is known"),
    ];
    for (limit, words) in told {
        assert_eq!(limit.to_string(), words);
    }
}

#[test]
#[cfg(target_os = "linux")]
fn this_process_may_use_something_but_not_more_than_the_machine_has() {
    let total = number(&read(Path::new("/proc/meminfo")).unwrap(), "MemTotal:").unwrap() * 1024;
    let usable = usable(Path::new("/"));
    assert!(usable.bytes > 0 && usable.bytes <= total, "{usable:?}");
}
