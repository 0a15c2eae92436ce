//! Sets of units: a bit each.

use crate::job::UnitId;

/// A set of units.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub struct UnitSet {
    /// As far as the last unit that was ever in it.
    words: Vec<u64>,
}

impl UnitSet {
    /// Puts a unit in.
    pub fn insert(&mut self, unit: UnitId) {
        let (word, bit) = place(unit);
        if word >= self.words.len() {
            self.words.resize(word + 1, 0);
        }
        self.words[word] |= bit;
    }

    /// Takes a unit out.
    pub fn remove(&mut self, unit: UnitId) {
        let (word, bit) = place(unit);
        if let Some(word) = self.words.get_mut(word) {
            *word &= !bit;
        }
    }

    /// Whether a unit is in it.
    pub fn contains(&self, unit: UnitId) -> bool {
        let (word, bit) = place(unit);
        self.words.get(word).is_some_and(|word| word & bit != 0)
    }

    /// Leaves what `other` has too.
    pub fn intersect(&mut self, other: &UnitSet) {
        self.words.truncate(other.words.len());
        for (word, other) in self.words.iter_mut().zip(&other.words) {
            *word &= other;
        }
    }

    /// Puts in the units of `words`, the first of which begins with unit `first`, a multiple of 64.
    pub(crate) fn insert_words(&mut self, first: u32, words: &[u64]) {
        let first = (first / u64::BITS) as usize;
        self.words.resize(self.words.len().max(first + words.len()), 0);
        for (word, more) in self.words[first..].iter_mut().zip(words) {
            *word |= more;
        }
    }

    /// The units, 64 a word, the lowest bit first.
    pub(crate) fn words(&self) -> &[u64] {
        &self.words
    }

    /// The units, in order.
    pub fn iter(&self) -> impl Iterator<Item = UnitId> + '_ {
        let units = |(word, &bits): (usize, &u64)| {
            (0..u64::BITS)
                .filter(move |bit| bits >> bit & 1 == 1)
                .map(move |bit| word as u32 * u64::BITS + bit)
        };
        self.words.iter().enumerate().flat_map(units).map(UnitId)
    }
}

impl FromIterator<UnitId> for UnitSet {
    fn from_iter<I: IntoIterator<Item = UnitId>>(units: I) -> UnitSet {
        let mut set = UnitSet::default();
        units.into_iter().for_each(|unit| set.insert(unit));
        set
    }
}

fn place(unit: UnitId) -> (usize, u64) {
    ((unit.0 / u64::BITS) as usize, 1 << (unit.0 % u64::BITS))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    fn set(units: &BTreeSet<u32>) -> UnitSet {
        units.iter().copied().map(UnitId).collect()
    }

    proptest! {
        #[test]
        fn it_is_a_set(
            one in prop::collection::btree_set(0u32..300, 0..40),
            other in prop::collection::btree_set(0u32..300, 0..40),
        ) {
            let mut common = set(&one);
            common.intersect(&set(&other));
            let expected: Vec<UnitId> = one.intersection(&other).copied().map(UnitId).collect();
            prop_assert_eq!(common.iter().collect::<Vec<_>>(), expected);
            let mut rest = set(&one);
            for &unit in &other {
                rest.remove(UnitId(unit));
            }
            for unit in 0..400 {
                prop_assert_eq!(rest.contains(UnitId(unit)), one.contains(&unit) && !other.contains(&unit));
            }
        }
    }
}
