//! What leads on from a fork, by the next token.

use crate::node::NodeId;
use block_hash::Token;
use std::collections::BTreeMap;
use std::ops::Bound;

/// The next token; the end of a node's tokens is before all of them.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) struct Next(i64);

impl Next {
    pub(crate) const END: Next = Next(i64::MIN);

    /// What is at `at` in `tokens`.
    #[inline]
    pub(crate) fn of(tokens: &[Token], at: usize) -> Next {
        tokens.get(at).map_or(Next::END, |&token| Next(i64::from(token)))
    }

    /// The token; there is one.
    pub(crate) fn token(self) -> Token {
        self.0 as Token
    }
}

/// A node, or another fork, in four bytes: forks have the upper bit.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct Link(u32);

/// What a [`Link`] is to.
pub(crate) enum Target {
    Node(NodeId),
    /// The number of a fork.
    Fork(usize),
}

impl Link {
    const FORK: u32 = 1 << 31;

    pub(crate) fn to_node(node: NodeId) -> Link {
        Link(node.0)
    }

    pub(crate) fn to_fork(number: usize) -> Link {
        Link(number as u32 | Self::FORK)
    }

    #[inline]
    pub(crate) fn target(self) -> Target {
        if self.0 & Self::FORK == 0 {
            Target::Node(NodeId(self.0))
        } else {
            Target::Fork((self.0 & !Self::FORK) as usize)
        }
    }
}

/// Two branches or more, in the order of [`Next`]. Two are most forks', and need no memory of their own.
pub(crate) enum Branches {
    Two([(Next, Link); 2]),
    More(BTreeMap<Next, Link>),
}

impl Branches {
    pub(crate) fn new(one: (Next, Link), other: (Next, Link)) -> Branches {
        debug_assert_ne!(one.0, other.0, "siblings differ in their tokens");
        Branches::Two(if one.0 < other.0 { [one, other] } else { [other, one] })
    }

    #[inline]
    pub(crate) fn get(&self, next: Next) -> Option<Link> {
        match self {
            Branches::Two(two) => two.iter().find(|branch| branch.0 == next).map(|&(_, link)| link),
            Branches::More(more) => more.get(&next).copied(),
        }
    }

    /// The first branch after that of `next`; of all for `None`.
    pub(crate) fn after(&self, next: Option<Next>) -> Option<(Next, Link)> {
        let is_after = |branch: &&(Next, Link)| next.is_none_or(|next| branch.0 > next);
        let start = next.map_or(Bound::Unbounded, Bound::Excluded);
        match self {
            Branches::Two(two) => two.iter().find(is_after).copied(),
            Branches::More(more) => {
                more.range((start, Bound::Unbounded)).next().map(|(&next, &link)| (next, link))
            }
        }
    }

    /// `next` leads to `link` from now on.
    pub(crate) fn set(&mut self, next: Next, link: Link) {
        match self {
            Branches::Two(two) => match two.iter_mut().find(|branch| branch.0 == next) {
                Some(branch) => branch.1 = link,
                None => *self = Branches::More(two.iter().copied().chain([(next, link)]).collect()),
            },
            Branches::More(more) => _ = more.insert(next, link),
        }
    }

    /// `next` leads nowhere from now on. The other branch, where there is but one.
    pub(crate) fn remove(&mut self, next: Next) -> Option<(Next, Link)> {
        match self {
            Branches::Two(two) => two.iter().find(|branch| branch.0 != next).copied(),
            Branches::More(more) => {
                more.remove(&next);
                let mut left = more.iter().map(|(&next, &link)| (next, link));
                if let (Some(one), Some(other), None) = (left.next(), left.next(), left.next()) {
                    *self = Branches::new(one, other);
                }
                None
            }
        }
    }
}
