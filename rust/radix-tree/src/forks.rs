//! Siblings by their tokens: those below one parent, with equal extra keys, as a trie.
//!
//! A fork is where tokens that ran along together part; what they share up to there is its label, and each
//! next token leads on by a branch of its own. So the way along a probe costs what its tokens and their
//! places among the branches cost, however many siblings there are. Where siblings part depends on their
//! tokens alone, not on the order in which they came.

use crate::branches::{Branches, Link, Next, Target};
use crate::extra_keys::ExtraId;
use crate::node::{NodeId, PackedParent};
use block_hash::Token;
use std::collections::HashMap;
use std::mem;

/// Siblings that a trie is of.
pub(crate) type Siblings = (PackedParent, ExtraId);

/// The tries of all parents; none has two nodes of equal tokens.
#[derive(Default)]
pub(crate) struct Forks {
    tops: HashMap<Siblings, Link>,
    slab: Vec<Fork>,
    /// Numbers of forks that are none any more.
    free: Vec<usize>,
}

/// A cache line.
#[repr(align(64))]
struct Fork {
    /// The tokens between the branch that leads here and where its tokens part.
    label: Box<[Token]>,
    branches: Branches,
}

const _: () = assert!(size_of::<Fork>() == 64);

/// Where a link is: the branch of a fork; `None` is the top.
type Place = Option<(usize, Next)>;

/// How many tokens are equal from the start on.
#[inline]
pub(crate) fn common(one: &[Token], other: &[Token]) -> usize {
    one.iter().zip(other).take_while(|(one, other)| one == other).count()
}

impl Forks {
    /// Adds a node. `tokens_of` gives the tokens of the nodes here, and its own.
    pub(crate) fn insert<'a>(
        &mut self,
        siblings: Siblings,
        node: NodeId,
        tokens_of: impl Fn(NodeId) -> &'a [Token],
    ) {
        let ours = Link::to_node(node);
        let Some(&(mut link)) = self.tops.get(&siblings) else {
            self.tops.insert(siblings, ours);
            return;
        };
        let tokens = tokens_of(node);
        let (mut place, mut at) = (None, 0);
        loop {
            let number = match link.target() {
                Target::Fork(number) => number,
                Target::Node(other) => {
                    let theirs = &tokens_of(other)[at..];
                    let along = common(theirs, &tokens[at..]);
                    let branches =
                        Branches::new((Next::of(theirs, along), link), (Next::of(tokens, at + along), ours));
                    let fork = self.add(Fork { label: theirs[..along].into(), branches });
                    return self.set(siblings, place, fork);
                }
            };
            let fork = &mut self.slab[number];
            let along = common(&fork.label, &tokens[at..]);
            at += along;
            let next = Next::of(tokens, at);
            if along < fork.label.len() {
                // What the fork was is below it from now on, as soon as that has a number.
                let theirs = Next::of(&fork.label, along);
                let label = fork.label[along + 1..].into();
                fork.label = fork.label[..along].into();
                let branches = mem::replace(&mut fork.branches, Branches::new((theirs, ours), (next, ours)));
                let below = self.add(Fork { label, branches });
                return self.slab[number].branches.set(theirs, below);
            }
            let Some(below) = fork.branches.get(next) else { return fork.branches.set(next, ours) };
            (link, place) = (below, Some((number, next)));
            at += 1;
        }
    }

    /// Takes out a node that is here, with these tokens.
    pub(crate) fn remove(&mut self, siblings: Siblings, tokens: &[Token]) {
        let (mut place, mut at) = (None, 0);
        while let Some(link) = self.get(siblings, place)
            && let Target::Fork(number) = link.target()
        {
            let fork = &mut self.slab[number];
            at += fork.label.len();
            let next = Next::of(tokens, at);
            at += 1;
            if let Some(Target::Fork(_)) = fork.branches.get(next).map(Link::target) {
                place = Some((number, next));
                continue;
            }
            if let Some((next, last)) = fork.branches.remove(next) {
                // A fork no more: what is left takes its place.
                let label = mem::take(&mut fork.label);
                if let Target::Fork(below) = last.target() {
                    let below = &mut self.slab[below].label;
                    *below = [&*label, &[next.token()], &**below].concat().into();
                }
                self.free.push(number);
                self.set(siblings, place, last);
            }
            return;
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
        let mut levels = Vec::new();
        let first = self.follow(siblings, tokens, |branches, run, is_whole| {
            let taken = is_whole.then(|| Next::of(tokens, run));
            levels.push(Level { branches, run, taken, last: None });
        });
        let first = first.map(|(node, at)| (node, at + common(&tokens_of(node)[at..], &tokens[at..])));
        Nearest { forks: &self.slab, first, levels }
    }

    /// The tail all of whose tokens these begin with: of several the longest.
    pub(crate) fn longest_tail<'a>(
        &self,
        siblings: Siblings,
        tokens: &[Token],
        is_tail: impl Fn(NodeId) -> bool,
        tokens_of: impl Fn(NodeId) -> &'a [Token],
    ) -> Option<NodeId> {
        let mut ended = None;
        let last = self.follow(siblings, tokens, |branches, _, is_whole| {
            if is_whole && let Some(Target::Node(node)) = branches.get(Next::END).map(Link::target) {
                ended = Some(node);
            }
        });
        let is_contained =
            |&(node, at): &(NodeId, usize)| is_tail(node) && tokens[at..].starts_with(&tokens_of(node)[at..]);
        last.filter(is_contained).map(|(node, _)| node).or(ended)
    }

    /// Every node here.
    pub(crate) fn iter(&self) -> impl Iterator<Item = NodeId> + '_ {
        self.tops.values().flat_map(|top| {
            let (first, levels) = match top.target() {
                Target::Node(node) => (Some((node, 0)), vec![]),
                Target::Fork(number) => (None, vec![Level::all(&self.slab[number], 0)]),
            };
            Nearest { forks: &self.slab, first, levels }.map(|(node, _)| node)
        })
    }

    /// Where `tokens` lead: the forks on the way, each with the number of tokens in common and whether its
    /// whole label is among them; and the node at the end, with the number that is sure to be in common.
    #[inline]
    fn follow<'a>(
        &'a self,
        siblings: Siblings,
        tokens: &[Token],
        mut visit: impl FnMut(&'a Branches, usize, bool),
    ) -> Option<(NodeId, usize)> {
        let mut link = *self.tops.get(&siblings)?;
        let mut run = 0;
        loop {
            let fork = match link.target() {
                Target::Node(node) => return Some((node, run)),
                Target::Fork(number) => &self.slab[number],
            };
            let along = common(&fork.label, &tokens[run..]);
            run += along;
            let is_whole = along == fork.label.len();
            visit(&fork.branches, run, is_whole);
            if !is_whole {
                return None;
            }
            link = fork.branches.get(Next::of(tokens, run))?;
            run = tokens.len().min(run + 1);
        }
    }

    fn get(&self, siblings: Siblings, place: Place) -> Option<Link> {
        match place {
            None => self.tops.get(&siblings).copied(),
            Some((number, next)) => self.slab[number].branches.get(next),
        }
    }

    fn set(&mut self, siblings: Siblings, place: Place, link: Link) {
        match place {
            None => _ = self.tops.insert(siblings, link),
            Some((number, next)) => self.slab[number].branches.set(next, link),
        }
    }

    fn add(&mut self, fork: Fork) -> Link {
        if let Some(number) = self.free.pop() {
            self.slab[number] = fork;
            return Link::to_fork(number);
        }
        self.slab.push(fork);
        Link::to_fork(self.slab.len() - 1)
    }
}

/// See [`Forks::nearest`].
pub(crate) struct Nearest<'a> {
    forks: &'a [Fork],
    first: Option<(NodeId, usize)>,
    /// The last is the next.
    levels: Vec<Level<'a>>,
}

/// What leads on from a fork, after the branch `last`; what is below it shares `run` tokens, unless it is below
/// the one that was `taken`.
struct Level<'a> {
    branches: &'a Branches,
    run: usize,
    taken: Option<Next>,
    last: Option<Next>,
}

impl<'a> Level<'a> {
    fn all(fork: &'a Fork, run: usize) -> Level<'a> {
        Level { branches: &fork.branches, run, taken: None, last: None }
    }
}

impl Iterator for Nearest<'_> {
    type Item = (NodeId, usize);

    #[inline]
    fn next(&mut self) -> Option<(NodeId, usize)> {
        if let Some(first) = self.first.take() {
            return Some(first);
        }
        while let Some(level) = self.levels.last_mut() {
            let run = level.run;
            let Some((next, link)) = level.branches.after(level.last) else {
                self.levels.pop();
                continue;
            };
            level.last = Some(next);
            match link.target() {
                _ if level.taken == Some(next) => {}
                Target::Node(node) => return Some((node, run)),
                Target::Fork(number) => self.levels.push(Level::all(&self.forks[number], run)),
            }
        }
        None
    }
}
