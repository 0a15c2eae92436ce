//! The present content as events, for a subscriber that missed some.

use crate::config::LedgerConfig;
use crate::events::{EventKind, EventLog, Stored, Tier};
use crate::ledger::Ledger;
use block_pool::{GroupId, PageId, Priority};
use radix_tree::{NamespaceId, NodeId, ParentId, PrefixTree};
use std::collections::HashMap;

/// What a new index starts from.
pub struct EventSnapshot {
    /// Id of the first event that the snapshot does not include.
    pub next_id: u64,
    /// [`EventKind::Created`] of each group, then [`EventKind::Stored`] of every block that the first has, parents
    /// before children, of the second, and so on.
    pub events: Vec<(GroupId, EventKind)>,
}

impl Ledger {
    /// The cached blocks, and which event goes on from here. The cost grows with the cache.
    pub fn event_snapshot(&mut self) -> EventSnapshot {
        self.events.heed();
        self.events.seal();
        let mut events: Vec<_> = created(&self.config, &self.events).collect();
        for group in self.config.group_ids() {
            let runs = self.events.runs(group).unwrap_or_else(|| self.cached_runs(group));
            events.extend(runs.into_iter().map(|run| (group, EventKind::Stored(run))));
        }
        EventSnapshot { next_id: self.events.next_id(), events }
    }

    /// Every block that a group has on the device, in runs of consecutive ones; a run comes after the run
    /// that it branches from.
    fn cached_runs(&self, group: GroupId) -> Vec<Stored> {
        let tree = &self.tree;
        let pool = &self.pools[group];
        let cached: Vec<(NodeId, PageId)> = tree
            .iter()
            .filter(|&node| !tree.is_tail(node))
            .filter_map(|node| tree.page(node, group).map(|page| (node, page)))
            .collect();
        // A run goes on with the first child that is alike; the other children start runs of their own.
        let mut next: HashMap<NodeId, NodeId> = HashMap::new();
        let mut places = Places::default();
        let mut starts = Vec::new();
        for &(node, page) in &cached {
            let priority = pool.priority(page);
            if let ParentId::Node(parent) = tree.parent(node)
                && tree.page(parent, group).is_some_and(|above| pool.priority(above) == priority)
                && *next.entry(parent).or_insert(node) == node
            {
                continue;
            }
            let (depth, namespace) = places.of(tree, node);
            starts.push((depth, node, namespace, priority));
        }
        starts.sort_unstable_by_key(|&(depth, node, ..)| (depth, node));
        let run = |(depth, node, namespace, priority)| {
            let blocks = std::iter::successors(Some(node), |node| next.get(node).copied());
            self.cached_run(group, blocks, depth, namespace, priority)
        };
        starts.into_iter().map(run).collect()
    }

    fn cached_run(
        &self,
        group: GroupId,
        blocks: impl Iterator<Item = NodeId>,
        first: u32,
        namespace: NamespaceId,
        priority: Priority,
    ) -> Stored {
        let tree = &self.tree;
        let mut run = Stored {
            parent: None,
            first,
            keys: Vec::new(),
            tokens: Vec::new(),
            extra_keys: Vec::new(),
            priority,
            tier: Tier::DEVICE,
            adapter: tree.namespace_key(namespace).adapter.clone(),
        };
        for node in blocks {
            if run.keys.is_empty() {
                run.parent = self.told_before(node, group);
            }
            let extra = tree.extra_keys(node);
            if !extra.is_empty() {
                run.extra_keys.push((run.keys.len() as u32, extra.to_vec()));
            }
            run.keys.extend(tree.key(node));
            run.tokens.extend_from_slice(tree.tokens(node));
        }
        run
    }

    /// The block that an event names before `node`'s: [`Stored::parent`].
    fn told_before(&self, node: NodeId, group: GroupId) -> Option<u64> {
        let above = |node| match self.tree.parent(node) {
            ParentId::Node(parent) => Some(parent),
            ParentId::Root(_) => None,
        };
        let skips = self.config.kind(group).is_recurrent();
        let mut path = std::iter::successors(above(node), |&node| above(node));
        path.find(|&node| !skips || self.tree.page(node, group).is_some())
            .and_then(|node| self.tree.key(node))
    }
}

/// What the log of a new ledger begins with: what each group has.
pub(crate) fn created(config: &LedgerConfig, log: &EventLog) -> impl Iterator<Item = (GroupId, EventKind)> {
    config.group_ids().map(|group| {
        let device = config.huge_pages.unwrap_or(1) * config.groups[group.index()].pages;
        let pages = std::iter::once(device).chain(log.sizes(group).iter().copied()).collect();
        (group, EventKind::Created { page_size: config.page_size, pages })
    })
}

/// Where nodes are: how many blocks are before them, and in which namespace. Each node is walked once.
#[derive(Default)]
struct Places {
    known: HashMap<NodeId, (u32, NamespaceId)>,
}

impl Places {
    fn of(&mut self, tree: &PrefixTree, node: NodeId) -> (u32, NamespaceId) {
        let (mut path, mut at) = (Vec::new(), ParentId::Node(node));
        let (mut before, namespace) = loop {
            match at {
                ParentId::Root(namespace) => break (0, namespace),
                ParentId::Node(node) => {
                    if let Some(&(depth, namespace)) = self.known.get(&node) {
                        break (depth + 1, namespace);
                    }
                    path.push(node);
                    at = tree.parent(node);
                }
            }
        };
        for &node in path.iter().rev() {
            self.known.insert(node, (before, namespace));
            before += 1;
        }
        self.known[&node]
    }
}
