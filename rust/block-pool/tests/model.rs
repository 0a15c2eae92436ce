//! Any order of calls, compared with a plain list of pages after each.

mod plain;

use block_pool::{Pool, Priority};
use plain::{Model, any_call, any_policy};
use proptest::prelude::*;

const PAGES: u32 = 9;

proptest! {
    #[test]
    fn any_order_of_calls_leaves_what_a_plain_list_says(
        policy in any_policy(),
        calls in prop::collection::vec(any_call(), 1..160),
    ) {
        let mut pool = Pool::new(PAGES, policy, Priority::DEFAULT);
        let mut model = Model::new(PAGES, policy, std::rc::Rc::default());
        for call in &calls {
            model.call(&mut pool, call);
            model.compare(&pool);
        }
    }
}
