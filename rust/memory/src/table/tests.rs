//! Keys that somebody chose do not crowd the table, whatever its secret is.

use super::{Entry, KeyTable};

const COUNT: u64 = 1 << 15;
/// 2⁶⁴ over the golden ratio: what tables without a secret multiply by.
const GOLDEN: u64 = 0x9E37_79B9_7F4A_7C15;
/// `GOLDEN` times this is 1.
const GOLDEN_INVERSE: u64 = 0xF1DE_83E1_9937_733D;

/// What keys have in common, and the key with each number.
type Pattern = (&'static str, fn(u64) -> u64);

/// Entries looked at to find each of [`COUNT`] keys once, in a table that is half full.
fn probes(secret: [u64; 2], keys: impl Iterator<Item = u64> + Clone) -> usize {
    let mut table = KeyTable { secret, ..KeyTable::with_capacity(COUNT as usize) };
    let keys = keys.take(COUNT as usize);
    for (number, key) in (0..).zip(keys.clone()) {
        table.insert(key, number);
    }
    let mask = table.entries.len() - 1;
    let looked_at = (0..).zip(keys).map(|(number, key)| {
        let home = table.home(table.tag(key));
        let away =
            (0..=mask).find(|away| Entry(table.entries[(home + away) & mask]).number() == Some(number));
        1 + away.expect("the key is in the table")
    });
    looked_at.sum()
}

/// Words as by chance (`SplitMix64`), for secrets and for keys that nobody chose.
fn random(seed: u64) -> impl Iterator<Item = u64> + Clone {
    (1..).map(move |i: u64| {
        let mut word = seed.wrapping_add(i.wrapping_mul(GOLDEN));
        word = (word ^ (word >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        word = (word ^ (word >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        word ^ (word >> 31)
    })
}

#[test]
fn chosen_keys_take_less_than_twice_the_probes_of_random_ones() {
    let chosen: [Pattern; 8] = [
        ("equal in the upper half", |i| 0xABCD_EF01 << 32 | i),
        ("equal in the lower half", |i| i << 32 | 0xABCD_EF01),
        ("multiples of 2²⁰", |i| i << 20),
        ("multiples of 2⁴⁸", |i| i << 48),
        ("both halves alike", |i| i << 32 | i),
        ("halves that cancel out in a sum", |i| (i << 32) | ((1 << 32) - i)),
        ("equal in the upper half once multiplied", |i| i.wrapping_mul(GOLDEN_INVERSE)),
        ("equal in the lower half once multiplied", |i| (i << 32).wrapping_mul(GOLDEN_INVERSE)),
    ];
    assert_eq!(GOLDEN.wrapping_mul(GOLDEN_INVERSE), 1);
    let mut secrets = random(1);
    for _ in 0..16 {
        let secret = [secrets.next().unwrap(), secrets.next().unwrap() | 1];
        let fair = probes(secret, random(2));
        let due = COUNT as usize * 3 / 2;
        assert!(fair.abs_diff(due) < due / 10, "random keys take {fair} probes, {due} are due at half load");
        for (how, key) in chosen {
            let flood = probes(secret, (1..).map(key));
            assert!(flood < 2 * fair, "{how}: {flood} probes, {fair} for random keys, secret {secret:x?}");
        }
    }
}

#[test]
fn keys_that_crowd_a_table_do_not_crowd_one_with_another_secret() {
    let mut secrets = random(3);
    let [known, other] = [(); 2].map(|()| [secrets.next().unwrap(), secrets.next().unwrap() | 1]);
    let table = KeyTable { secret: known, ..KeyTable::with_capacity(COUNT as usize) };
    // Of 65,536 keys, those whose home is in the first 1,024th of a table that leaked its secret: about 64.
    let crowd: Vec<u64> =
        random(4).take(1 << 16).filter(|&key| table.home(table.tag(key)) < (1 << 16) / 1024).collect();
    assert!((32..128).contains(&crowd.len()), "{} keys", crowd.len());
    let table = KeyTable { secret: other, ..table };
    let again = crowd.iter().filter(|&&key| table.home(table.tag(key)) < (1 << 16) / 1024).count();
    assert!(again < 4, "{again} of {} keys are crowded again", crowd.len());
}

#[test]
fn two_tables_have_two_secrets() {
    let [first, second] = [(); 2].map(|()| KeyTable::with_capacity(1).secret);
    assert!(first[0] != second[0] && first[1] != second[1], "{first:x?} and {second:x?}");
}
