//! Disks that fail, fill up, refuse, dawdle and never answer: each copy is told of its end once, nothing is claimed that
//! is not so, and when the fault is gone the store serves as before.

mod faulty;
mod rig;
#[path = "../scene/mod.rs"]
mod scene;

use disk_store::store::{Failure, Sync};
use faulty::{Call, EIO, ENOSPC, Fault};
use rig::{LAYOUT, LONG, Rig};
use scene::{Kind, payload, reset};
use std::io::Write;
use std::os::fd::OwnedFd;
use std::os::unix::fs::OpenOptionsExt;
use std::time::{Duration, Instant};

fn is_io(end: &Result<(), Failure>) -> bool {
    matches!(end, Err(Failure::Io(_)))
}

#[test]
fn a_block_that_cannot_be_read_is_a_miss_that_is_counted_and_removed() {
    for (fault, read_errors, damaged) in [(EIO, 1, 0), (Fault::Errno(13), 1, 0), (Fault::Ends, 0, 1)] {
        let mut rig = Rig::new(Kind::Workers, Sync::Batch);
        (0..3).for_each(|slot| rig.write(slot).unwrap());
        rig.data.fail(Call::Read, fault);
        assert!(rig.read(1).is_err());
        assert_eq!(rig.count(|it| &it.read_errors), read_errors);
        assert_eq!(rig.count(|it| &it.damaged), damaged);
        rig.data.heal();
        assert_eq!((rig.read(0), rig.read(2)), (Ok(()), Ok(())));
        assert_eq!(rig.read(1), Err(Failure::Damaged), "it was forgotten");
        let mut rig = rig.again();
        assert_eq!(rig.found, [0, 2]);
        assert_eq!((rig.write(1), rig.read(1)), (Ok(()), Ok(())));
    }
}

#[test]
fn a_block_that_cannot_be_written_is_refused_and_counted_and_others_are_written_after_it() {
    for (call, fault) in [(Call::Write, EIO), (Call::Write, ENOSPC), (Call::Reserve, ENOSPC)] {
        let mut rig = Rig::new(Kind::Workers, Sync::Batch);
        // The first write takes space for all slots.
        let written = if call == Call::Reserve { vec![2] } else { vec![0, 2] };
        for slot in 0..3 {
            if !written.contains(&slot) {
                rig.data.fail(call, fault);
            }
            assert_eq!(rig.write(slot).is_ok(), written.contains(&slot), "{call:?} {slot}");
            rig.data.heal();
        }
        rig.flush();
        let counted =
            [rig.count(|it| &it.write_errors), rig.count(|it| &it.written), rig.count(|it| &it.durable)];
        let there = written.len() as u64;
        assert_eq!(counted, [3 - there, there, there]);
        for slot in 0..3 {
            assert_eq!(rig.read(slot).is_ok(), written.contains(&slot), "{call:?} {slot}");
        }
        let mut rig = rig.again();
        assert_eq!(rig.found, written.iter().map(|&slot| u64::from(slot)).collect::<Vec<_>>());
        assert_eq!((rig.write(1), rig.read(1)), (Ok(()), Ok(())));
    }
}

#[test]
fn what_the_kernel_says_of_a_copy_is_its_end_and_the_ring_goes_on() {
    let mut rig = Rig::new(Kind::Ring, Sync::Batch);
    (0..2).for_each(|slot| rig.write(slot).unwrap());
    let full = std::fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
    rig.data.put_descriptor(full.into());
    assert_eq!(rig.write(2), Err(Failure::Io("No space left on device (os error 28)".into())));
    let directory = std::fs::File::open(rig.directory()).unwrap();
    rig.data.put_descriptor(directory.into());
    assert_eq!(rig.read(0), Err(Failure::Io("Is a directory (os error 21)".into())));
    rig.data.heal();
    assert_eq!((rig.count(|it| &it.write_errors), rig.count(|it| &it.read_errors)), (1, 1));
    assert_eq!((rig.read(1), rig.write(3), rig.read(3)), (Ok(()), Ok(()), Ok(())));
    assert_eq!(rig.again().found, [1, 3]);
}

#[test]
fn what_was_in_a_slot_is_gone_when_it_could_not_be_written_over() {
    let mut rig = Rig::new(Kind::Workers, Sync::Batch);
    rig.write(0).unwrap();
    rig.flush();
    rig.data.fail(Call::Write, EIO);
    assert!(is_io(&rig.write(0)));
    assert_eq!(rig.again().found, [0; 0]);
}

#[test]
fn a_direct_copy_that_the_system_refuses_goes_through_the_page_cache() {
    let mut rig = Rig::new(Kind::Workers, Sync::Batch);
    rig.data.refuse_direct();
    assert!(rig.store.is_direct());
    (0..20).for_each(|slot| rig.begin_write(slot)); // also those that are refused together
    (0..20).for_each(|_| assert_eq!(rig.end().1, Ok(())));
    assert!(!rig.store.is_direct() && rig.data.refused() > 0);
    rig.data.refuse_direct();
    assert_eq!(rig.read(0), Ok(()), "a read is what is refused first");
    (0..20).for_each(|slot| assert_eq!(rig.read(slot), Ok(())));
}

#[test]
fn a_copy_that_the_ring_is_refused_is_done_by_calls() {
    let mut rig = Rig::new(Kind::Ring, Sync::Batch);
    // Direct I/O of 5000 bytes is none: the kernel refuses it, where it does not do it all the same.
    let path = rig.directory().join("data");
    let direct = std::fs::OpenOptions::new().read(true).write(true).custom_flags(0o40000).open(path);
    let Ok(direct) = direct else { return eprintln!("skipped: no direct I/O here") };
    rig.data.put_descriptor(direct.into());
    (0..20).for_each(|slot| rig.begin_write(slot));
    (0..20).for_each(|_| assert_eq!(rig.end().1, Ok(())));
    (0..20).for_each(|slot| assert_eq!(rig.read(slot), Ok(())));
}

#[test]
fn a_slow_disk_holds_up_neither_who_asks_nor_who_stops_for_longer_than_was_said() {
    let mut rig = Rig::new(Kind::Workers, Sync::Batch);
    rig.data.fail(Call::Write, Fault::Hangs);
    let begun = Instant::now();
    (0..60).for_each(|slot| rig.begin_write(slot));
    rig.store.forget(63);
    assert!(begun.elapsed() < Duration::from_millis(250), "{:?}", begun.elapsed());
    rig.data.wait_for_hanging(3);
    assert_eq!(rig.store.writes(), 60);
    assert!(!rig.store.flush(Duration::from_millis(20)));
    let begun = Instant::now();
    rig.store.stop(Duration::from_millis(100));
    let took = begun.elapsed();
    assert!(took >= Duration::from_millis(100) && took < Duration::from_secs(2), "{took:?}");
    // What was not begun is given up; the three that the disk has end when it answers.
    (0..57).for_each(|_| assert_eq!(rig.end().1, Err(Failure::GivenUp)));
    assert!(rig.is_quiet());
    rig.data.heal();
    (0..3).for_each(|_| assert_eq!(rig.end().1, Ok(())));
    rig.flush();
    assert_eq!(rig.store.writes(), 0);
}

#[test]
fn blocks_are_read_while_the_disk_answers_no_write() {
    let mut rig = Rig::new(Kind::Workers, Sync::Batch);
    rig.write(0).unwrap();
    rig.data.fail(Call::Write, Fault::Hangs);
    (1..9).for_each(|slot| rig.begin_write(slot));
    rig.data.wait_for_hanging(3);
    (0..9).for_each(|_| assert_eq!(rig.read(0), Ok(())));
    rig.data.heal();
    (1..9).for_each(|_| assert_eq!(rig.end().1, Ok(())));
    assert_eq!((rig.read(8), rig.write(9)), (Ok(()), Ok(())));

    let mut rig = Rig::new(Kind::Ring, Sync::Batch);
    rig.write(0).unwrap();
    // A pipe that is full takes no write.
    let (reads, mut writes) = std::io::pipe().unwrap();
    writes.write_all(&vec![0; 1 << 16]).unwrap();
    rig.data.put_descriptor(writes.into());
    (1..9).for_each(|slot| rig.begin_write(slot));
    rig.data.wait_for_hanging(4);
    let _open = rig.data.take_descriptor();
    (0..9).for_each(|_| assert_eq!(rig.read(0), Ok(())));
    drop(reads);
    let ends: Vec<bool> = (1..9).map(|_| rig.end().1.is_ok()).collect();
    assert_eq!(ends.iter().filter(|&&end| end).count(), 4, "all that the pipe did not have");
}

#[test]
fn a_disk_that_takes_half_a_second_is_waited_for_by_a_flush() {
    let mut rig = Rig::new(Kind::Workers, Sync::Batch);
    rig.data.fail(Call::Write, Fault::Hangs);
    rig.begin_write(0);
    let data = rig.data.clone();
    let healer = std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(500));
        data.heal();
    });
    rig.flush();
    assert_eq!(rig.count(|it| &it.durable), 1);
    healer.join().unwrap();
    assert_eq!(rig.end().1, Ok(()));
}

#[test]
fn a_ring_is_stopped_while_the_disk_does_not_answer() {
    let mut rig = Rig::new(Kind::Ring, Sync::Batch);
    (0..6).for_each(|slot| rig.write(slot).unwrap());
    // A pipe that nobody writes to answers no read.
    let (reads, mut writes) = std::io::pipe().unwrap();
    rig.data.put_descriptor(OwnedFd::from(reads));
    (0..6).for_each(|slot| rig.begin_read(slot));
    let begun = Instant::now();
    rig.store.stop(Duration::from_millis(100));
    assert!(begun.elapsed() < Duration::from_secs(2), "{:?}", begun.elapsed());
    // The ring has four places.
    (0..2).for_each(|_| assert_eq!(rig.end().1, Err(Failure::GivenUp)));
    assert!(rig.is_quiet());
    // Each end is told of when the kernel has let go of the memory: here by an answer for another block.
    for _ in 0..4 {
        writes.write_all(&payload(99, LAYOUT.block_bytes)).unwrap();
    }
    (0..4).for_each(|_| assert_eq!(rig.end().1, Err(Failure::Damaged)));
}

#[test]
fn a_sync_that_never_ends_does_not_hold_up_a_stop() {
    let mut rig = Rig::with_a_sync_that(Fault::Hangs);
    let begun = Instant::now();
    rig.store.stop(Duration::from_millis(100));
    assert!(begun.elapsed() < Duration::from_secs(2), "{:?}", begun.elapsed());
    assert_eq!(rig.end().0, 1, "the one that is not being synced is given up");
    assert!(rig.is_quiet());
    rig.data.heal();
    assert_eq!(rig.end().1, Ok(()));
}

#[test]
fn a_write_that_ends_after_the_stop_is_given_up_where_it_had_to_be_durable() {
    let mut rig = Rig::new(Kind::Workers, Sync::Always);
    rig.data.fail(Call::Write, Fault::Hangs);
    rig.begin_write(0);
    rig.data.wait_for_hanging(1);
    rig.store.stop(Duration::from_millis(20));
    rig.data.heal();
    assert_eq!(rig.end().1, Err(Failure::GivenUp));
    assert_eq!(rig.count(|it| &it.undurable), 1);
}

#[test]
fn what_could_not_be_synced_is_served_but_not_called_durable() {
    for (data, entries) in [(Some(Call::Sync), None), (None, Some(Call::Sync)), (None, Some(Call::Write))] {
        for sync in [Sync::Batch, Sync::Always] {
            let mut rig = Rig::new(Kind::Workers, sync);
            if let Some(call) = data {
                rig.data.fail(call, EIO);
            }
            if let Some(call) = entries {
                rig.entries.fail(call, EIO);
            }
            assert_eq!(is_io(&rig.write(0)), sync == Sync::Always, "{data:?} {entries:?} {sync:?}");
            rig.flush();
            assert_eq!((rig.count(|it| &it.durable), rig.count(|it| &it.undurable)), (0, 1));
            assert_eq!(rig.read(0), Ok(()));
            rig.data.heal();
            rig.entries.heal();
            assert_eq!((rig.write(1), rig.read(1)), (Ok(()), Ok(())));
            rig.flush();
            assert_eq!((rig.count(|it| &it.durable), rig.count(|it| &it.undurable)), (1, 1));
            assert!(rig.again().found.contains(&1));
        }
    }
}

#[test]
fn a_write_that_ended_while_a_sync_failed_is_not_durable_by_the_next_one() {
    // The kernel tells of a page that it has lost once: the next sync of it succeeds.
    let mut rig = Rig::new(Kind::Workers, Sync::Batch);
    rig.data.fail(Call::Sync, Fault::HangsAndFails);
    rig.write(0).unwrap();
    rig.data.wait_for_hanging(1);
    rig.write(1).unwrap();
    rig.data.heal();
    rig.flush();
    assert_eq!((rig.count(|it| &it.durable), rig.count(|it| &it.undurable)), (0, 2));
    rig.write(2).unwrap();
    rig.flush();
    assert_eq!(rig.count(|it| &it.durable), 1);
    assert_eq!(rig.again().found, [2], "of what may be lost there are no entries");
}

#[test]
fn a_block_that_is_forgotten_before_its_commit_is_not_called_durable() {
    let mut rig = Rig::with_a_sync_that(Fault::Hangs);
    rig.store.forget(1);
    let (slot, end, _) = rig.end();
    assert_eq!((slot, end), (1, Err(Failure::GivenUp)));
    rig.data.heal();
    assert_eq!(rig.end().1, Ok(()));
    assert_eq!((rig.count(|it| &it.durable), rig.count(|it| &it.undurable)), (1, 1));
    assert_eq!(rig.again().found, [0]);
}

#[test]
fn a_write_that_is_forgotten_or_reset_while_it_is_on_its_way_is_given_up() {
    for sync in [Sync::Batch, Sync::Always] {
        for forget in [false, true] {
            let mut rig = Rig::new(Kind::Workers, sync);
            rig.data.fail(Call::Write, Fault::Hangs);
            (0..4).for_each(|slot| rig.begin_write(slot)); // two begun, two that wait
            rig.data.wait_for_hanging(2);
            if forget {
                (0..4).for_each(|slot| rig.store.forget(slot));
            } else {
                reset(&rig.store).unwrap();
            }
            rig.data.heal();
            (0..4).for_each(|_| assert_eq!(rig.end().1, Err(Failure::GivenUp)));
            rig.flush();
            assert_eq!(rig.count(|it| &it.durable), 0);
            assert_eq!(rig.read(0), Err(Failure::Damaged));
            assert_eq!(rig.again().found, [0; 0]);
        }
    }
}

#[test]
fn after_a_reset_no_block_is_read_that_was_written_before() {
    let mut rig = Rig::new(Kind::Workers, Sync::Batch);
    rig.write(0).unwrap();
    reset(&rig.store).unwrap();
    assert_eq!(rig.read(0), Err(Failure::Damaged));
    assert_eq!((rig.write(0), rig.read(0)), (Ok(()), Ok(())));
}

#[test]
fn a_reset_that_cannot_be_written_cuts_the_entries_and_later_blocks_are_durable_again() {
    for call in [Call::Write, Call::Sync] {
        let mut rig = Rig::new(Kind::Workers, Sync::Batch);
        rig.write(0).unwrap();
        rig.flush();
        rig.entries.fail(call, EIO);
        assert_eq!(reset(&rig.store).is_ok(), call == Call::Write, "without any sync nothing is sure");
        rig.write(1).unwrap();
        rig.flush();
        assert_eq!(rig.count(|it| &it.undurable), 1, "an entry without its epoch is none");
        rig.entries.heal();
        rig.write(2).unwrap();
        rig.flush();
        assert_eq!(rig.count(|it| &it.durable), 2);
        let found = rig.again().found.clone();
        assert!(found.contains(&2) && !found.contains(&0), "{found:?}");
    }
}

#[test]
fn a_reset_that_fails_altogether_says_so_and_still_holds_in_this_process() {
    let mut rig = Rig::new(Kind::Workers, Sync::Batch);
    rig.write(0).unwrap();
    rig.flush();
    rig.entries.fail(Call::Write, EIO);
    rig.entries.fail(Call::SetLen, EIO);
    assert!(reset(&rig.store).is_err());
    assert_eq!(rig.read(0), Err(Failure::Damaged));
    rig.entries.heal();
    rig.write(1).unwrap();
    assert_eq!(rig.again().found, [1], "with the next block the reset is written, too");
}

#[test]
fn a_reset_holds_at_once_and_ends_when_the_disk_has_it() {
    let mut rig = Rig::new(Kind::Workers, Sync::Batch);
    (0..2).for_each(|slot| rig.write(slot).unwrap());
    rig.flush();
    rig.entries.fail(Call::Sync, Fault::Hangs);
    let (sender, ends) = std::sync::mpsc::channel();
    rig.store.reset(Box::new(move |end| sender.send(end).unwrap()));
    assert_eq!(rig.read(0), Err(Failure::Damaged));
    rig.write(2).unwrap();
    assert!(ends.try_recv().is_err());
    let begun = Instant::now();
    rig.store.stop(Duration::from_millis(100));
    assert!(begun.elapsed() < Duration::from_secs(2), "{:?}", begun.elapsed());
    rig.entries.heal();
    assert_eq!(ends.recv_timeout(LONG), Ok(Ok(())));
    assert_eq!(rig.again().found, [2]);
}

#[test]
fn one_damaged_record_of_the_epoch_brings_nothing_back() {
    for record in [0, 512] {
        let mut rig = Rig::new(Kind::Workers, Sync::Batch);
        rig.write(0).unwrap();
        rig.flush();
        reset(&rig.store).unwrap();
        let path = rig.directory().join("entries");
        let mut bytes = std::fs::read(&path).unwrap();
        bytes[record + 9] ^= 4;
        std::fs::write(path, bytes).unwrap();
        assert_eq!(rig.again().found, [0; 0]);
    }
}

#[test]
fn panics_of_a_file_or_of_who_is_told_end_one_copy_only() {
    for sync in [Sync::Batch, Sync::Always] {
        for kind in [Kind::Workers, Kind::Ring] {
            let mut rig = Rig::new(kind, sync);
            if kind == Kind::Workers {
                rig.data.fail(Call::Write, Fault::Panics);
                (0..4).for_each(|slot| assert_eq!(rig.write(slot), Err(Failure::GivenUp)));
                rig.data.heal();
            }
            let slots = 4..8;
            slots.clone().for_each(|slot| rig.begin_write_and_panic(slot));
            slots.clone().for_each(|_| assert_eq!(rig.end().1, Ok(())));
            rig.flush();
            slots.for_each(|slot| assert_eq!(rig.read(slot), Ok(())));
            assert_eq!(rig.count(|it| &it.durable), 4);
        }
    }
}

#[test]
fn a_store_that_is_stopped_in_any_moment_tells_of_every_copy_once() {
    for kind in [Kind::Workers, Kind::Ring] {
        for sync in [Sync::Batch, Sync::Always] {
            for pause in 0..20 {
                let mut rig = Rig::new(kind, sync);
                (0..32).for_each(|slot| rig.begin_write(slot));
                std::thread::sleep(Duration::from_micros(100 * pause));
                rig.store.stop(if pause % 2 == 0 { Duration::ZERO } else { LONG });
                (32..40).for_each(|slot| rig.begin_write(slot));
                for _ in 0..40 {
                    let (_, end, _) = rig.end();
                    assert!(matches!(end, Ok(()) | Err(Failure::GivenUp)), "{end:?}");
                }
                assert!(rig.is_quiet());
            }
        }
    }
}
