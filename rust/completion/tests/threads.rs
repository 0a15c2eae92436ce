//! Many copies between many threads at once, also under `ThreadSanitizer` (`make test-threads`).

use completion::{Outcome, pending};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

const COPIES: usize = 500;

#[test]
fn of_thousands_of_racing_ends_each_copy_has_one_and_all_waiters_hear_it() {
    for copy in 0..COPIES {
        let (completer, completion) = pending();
        let bytes = AtomicUsize::new(0);
        let ended: Vec<Outcome> = thread::scope(|scope| {
            let waiters = [(); 2].map(|()| scope.spawn(|| completion.wait(None)));
            let poller = scope.spawn(|| {
                while !completion.is_complete() {
                    thread::yield_now();
                }
                // Written before the copy ended, by whichever thread ended it.
                assert_ne!(bytes.load(Ordering::Relaxed), 0);
                completion.outcome()
            });
            let ends = [
                scope.spawn(|| {
                    bytes.store(1, Ordering::Relaxed);
                    completer.finish()
                }),
                scope.spawn(|| {
                    bytes.store(2, Ordering::Relaxed);
                    completer.fail(format!("copy {copy}"))
                }),
            ];
            completion.cancel();
            let [finished, failed] = ends.map(|end| end.join().unwrap());
            assert_ne!(finished, failed);
            let expected = if finished { Outcome::Done } else { Outcome::Failed(format!("copy {copy}")) };
            assert_eq!(completion.outcome(), Some(expected));
            waiters.into_iter().chain([poller]).map(|seen| seen.join().unwrap().unwrap()).collect()
        });
        assert!(ended.iter().all(|outcome| Some(outcome) == completion.outcome().as_ref()));
    }
}
