//! Siblings by their tokens: those below one parent, with equal extra keys, as a trie.
//!
//! A fork is where tokens that ran along together part; what they share up to there is its label, and each
//! next token leads on by a branch of its own. So the way along a probe costs what its tokens and their
//! places among the branches cost, however many siblings there are. Where siblings part depends on their
//! tokens alone, not on the order in which they came.

use crate::extra_keys::ExtraId;
use crate::node::{NodeId, PackedParent};
use block_hash::Token;
use std::collections::btree_map::{self, BTreeMap};
use std::collections::hash_map::{self, HashMap};
use std::mem;

/// Siblings that a trie is of.
pub(crate) type Siblings = (PackedParent, ExtraId);

/// The tries of all parents; none has two nodes of equal tokens.
#[derive(Default)]
pub(crate) struct Forks {
    tops: HashMap<Siblings, Branch>,
}

enum Branch {
    Node(NodeId),
    Fork(Box<Fork>),
}

struct Fork {
    /// The tokens between the branch that leads here and where its tokens part.
    label: Vec<Token>,
    /// At least two, by the next token.
    branches: BTreeMap<Next, Branch>,
}

/// The next token; the end of a node's tokens is before all of them.
type Next = i64;
const END: Next = Next::MIN;

fn next(tokens: &[Token], at: usize) -> Next {
    tokens.get(at).map_or(END, |&token| Next::from(token))
}

/// How many tokens are equal from the start on.
pub(crate) fn common(one: &[Token], other: &[Token]) -> usize {
    one.iter().zip(other).take_while(|(one, other)| one == other).count()
}

/// Where two that differ part: the tokens in common, and what is next of each.
fn part(one: &[Token], other: &[Token]) -> (Vec<Token>, Next, Next) {
    let along = common(one, other);
    let (one, next_of_other) = (next(one, along), next(other, along));
    debug_assert_ne!(one, next_of_other, "siblings differ in their tokens");
    (other[..along].to_vec(), one, next_of_other)
}

impl Forks {
    /// Adds a node. `tokens_of` gives the tokens of the nodes here, and its own.
    pub(crate) fn insert<'a>(
        &mut self,
        siblings: Siblings,
        node: NodeId,
        tokens_of: impl Fn(NodeId) -> &'a [Token],
    ) {
        let mut branch = match self.tops.entry(siblings) {
            hash_map::Entry::Vacant(top) => {
                top.insert(Branch::Node(node));
                return;
            }
            hash_map::Entry::Occupied(top) => top.into_mut(),
        };
        let tokens = tokens_of(node);
        let mut at = 0;
        loop {
            match branch {
                Branch::Node(other) => {
                    let other = *other;
                    let (label, theirs, ours) = part(&tokens_of(other)[at..], &tokens[at..]);
                    let branches = [(theirs, Branch::Node(other)), (ours, Branch::Node(node))];
                    *branch = Branch::Fork(Box::new(Fork { label, branches: BTreeMap::from(branches) }));
                    return;
                }
                Branch::Fork(fork) => {
                    let along = common(&fork.label, &tokens[at..]);
                    if along < fork.label.len() {
                        let (label, theirs, ours) = part(&fork.label, &tokens[at..]);
                        let below = Fork {
                            label: fork.label.split_off(along + 1),
                            branches: mem::take(&mut fork.branches),
                        };
                        let branches = [(theirs, Branch::Fork(Box::new(below))), (ours, Branch::Node(node))];
                        (fork.label, fork.branches) = (label, BTreeMap::from(branches));
                        return;
                    }
                    at += along;
                    branch = match fork.branches.entry(next(tokens, at)) {
                        btree_map::Entry::Occupied(below) => below.into_mut(),
                        btree_map::Entry::Vacant(place) => {
                            place.insert(Branch::Node(node));
                            return;
                        }
                    };
                    at += 1;
                }
            }
        }
    }

    /// Takes out a node that is here, with these tokens.
    ///
    /// # Panics
    /// If it is not.
    pub(crate) fn remove(&mut self, siblings: Siblings, tokens: &[Token]) {
        let mut branch = self.tops.get_mut(&siblings).expect("a node that is taken out is there");
        let mut at = 0;
        while let Branch::Fork(fork) = &*branch {
            at += fork.label.len();
            let next = next(tokens, at);
            at += 1;
            if let Some(Branch::Node(_)) = fork.branches.get(&next) {
                branch.lose(next);
                return;
            }
            branch = branch.below(next).expect("a node that is taken out is below its forks");
        }
        self.tops.remove(&siblings);
    }

    /// The nodes whose tokens begin as these do, and how many tokens they share: those that share most first,
    /// equal ones in the order of their tokens. Those that share none come last.
    pub(crate) fn nearest<'a>(
        &'a self,
        siblings: Siblings,
        tokens: &[Token],
        tokens_of: impl Fn(NodeId) -> &'a [Token],
    ) -> Nearest<'a> {
        let mut forks = Vec::new();
        let first = self.follow(siblings, tokens, |fork, run, is_whole| {
            let taken = is_whole.then(|| next(tokens, run));
            forks.push(Level { run, branches: fork.branches.iter(), taken });
        });
        let first = first.map(|(node, at)| (node, at + common(&tokens_of(node)[at..], &tokens[at..])));
        Nearest { first, forks }
    }

    /// The tail all of whose tokens these begin with: of several the longest.
    pub(crate) fn longest_tail<'a>(
        &'a self,
        siblings: Siblings,
        tokens: &[Token],
        is_tail: impl Fn(NodeId) -> bool,
        tokens_of: impl Fn(NodeId) -> &'a [Token],
    ) -> Option<NodeId> {
        let mut ended = None;
        let last = self.follow(siblings, tokens, |fork, _, is_whole| {
            if let (true, Some(Branch::Node(node))) = (is_whole, fork.branches.get(&END)) {
                ended = Some(*node);
            }
        });
        let last =
            last.filter(|&(node, at)| is_tail(node) && tokens[at..].starts_with(&tokens_of(node)[at..]));
        last.map(|(node, _)| node).or(ended)
    }

    /// Every node here.
    pub(crate) fn iter(&self) -> impl Iterator<Item = NodeId> + '_ {
        self.tops.values().flat_map(|top| {
            let (first, forks) = match top {
                Branch::Node(node) => (Some((*node, 0)), vec![]),
                Branch::Fork(fork) => (None, vec![Level::all(fork, 0)]),
            };
            Nearest { first, forks }.map(|(node, _)| node)
        })
    }

    /// Where `tokens` lead: the forks on the way, each with the number of tokens in common and whether its
    /// whole label is among them; and the node at the end, with the number that is sure to be in common.
    fn follow<'a>(
        &'a self,
        siblings: Siblings,
        tokens: &[Token],
        mut visit: impl FnMut(&'a Fork, usize, bool),
    ) -> Option<(NodeId, usize)> {
        let mut branch = self.tops.get(&siblings)?;
        let mut run = 0;
        loop {
            let fork = match branch {
                Branch::Node(node) => return Some((*node, run)),
                Branch::Fork(fork) => fork,
            };
            let along = common(&fork.label, &tokens[run..]);
            run += along;
            let is_whole = along == fork.label.len();
            visit(fork, run, is_whole);
            if !is_whole {
                return None;
            }
            branch = fork.branches.get(&next(tokens, run))?;
            run = tokens.len().min(run + 1);
        }
    }
}

impl Branch {
    fn below(&mut self, next: Next) -> Option<&mut Branch> {
        match self {
            Branch::Node(_) => None,
            Branch::Fork(fork) => fork.branches.get_mut(&next),
        }
    }

    /// Drops a branch of a fork. Where only one other is left, there is no fork any more.
    fn lose(&mut self, next: Next) {
        let Branch::Fork(fork) = self else { return };
        fork.branches.remove(&next);
        if fork.branches.len() > 1 {
            return;
        }
        match fork.branches.pop_first() {
            Some((next, Branch::Fork(mut below))) => {
                fork.label.push(next as Token); // an end leads to no fork
                fork.label.append(&mut below.label);
                fork.branches = mem::take(&mut below.branches);
            }
            Some((_, last)) => *self = last,
            None => {}
        }
    }
}

impl Drop for Fork {
    /// Not one inside the other: there may be as many as a page has tokens.
    fn drop(&mut self) {
        let forks = |fork: &mut Fork| {
            let branches = mem::take(&mut fork.branches).into_values();
            branches.filter(|branch| matches!(branch, Branch::Fork(_)))
        };
        let mut below: Vec<Branch> = forks(self).collect();
        while let Some(branch) = below.pop() {
            if let Branch::Fork(mut fork) = branch {
                below.extend(forks(&mut fork));
            }
        }
    }
}

/// See [`Forks::nearest`].
pub(crate) struct Nearest<'a> {
    first: Option<(NodeId, usize)>,
    /// The last is the next.
    forks: Vec<Level<'a>>,
}

/// The branches of a fork that are still to come; what is below them shares `run` tokens, unless it is below
/// the one that was `taken`.
struct Level<'a> {
    run: usize,
    branches: btree_map::Iter<'a, Next, Branch>,
    taken: Option<Next>,
}

impl<'a> Level<'a> {
    fn all(fork: &'a Fork, run: usize) -> Level<'a> {
        Level { run, branches: fork.branches.iter(), taken: None }
    }
}

impl Iterator for Nearest<'_> {
    type Item = (NodeId, usize);

    fn next(&mut self) -> Option<(NodeId, usize)> {
        if let Some(first) = self.first.take() {
            return Some(first);
        }
        while let Some(level) = self.forks.last_mut() {
            let run = level.run;
            match level.branches.next() {
                None => _ = self.forks.pop(),
                Some((next, _)) if level.taken == Some(*next) => {}
                Some((_, Branch::Node(node))) => return Some((*node, run)),
                Some((_, Branch::Fork(fork))) => self.forks.push(Level::all(fork, run)),
            }
        }
        None
    }
}
