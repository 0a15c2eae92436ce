//! Namespaces: salt, adapter and adapter generation, compared by bytes; each has a root of its own.

use crate::node::NONE;
use block_hash::{Adapter, Root};
use std::collections::HashMap;

/// An interned namespace of one tree.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct NamespaceId(pub(crate) u32);

/// An adapter by name or by number; the name "7" and the number 7 are two adapters.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub enum AdapterId {
    /// By name.
    Name(String),
    /// By number.
    Number(i64),
}

/// What separates prefixes that share no blocks.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Default)]
pub struct NamespaceKey {
    /// Isolation salt; empty is no salt.
    pub salt: String,
    /// The adapter; `None` is the base model.
    pub adapter: Option<AdapterId>,
    /// Generation of the adapter under its id.
    pub generation: u64,
}

impl NamespaceKey {
    /// Where the namespace's hash chains start.
    pub fn root(&self, seed: Option<&[u8; 32]>) -> Root {
        let adapter = self.adapter.as_ref().map(|adapter| match adapter {
            AdapterId::Name(name) => Adapter::Name(name),
            AdapterId::Number(number) => Adapter::Number(*number),
        });
        Root::new(seed, Some(&self.salt), adapter, self.generation)
    }
}

struct Namespace {
    key: NamespaceKey,
    /// Sequences that hold the namespace.
    holders: u32,
    /// The node in front of those directly below its root.
    first_child: u32,
}

/// The namespaces in use.
#[derive(Default)]
pub(crate) struct Namespaces {
    ids: HashMap<NamespaceKey, NamespaceId>,
    entries: Vec<Option<Namespace>>,
    free: Vec<NamespaceId>,
}

impl Namespaces {
    /// The namespace of `key`, if anything lives in it.
    pub(crate) fn find(&self, key: &NamespaceKey) -> Option<NamespaceId> {
        self.ids.get(key).copied()
    }

    /// What the namespace in use `id` is the namespace of.
    pub(crate) fn key(&self, id: NamespaceId) -> &NamespaceKey {
        &self.entries[id.0 as usize].as_ref().expect("a namespace id in use has an entry").key
    }

    /// The namespace of `key`, held once more.
    pub(crate) fn acquire(&mut self, key: &NamespaceKey) -> NamespaceId {
        if let Some(id) = self.find(key) {
            self.entry(id).holders += 1;
            return id;
        }
        let namespace = Some(Namespace { key: key.clone(), holders: 1, first_child: NONE });
        let id = if let Some(id) = self.free.pop() {
            self.entries[id.0 as usize] = namespace;
            id
        } else {
            self.entries.push(namespace);
            NamespaceId(self.entries.len() as u32 - 1)
        };
        self.ids.insert(key.clone(), id);
        id
    }

    /// One holder less.
    pub(crate) fn release(&mut self, id: NamespaceId) {
        self.entry(id).holders -= 1;
        self.drop_if_unused(id);
    }

    pub(crate) fn first_child(&self, id: NamespaceId) -> u32 {
        self.entries[id.0 as usize].as_ref().map_or(NONE, |entry| entry.first_child)
    }

    pub(crate) fn set_first_child(&mut self, id: NamespaceId, node: u32) {
        self.entry(id).first_child = node;
        self.drop_if_unused(id);
    }

    /// Every namespace in use, and how many hold it.
    pub(crate) fn live(&self) -> impl Iterator<Item = (NamespaceId, u32)> + '_ {
        let entries = self.entries.iter().enumerate();
        entries.filter_map(|(index, entry)| Some((NamespaceId(index as u32), entry.as_ref()?.holders)))
    }

    fn drop_if_unused(&mut self, id: NamespaceId) {
        let slot = &mut self.entries[id.0 as usize];
        if slot.as_ref().is_some_and(|entry| entry.holders == 0 && entry.first_child == NONE) {
            if let Some(entry) = slot.take() {
                self.ids.remove(&entry.key);
            }
            self.free.push(id);
        }
    }

    fn entry(&mut self, id: NamespaceId) -> &mut Namespace {
        self.entries[id.0 as usize].as_mut().expect("a namespace id in use has an entry")
    }
}
