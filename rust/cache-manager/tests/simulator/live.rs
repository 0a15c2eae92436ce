//! A request as the engine and the device know it.

use crate::kv::{kv_after, kv_of, root};
use block_hash::Token;
use block_pool::PageId;
use cache_manager::{CopyJob, SlotId};
use completion::Completion;
use std::collections::VecDeque;

/// A forward launched for a request; its result is due.
pub(crate) struct Out {
    pub(crate) step: u32,
    /// The tokens that it gives, when it computes the last one: drafts that were right, and one more.
    pub(crate) sampled: Vec<Token>,
}

/// A load that a request waits for.
pub(crate) struct Loading {
    pub(crate) copy: u64,
    pub(crate) pages: Vec<PageId>,
    pub(crate) completion: Completion,
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Stage {
    Leaving,
    Away,
    Returning,
}

/// A request that let go of its pages.
pub(crate) struct Aside {
    pub(crate) stage: Stage,
    /// The copy that it waits for; while it is away the one that took it there.
    pub(crate) copy: CopyJob,
    pub(crate) completion: Completion,
    /// Tokens with KV.
    pub(crate) processed: usize,
}

pub(crate) struct Live {
    pub(crate) slot: SlotId,
    pub(crate) salt: &'static str,
    /// Known tokens, then sampled ones that are not delivered yet.
    pub(crate) log: Vec<Token>,
    /// KV of each token of the log.
    pub(crate) kv: Vec<u64>,
    /// What the KV is computed with.
    pub(crate) weights: u32,
    pub(crate) known: usize,
    /// Full blocks whose right content the tier's checks were told of.
    pub(crate) learned: usize,
    pub(crate) drafts: usize,
    pub(crate) planned: bool,
    pub(crate) out: VecDeque<Out>,
    /// Results of forwards that the ledger was told to forget; they come all the same.
    pub(crate) late: VecDeque<Vec<Token>>,
    pub(crate) loading: Option<Loading>,
    /// A load failed: no other may begin.
    pub(crate) load_failed: bool,
    pub(crate) aside: Option<Aside>,
    /// It came for its load alone, and goes when that has ended.
    pub(crate) prefetches: bool,
}

impl Live {
    pub(crate) fn new(slot: SlotId, salt: &'static str, tokens: Vec<Token>, weights: u32) -> Live {
        Live {
            slot,
            salt,
            kv: kv_of(root(salt, weights), &tokens),
            known: tokens.len(),
            log: tokens,
            learned: 0,
            weights,
            drafts: 0,
            planned: false,
            out: VecDeque::new(),
            late: VecDeque::new(),
            loading: None,
            load_failed: false,
            aside: None,
            prefetches: false,
        }
    }

    /// Another request that stands where this one does.
    pub(crate) fn fork(&self, slot: SlotId) -> Live {
        Live {
            drafts: self.drafts,
            kv: self.kv[..self.known].to_vec(),
            ..Live::new(slot, self.salt, self.log[..self.known].to_vec(), self.weights)
        }
    }

    pub(crate) fn push(&mut self, token: Token) {
        let before = self.kv.last().copied().unwrap_or_else(|| root(self.salt, self.weights));
        self.log.push(token);
        self.kv.push(kv_after(before, token));
    }

    /// The request goes on after its first `len` tokens; results of what was launched still come.
    pub(crate) fn cut(&mut self, len: usize) {
        self.log.truncate(len);
        self.kv.truncate(len);
        self.known = len;
        self.learned = 0;
        self.planned = false;
        self.late.extend(self.out.drain(..).map(|out| out.sampled));
    }

    /// Whether it waits for nothing and is not set aside.
    pub(crate) fn is_present(&self) -> bool {
        self.loading.is_none() && self.aside.is_none()
    }

    /// Whether no forward is planned or out for it either.
    pub(crate) fn is_idle(&self) -> bool {
        self.is_present() && !self.planned && self.out.is_empty()
    }

    /// The copy that it waits for, and its handle.
    pub(crate) fn awaited(&self) -> Option<(u64, &Completion)> {
        let aside = self.aside.as_ref().filter(|aside| aside.stage != Stage::Away);
        let load = self.loading.as_ref().map(|load| (load.copy, &load.completion));
        load.or(aside.map(|aside| (aside.copy.id.0, &aside.completion)))
    }

    /// The request holds nothing: it computes everything anew.
    pub(crate) fn start_over(&mut self, weights: u32) {
        self.weights = weights;
        self.kv = kv_of(root(self.salt, weights), &self.log);
    }
}
