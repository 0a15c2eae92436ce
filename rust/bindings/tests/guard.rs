//! A panic inside a call, seen from outside. The extension cannot be linked into a test; this part of it
//! knows nothing of Python.

#[path = "../src/guard.rs"]
mod guard;

use guard::{Fault, Guarded};

/// Books of two columns: they are in order when the columns are equal.
type Books = (u64, u64);

fn is_sound(books: &Books) -> bool {
    books.0 == books.1
}

fn panic_fault(text: &str, sound: bool) -> Fault {
    Fault::Panic { text: text.into(), sound }
}

/// Books that a panic left in disorder.
fn broken() -> Guarded<Books> {
    let mut books = Guarded::new((1, 1));
    let fault = books.run(is_sound, |books| {
        books.0 += 1;
        panic!("between the columns")
    });
    assert_eq!(fault, Err::<(), _>(panic_fault("between the columns", false)));
    books
}

#[test]
fn a_call_gives_its_result() {
    let mut books = Guarded::new((1, 1));
    let sum = books.run(is_sound, |books| {
        *books = (3, 3);
        books.0 + books.1
    });
    assert_eq!(sum, Ok(6));
    assert!(!books.is_broken());
}

#[test]
fn books_are_not_checked_after_a_call_that_returns() {
    let mut books = Guarded::new((1, 1));
    assert_eq!(books.run(|_| panic!("nobody asked"), |_| 7), Ok(7));
}

#[test]
fn after_a_panic_that_leaves_order_calls_go_on() {
    let mut books = Guarded::new((1, 1));
    let fault = books.run(is_sound, |_| panic!("before the first column"));
    assert_eq!(fault, Err::<(), _>(panic_fault("before the first column", true)));
    assert!(!books.is_broken());
    assert_eq!(books.run(is_sound, |books| books.0), Ok(1));
}

#[test]
fn after_a_panic_that_leaves_disorder_no_call_is_made() {
    let mut books = broken();
    assert!(books.is_broken());
    let mut made = false;
    assert_eq!(books.run(is_sound, |_| made = true), Err(Fault::Broken));
    assert!(!made);
}

#[test]
fn what_must_answer_in_any_state_answers() {
    assert_eq!(broken().run_even_if_broken(is_sound, |books| *books), Ok((2, 1)));
}

#[test]
fn disorder_does_not_heal() {
    let mut books = broken();
    let fault = books.run_even_if_broken(is_sound, |books| {
        books.1 = books.0;
        panic!("once more")
    });
    assert_eq!(fault, Err::<(), _>(panic_fault("once more", false)));
    assert_eq!(books.run(is_sound, |_| ()), Err(Fault::Broken));
}

#[test]
fn a_check_that_panics_has_found_disorder() {
    let mut books = Guarded::new((1, 1));
    let fault = books.run(|_| panic!("index out of bounds"), |_| panic!("first"));
    assert_eq!(fault, Err::<(), _>(panic_fault("first", false)));
    assert!(books.is_broken());
}

#[test]
fn a_panic_says_its_text_formatted_or_not() {
    let page = 7;
    let mut books = Guarded::new((1, 1));
    let fault = books.run(is_sound, |_| panic!("page {page}"));
    assert_eq!(fault, Err::<(), _>(panic_fault("page 7", true)));
    let fault = books.run(is_sound, |_| std::panic::panic_any(page));
    assert_eq!(fault, Err::<(), _>(panic_fault("panic", true)));
}
