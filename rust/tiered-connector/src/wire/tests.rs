use super::*;
use proptest::prelude::*;

fn outcome() -> impl Strategy<Value = Outcome> {
    prop_oneof![Just(Outcome::Done), Just(Outcome::Cancelled), ".{0,60}".prop_map(Outcome::Failed)]
}

fn job() -> impl Strategy<Value = Job> {
    let blocks = prop::collection::vec((any::<u32>(), any::<u32>()), 0..50);
    (any::<u64>(), any::<u32>(), any::<bool>(), blocks).prop_map(|(id, after, load, blocks)| Job {
        id: JobId(id),
        direction: if load { Direction::Load } else { Direction::Store },
        units: blocks.iter().map(|&(unit, _)| UnitId(unit)).collect(),
        pages: blocks.iter().map(|&(_, page)| PageId(page)).collect(),
        after: Step(after),
    })
}

fn message() -> impl Strategy<Value = Message> {
    let hello = (any::<[u32; 3]>(), any::<u64>()).prop_map(|([shard, units, pages], unit_bytes)| {
        Message::Hello(VERSION, Hello { shard, units, unit_bytes, pages })
    });
    let inventory = (any::<u32>(), prop::collection::vec(any::<u64>(), 0..50))
        .prop_map(|(first, words)| Message::Inventory { first: first / 64 * 64, words });
    prop_oneof![
        hello,
        inventory,
        Just(Message::Ready),
        job().prop_map(Message::Job),
        any::<u64>().prop_map(|id| Message::Cancel(JobId(id))),
        (any::<u64>(), outcome()).prop_map(|(id, outcome)| Message::Ended(JobId(id), outcome)),
        any::<u64>().prop_map(|until| Message::Ping { until }),
        Just(Message::Pong),
        Just(Message::Shutdown),
    ]
}

fn encoded(message: &Message) -> Vec<u8> {
    let mut bytes = Vec::new();
    message.encode(&mut bytes);
    bytes
}

proptest! {
    #[test]
    fn messages_come_out_as_they_went_in(messages in prop::collection::vec(message(), 1..5)) {
        let mut bytes: Vec<u8> = messages.iter().flat_map(encoded).collect();
        for message in messages {
            let (first, length) = Message::first(&bytes).unwrap().unwrap();
            prop_assert_eq!(first, message);
            bytes.drain(..length);
        }
        prop_assert_eq!(Message::first(&bytes), Ok(None));
    }

    #[test]
    fn of_a_frame_that_is_not_all_there_nothing_is_told(message in message(), cut in any::<prop::sample::Index>()) {
        let bytes = encoded(&message);
        prop_assert_eq!(Message::first(&bytes[..cut.index(bytes.len())]), Ok(None));
    }

    /// What a decoder takes of a frame that somebody changed is another message, written as it was read.
    #[test]
    fn a_changed_frame_is_refused_or_is_another_message(
        message in message(),
        at in any::<prop::sample::Index>(),
        byte in any::<u8>(),
    ) {
        let mut frame = encoded(&message).split_off(4);
        let at = at.index(frame.len());
        frame[at] = byte;
        if let Ok(changed) = Message::decode(&frame) {
            let of_another_version = matches!(changed, Message::Hello(version, _) if version != VERSION);
            prop_assert!(of_another_version || encoded(&changed)[4..] == frame);
        }
    }

    #[test]
    fn garbage_is_refused_or_is_a_message(garbage in prop::collection::vec(any::<u8>(), 0..200)) {
        if let Ok(message) = Message::decode(&garbage) {
            let of_another_version = matches!(message, Message::Hello(version, _) if version != VERSION);
            prop_assert!(of_another_version || encoded(&message)[4..] == garbage);
        }
        if let Ok(Some((_, length))) = Message::first(&garbage) {
            prop_assert!(length <= garbage.len());
        }
    }
}

#[test]
fn lengths_are_bounded_before_anything_is_kept() {
    assert_eq!(Message::first(&0u32.to_le_bytes()), Err(WireError::Length(0)));
    assert_eq!(Message::first(&u32::MAX.to_le_bytes()), Err(WireError::Length(u32::MAX as usize)));
    let longest = Job {
        id: JobId(u64::MAX),
        direction: Direction::Load,
        units: vec![UnitId(1); JOB_BLOCKS],
        pages: vec![PageId(2); JOB_BLOCKS],
        after: Step(3),
    };
    let (first, _) = Message::first(&encoded(&Message::Job(longest.clone()))).unwrap().unwrap();
    assert_eq!(first, Message::Job(longest));
    // Kind 2, an inventory of one word too many.
    let mut frame = vec![2, 0, 0, 0, 0];
    frame.resize(5 + 8 * (INVENTORY_WORDS + 1), 0);
    assert_eq!(Message::decode(&frame), Err(WireError::Fields(2)));
}

#[test]
fn a_long_reason_is_cut_between_characters() {
    let message = Message::Ended(JobId(1), Outcome::Failed("é".repeat(MOST_WHY)));
    let Ok(Some((Message::Ended(_, Outcome::Failed(why)), _))) = Message::first(&encoded(&message)) else {
        panic!("it is a message")
    };
    assert_eq!(why, "é".repeat(MOST_WHY / 2));
}

#[test]
fn a_frame_is_its_length_its_kind_and_little_endian_fields() {
    let cancel = encoded(&Message::Cancel(JobId(0x0102)));
    assert_eq!(cancel, [9, 0, 0, 0, 5, 2, 1, 0, 0, 0, 0, 0, 0]);
    assert_eq!(Message::decode(&[77]), Err(WireError::Kind(77)));
    assert_eq!(Message::decode(&[1, b'H', b'T', b'T', b'P']), Err(WireError::Magic));
    assert_eq!(Message::decode(&[3, 0]), Err(WireError::Fields(3)));
}
