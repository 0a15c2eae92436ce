//! How far a request comes that is alone in a shared slab.

use crate::Group;
use crate::config::LedgerConfig;
use crate::groups::{GroupKind, Snapshots};

#[test]
fn a_request_alone_is_as_long_as_its_fullest_forward_leaves_room_for() {
    // Pages of three tokens, in 15 huge pages: 2 of a window, 1 state or 2 that are full. Of 19 blocks the full
    // group takes 10 huge pages and states take 3; the forward of tokens 53 and 54 has the block of the sinks
    // and four more, in 3 huge pages, though that of the last token has one less.
    let snapshots = Snapshots { interval: 15, last: true };
    let window = GroupKind::Window { window: 7, sinks: 3 };
    let groups = vec![
        Group { kind: window, pages: 2 },
        Group { kind: GroupKind::Recurrent(snapshots), pages: 1 },
        Group { kind: GroupKind::Full, pages: 2 },
    ];
    let config = LedgerConfig { groups, huge_pages: Some(15), ..LedgerConfig::new(3, 0) };
    let capacity = config.pools().unwrap().capacity();
    assert_eq!(config.most_blocks_alone(&capacity), 18);
}
