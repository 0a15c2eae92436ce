use crate::common::*;
use block_pool::*;
use cache_manager::*;

#[test]
fn f9_truncate_private() {
    let mut l = Ledger::new(private(20));
    let a = claim(&mut l, prompt(&[1, 2, 3, 4, 5, 6, 7, 8, 9]));
    let b = claim(&mut l, prompt(&[1, 2, 3, 4, 5]));
    l.alloc(&[a, b], &[]).unwrap();
    l.close_step();
    l.step(&[b], &[], None).unwrap();
    l.step(&[a], &[], None).unwrap();
    l.release(&[b]).unwrap();
    l.verify().unwrap();
    l.truncate(a, 4).unwrap();
    l.verify().unwrap();
}
#[test]
fn f8_release_private() {
    let mut l = Ledger::new(private(20));
    let a = computed(&mut l, &[1, 2, 3, 4]);
    l.update(a, 5).unwrap();
    for t in [6, 7, 8] {
        l.update(a, t).unwrap();
    }
    l.alloc(&[a], &[]).unwrap();
    l.close_step();
    let b = computed(&mut l, &[1, 2, 3, 4, 5, 6, 7, 8]);
    l.step(&[a], &[], None).unwrap();
    l.release(&[b]).unwrap();
    l.release(&[a]).unwrap();
    l.verify().unwrap();
}
#[test]
fn truncate_pinned() {
    let mut l = Ledger::new(config(20));
    let a = computed(&mut l, &[1, 2, 3]);
    let job = l.start_copy(a, 0, 1).unwrap();
    l.truncate(a, 2).unwrap();
    l.update(a, 9).unwrap();
    l.alloc(&[a], &[]).unwrap();
    assert_ne!(l.pages(a).unwrap()[0], job.pages[0], "rewrites a page that a copy reads");
}
#[test]
fn stale_override() {
    let mut l = Ledger::new(config(20));
    let a = claim(&mut l, overridden(&[1, 2, 3, 4, 5, 6, 7, 8], &[(6, 99)]));
    forward(&mut l, a);
    l.truncate(a, 5).unwrap();
    for t in [6, 7, 8] {
        l.update(a, t).unwrap();
    }
    forward(&mut l, a);
    l.release(&[a]).unwrap();
    // fresh without overrides
    let plain = hit(&mut l, prompt(&[1, 2, 3, 4, 5, 6, 7, 8, 0]));
    let other = hit(&mut l, prompt(&[1, 2, 3, 4, 5, 6, 99, 8, 0]));
    println!("plain {plain} literal-99 {other}");
    assert_eq!((plain, other), (8, 8)); // first pass did store 99 legitimately
}
#[test]
fn override_beyond_prompt() {
    let mut l = Ledger::new(config(20));
    let a = claim(&mut l, overridden(&[1, 2, 3, 4, 5], &[(6, 99)]));
    forward(&mut l, a);
    for t in [6, 7, 8] {
        l.update(a, t).unwrap();
    }
    forward(&mut l, a);
    l.release(&[a]).unwrap();
    let plain = hit(&mut l, prompt(&[1, 2, 3, 4, 5, 6, 7, 8, 0]));
    let other = hit(&mut l, prompt(&[1, 2, 3, 4, 5, 6, 99, 8, 0]));
    assert_eq!((plain, other), (8, 4));
}
#[test]
fn adopted_after() {
    let mut l = Ledger::new(config(20));
    let a = claim(&mut l, prompt(&[1, 2, 3, 4, 5]));
    let c = claim(&mut l, prompt(&[1, 2, 3, 4, 6]));
    l.alloc(&[a], &[]).unwrap();
    l.close_step();
    l.alloc(&[c], &[]).unwrap();
    l.close_step();
    l.step(&[c], &[], None).unwrap();
    l.step(&[a], &[], None).unwrap();
    assert_eq!(l.pages(a).unwrap()[0], l.pages(c).unwrap()[0]);
    let job = l.start_copy(a, 0, 1).unwrap();
    assert_eq!(job.after, Step(2));
}
