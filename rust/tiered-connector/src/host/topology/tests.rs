//! Machines of two nodes and of one, as the kernel shows them; threads that stay.

use super::{NoSuchNode, Node, node_for};
use crate::host::tree::Tree;
use rustix::thread::{CpuSet, sched_getaffinity};

const DEVICE: &str = "sys/bus/pci/devices/0000:3b:00.0/numa_node";
/// As drivers write it.
const ADDRESS: Option<&str> = Some("0000:3B:00.0");

fn machine(cpulists: &[&str]) -> Tree {
    let node = |tree: Tree, (number, list): (usize, &&str)| {
        tree.file(&format!("sys/devices/system/node/node{number}/cpulist"), format!("{list}\n"))
    };
    let other = "sys/devices/system/node/possible";
    cpulists.iter().enumerate().fold(Tree::default().file(other, "0-1\n"), node)
}

fn cpus(numbers: &[usize]) -> CpuSet {
    let mut cpus = CpuSet::new();
    for &cpu in numbers {
        cpus.set(cpu);
    }
    cpus
}

#[test]
fn host_memory_is_near_the_node_of_the_device() {
    let machine = machine(&["0-2,6", "3-5,7"]).file(DEVICE, "1\n");
    let chosen = node_for(machine.root(), None, ADDRESS).unwrap();
    assert_eq!(chosen, Some(Node { number: 1, cpus: cpus(&[3, 4, 5, 7]) }));
}

#[test]
fn a_node_that_is_asked_for_goes_before_that_of_the_device() {
    let machine = machine(&["0-2,6", "3-5,7"]).file(DEVICE, "1\n");
    let chosen = node_for(machine.root(), Some(0), ADDRESS).unwrap();
    assert_eq!(chosen, Some(Node { number: 0, cpus: cpus(&[0, 1, 2, 6]) }));
}

#[test]
fn without_a_device_and_a_wish_memory_is_nowhere_in_particular() {
    assert_eq!(node_for(machine(&["0", "1"]).root(), None, None), Ok(None));
}

#[test]
fn a_device_whose_node_is_not_known_chooses_none() {
    for said in ["-1\n", "", "one\n", "2\n", "99999999999\n"] {
        let machine = machine(&["0", "1"]).file(DEVICE, said);
        assert_eq!(node_for(machine.root(), None, ADDRESS), Ok(None), "{said:?}");
    }
    assert_eq!(node_for(machine(&["0", "1"]).root(), None, ADDRESS), Ok(None), "there is no such device");
}

#[test]
fn where_there_is_one_node_a_device_chooses_none() {
    let machine = machine(&["0-7"]).file(DEVICE, "0\n");
    assert_eq!(node_for(machine.root(), None, ADDRESS), Ok(None));
}

#[test]
fn a_node_that_is_not_there_is_refused_with_those_that_are() {
    let refused = node_for(machine(&["0", "1"]).root(), Some(2), None).unwrap_err();
    assert_eq!(refused, NoSuchNode { asked: 2, there: vec![0, 1] });
    assert_eq!(refused.to_string(), "host_numa_node=2: there is no such node; this machine has 0, 1");
    let refused = node_for(Tree::default().root(), Some(0), None).unwrap_err();
    assert_eq!(refused.to_string(), "host_numa_node=0: there is no such node; this system names none");
}

#[test]
fn a_node_whose_processors_are_no_list_is_not_there() {
    let machine = machine(&["0", "1-x", "8000000000-9000000000", "2-3\n"]);
    assert_eq!(node_for(machine.root(), Some(1), None).unwrap_err().there, [0, 2, 3]);
    let beyond = node_for(machine.root(), Some(2), None).unwrap().unwrap();
    assert_eq!(beyond.cpus.count(), 0, "no call can name them");
}

#[test]
fn a_node_may_have_memory_alone() {
    let chosen = node_for(machine(&["0-1", ""]).root(), Some(1), None).unwrap();
    assert_eq!(chosen, Some(Node { number: 1, cpus: cpus(&[]) }));
}

#[test]
fn threads_that_are_started_meanwhile_stay_on_the_processors_of_a_node_that_may_be_used() {
    let before = sched_getaffinity(None).unwrap();
    let first = (0..CpuSet::MAX_CPU).find(|&cpu| before.is_set(cpu)).unwrap();
    let forbidden = (0..CpuSet::MAX_CPU).find(|&cpu| !before.is_set(cpu)).unwrap();
    let (leave, left) = std::sync::mpsc::channel();
    let stay = Node { number: 1, cpus: cpus(&[first, forbidden]) }.stay().unwrap();
    let thread = std::thread::spawn(move || {
        left.recv().unwrap();
        sched_getaffinity(None)
    });
    assert_eq!(sched_getaffinity(None), Ok(cpus(&[first])));
    drop(stay);
    assert_eq!(sched_getaffinity(None), Ok(before));
    leave.send(()).unwrap();
    assert_eq!(thread.join().unwrap(), Ok(cpus(&[first])));
}

#[test]
fn where_none_of_its_processors_may_be_used_a_node_says_so_and_nothing_changes() {
    let before = sched_getaffinity(None).unwrap();
    let forbidden = (0..CpuSet::MAX_CPU).find(|&cpu| !before.is_set(cpu)).unwrap();
    let Err(refused) = (Node { number: 1, cpus: cpus(&[forbidden]) }).stay() else {
        panic!("it is forbidden")
    };
    assert_eq!(
        refused.to_string(),
        "the threads of the host tier are not bound to NUMA node 1: \
         this process may run on none of its processors"
    );
    assert_eq!(sched_getaffinity(None), Ok(before));
}
