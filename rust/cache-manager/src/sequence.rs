//! One request: its token log, its hash chain, its pages, and its steps in flight.

use crate::loads::Load;
use crate::promise::Rest;
use crate::retention::BlockRetention;
use crate::row::Row;
use crate::suspension::Suspension;
use block_hash::{Chain, ExtraKeys, Guards, Token};
use block_pool::{GroupId, PageId, Step};
use radix_tree::{NamespaceId, NamespaceKey, NodeId, PrefixTree};
use smallvec::{SmallVec, smallvec};
use std::collections::VecDeque;
use std::hash::{Hash, Hasher};
use std::sync::Arc;

/// A request as it comes in.
pub struct NewSequence {
    /// The prompt; at least one token.
    pub tokens: Vec<Token>,
    /// Most tokens of prompt and output.
    pub max_length: u32,
    /// Salt and adapter.
    pub namespace: NamespaceKey,
    /// What besides tokens enters its blocks.
    pub extras: ExtraKeys,
    /// The hashes of its full blocks (empty when prefix caching is off).
    pub chain: Chain,
    /// Their second identities, if there are tiers beyond the device: blocks are looked for there, and
    /// copied there when they are published.
    pub guards: Option<Guards>,
    /// How long its blocks are kept; `None`: like all others.
    pub retention: Option<Arc<BlockRetention>>,
    /// Do not read the prefix cache.
    pub no_read: bool,
    /// Do not store into the prefix cache.
    pub no_store: bool,
    /// Draft tokens that a decode step verifies.
    pub drafts: u32,
    /// Most tokens that it will generate, for forecasts; `None`: up to its length limit.
    pub max_new_tokens: Option<u32>,
    /// Requests that it will be forked into, itself among them, for forecasts; at least 1.
    pub beams: u32,
    /// Tokens of an encoder that its layers of cross attention read; 0 for none.
    pub encoder: u32,
}

impl NewSequence {
    /// A plain request: reads and stores, without extra keys, drafts, retention or tiers. `chain` is the
    /// empty one of the namespace.
    pub fn new(tokens: Vec<Token>, max_length: u32, namespace: NamespaceKey, chain: Chain) -> NewSequence {
        NewSequence {
            tokens,
            max_length,
            namespace,
            extras: ExtraKeys::default(),
            chain,
            guards: None,
            retention: None,
            no_read: false,
            no_store: false,
            drafts: 0,
            max_new_tokens: None,
            beams: 1,
            encoder: 0,
        }
    }

    /// Hashes the full blocks of the prompt. Costs time in proportion to the prompt: do it before taking
    /// the ledger's lock.
    pub fn hash_prompt(&mut self, page_size: u32) {
        self.chain.extend(&self.tokens, page_size as usize, &self.extras);
        if let Some(guards) = &mut self.guards {
            guards.extend(&self.tokens, page_size as usize, &self.extras);
        }
    }
}

/// What is left of a request when it ends.
pub struct Released {
    /// Its known tokens.
    pub tokens: Vec<Token>,
    /// What else is said of them.
    pub extras: ExtraKeys,
    /// Tokens of its last admission that came from the cache.
    pub cached: u32,
    /// The page of its last block in the first group, if the block is stored though it is not full.
    pub tail: Option<PageId>,
}

/// A part of the sequence that one forward computes.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) struct StepOut {
    pub(crate) step: Step,
    /// First token computed.
    pub(crate) start: u32,
    /// One past the last token computed.
    pub(crate) end: u32,
    /// Draft tokens that are computed behind it.
    pub(crate) drafts: u32,
}

/// Where a request stands, in tokens.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Position {
    /// Tokens with KV.
    pub processed: u32,
    /// Tokens that the newest step out computes; 0 when none is out.
    pub active: u32,
    /// Tokens of this admission that came from the cache.
    pub cached: u32,
    /// Known tokens.
    pub known: u32,
}

/// A claimed request. In this order, so that a decode step touches few cache lines of it.
#[repr(C)]
pub(crate) struct Sequence {
    /// Pass in which the sequence was last seen in a batch.
    pub(crate) batch_mark: u64,
    /// Steps whose results are due, oldest first; at most two.
    pub(crate) steps_out: SmallVec<[StepOut; 2]>,
    /// Known tokens, then `unknown` placeholders of tokens that a step out will bring.
    pub(crate) tokens: Vec<Token>,
    pub(crate) unknown: u32,
    pub(crate) max_length: u32,
    /// Tokens with KV.
    pub(crate) processed: u32,
    /// Tokens with KV or on the way: where the next step starts.
    pub(crate) position: u32,
    /// Length of the prompt; after a preemption, of all that must be computed again.
    pub(crate) prompt_end: u32,
    pub(crate) drafts: u32,
    /// Tokens of an encoder that it reads.
    pub(crate) encoder: u32,
    pub(crate) epoch: u32,
    /// Newest step that the sequence was planned in.
    pub(crate) last_step: Step,
    /// Most tokens of a forward, by the caller's last word.
    pub(crate) bound: u32,
    /// Another request or a mover may hold the page that the next step first writes to. While it is false,
    /// none does.
    pub(crate) exposed: bool,
    /// A padding request: its row is all null pages, and nothing of it is read or stored.
    pub(crate) dummy: bool,
    /// Counted as admitted.
    pub(crate) admitted: bool,
    /// Steps out were dropped and none is planned since: results that come now belong to nothing.
    pub(crate) interrupted: bool,
    pub(crate) no_read: bool,
    pub(crate) no_store: bool,
    /// Another block owns a hash of this sequence: it publishes no further.
    pub(crate) blocked: bool,
    /// Its session is over: what it has not filled is not stored.
    pub(crate) over: bool,
    /// Number of the claim: no two sequences of a ledger share one.
    pub(crate) serial: u64,
    /// What it holds in each group.
    pub(crate) rows: SmallVec<[Row; 1]>,
    /// Blocks on the way from another tier; the request waits for them.
    pub(crate) load: Option<Box<Load>>,
    /// Where its KV is while it holds no pages.
    pub(crate) suspension: Option<Box<Suspension>>,
    /// Results to drop when they come; each with whether a token is still to come with it.
    pub(crate) dropped: VecDeque<bool>,
    /// Tree nodes of the leading blocks that were found or published.
    pub(crate) nodes: Vec<NodeId>,

    // What a step reads that fills a block.
    pub(crate) chain: Chain,
    pub(crate) extras: ExtraKeys,
    pub(crate) guards: Option<Guards>,
    pub(crate) retention: Option<Arc<BlockRetention>>,
    /// Indices of blocks whose node is anchored, because the node's page is a twin's.
    pub(crate) anchored: Vec<u32>,
    /// The last published block, if its node is anchored to stay.
    pub(crate) end: Option<NodeId>,

    // What is read seldom.
    /// The namespace in the tree, while `epoch` is the ledger's.
    pub(crate) namespace: NamespaceId,
    pub(crate) namespace_key: NamespaceKey,
    /// Length of the prompt as it was claimed.
    pub(crate) prompt: u32,
    pub(crate) cached: u32,
    pub(crate) max_new_tokens: Option<u32>,
    /// Requests that it stands for: itself, and the forks that are still to come.
    pub(crate) beams: u32,
    /// A load of this request failed: it asks no more.
    pub(crate) load_failed: bool,
    /// What it holds at most from now to its end, where groups share a slab.
    pub(crate) rest: Rest,
}

impl Sequence {
    pub(crate) fn new(
        mut new: NewSequence,
        groups: usize,
        serial: u64,
        namespace: NamespaceId,
        epoch: u32,
    ) -> Sequence {
        let prompt_end = new.tokens.len() as u32;
        // What is said of tokens that are not there is not about tokens that come later.
        new.extras.truncate(new.tokens.len());
        Sequence {
            serial,
            tokens: new.tokens,
            unknown: 0,
            max_length: new.max_length,
            namespace_key: new.namespace,
            extras: new.extras,
            chain: new.chain,
            guards: new.guards,
            retention: new.retention,
            prompt: prompt_end,
            no_read: new.no_read,
            no_store: new.no_store,
            drafts: new.drafts,
            max_new_tokens: new.max_new_tokens,
            beams: new.beams,
            encoder: new.encoder,
            dummy: false,
            rows: smallvec![Row::default(); groups],
            exposed: false,
            namespace,
            epoch,
            nodes: Vec::new(),
            anchored: Vec::new(),
            end: None,
            blocked: false,
            processed: 0,
            position: 0,
            prompt_end,
            cached: 0,
            over: false,
            admitted: false,
            load: None,
            load_failed: false,
            suspension: None,
            steps_out: SmallVec::new(),
            dropped: VecDeque::new(),
            interrupted: false,
            last_step: Step(0),
            bound: u32::MAX,
            rest: Rest::default(),
            batch_mark: 0,
        }
    }

    /// Tokens, placeholders included.
    #[inline]
    pub(crate) fn len(&self) -> u32 {
        self.tokens.len() as u32
    }

    /// Whether its blocks enter the prefix cache, if they are of the cache's epoch.
    #[inline]
    pub(crate) fn stores(&self) -> bool {
        !self.no_store && !self.dummy && !self.blocked
    }

    /// Tokens whose value is known.
    #[inline]
    pub(crate) fn known(&self) -> u32 {
        self.len() - self.unknown
    }

    pub(crate) fn position(&self) -> Position {
        Position {
            processed: self.processed,
            active: self.steps_out.last().map_or(0, |out| out.end - out.start),
            cached: self.cached,
            known: self.known(),
        }
    }

    /// Appends a generated token, or fills the oldest placeholder.
    #[inline]
    pub(crate) fn append(&mut self, token: Token) {
        if self.unknown > 0 {
            let at = self.known() as usize;
            self.tokens[at] = token;
            self.unknown -= 1;
        } else {
            self.tokens.push(token);
        }
    }

    /// Feeds everything but what can be computed again to `hasher`.
    pub(crate) fn fingerprint(&self, hasher: &mut impl Hasher) {
        let Sequence {
            serial,
            tokens,
            unknown,
            max_length,
            namespace_key,
            extras,
            chain: _,
            guards: _,
            retention: _, // as it was claimed
            prompt,
            no_read,
            no_store,
            drafts,
            max_new_tokens: _, // as it was claimed
            beams,
            encoder,
            dummy,
            rows,
            exposed,
            namespace,
            epoch,
            nodes,
            anchored,
            end,
            blocked,
            processed,
            position,
            prompt_end,
            cached,
            over,
            admitted,
            load,
            load_failed,
            suspension,
            steps_out,
            dropped,
            interrupted,
            last_step,
            bound: _, // of a guess at what comes
            rest: _,  // follows from the rest
            batch_mark: _,
        } = self;
        (serial, tokens, unknown, max_length, namespace_key, extras).hash(hasher);
        (encoder, no_read, no_store, drafts, beams, dummy, rows, exposed, namespace, epoch).hash(hasher);
        (nodes, anchored, end, blocked, processed, position, prompt, prompt_end, cached).hash(hasher);
        (over, admitted, load, load_failed, suspension, steps_out, dropped, interrupted, last_step)
            .hash(hasher);
    }

    /// Takes a token whose step was dropped meanwhile; true when the token was one of these.
    pub(crate) fn swallow(&mut self) -> bool {
        match self.dropped.iter_mut().find(|pending| **pending) {
            Some(pending) => {
                *pending = false;
                true
            }
            None => false,
        }
    }

    /// Hashes every full block of known tokens that has no hash yet.
    #[inline]
    pub(crate) fn hash_known(&mut self, page_size: usize) {
        let known = self.known() as usize;
        if known / page_size > self.chain.len() {
            self.chain.extend(&self.tokens[..known], page_size, &self.extras);
            if let Some(guards) = &mut self.guards {
                guards.extend(&self.tokens[..known], page_size, &self.extras);
            }
        }
    }

    /// What it holds in a group.
    #[inline]
    pub(crate) fn row(&self, group: GroupId) -> &Row {
        &self.rows[group.index()]
    }

    #[inline]
    pub(crate) fn row_mut(&mut self, group: GroupId) -> &mut Row {
        &mut self.rows[group.index()]
    }

    /// Whether it holds nothing in any group.
    pub(crate) fn holds_no_page(&self) -> bool {
        self.rows.iter().all(|row| row.pages.is_empty())
    }

    /// Whether the sequence has no KV of its epoch, here or elsewhere, and none is on its way.
    pub(crate) fn holds_nothing(&self) -> bool {
        self.holds_no_page() && self.load.is_none() && self.suspension.is_none()
    }

    /// Takes part in the prefix cache of `epoch`, which is not the sequence's; it holds no page.
    pub(crate) fn join_epoch(&mut self, tree: &mut PrefixTree, epoch: u32) {
        self.namespace = tree.acquire_namespace(&self.namespace_key);
        self.end = None; // of a tree that is gone
        self.epoch = epoch;
    }

    /// Drops what is in flight. Results are due for steps before `launched_before`.
    pub(crate) fn drop_steps_out(&mut self, launched_before: Step) {
        // The tokens of the newest `unknown` placeholders are still to come, and so is the token of the
        // newest step, if it reaches the end of the log.
        self.interrupted |= !self.steps_out.is_empty();
        for out in std::mem::take(&mut self.steps_out) {
            if out.step < launched_before {
                self.dropped.push_back(out.end >= self.known());
            }
        }
        self.tokens.truncate(self.known() as usize);
        self.unknown = 0;
    }

    /// What the request gets back when it ends.
    pub(crate) fn released(self) -> Released {
        Released { tokens: self.tokens, extras: self.extras, cached: self.cached, tail: None }
    }
}
