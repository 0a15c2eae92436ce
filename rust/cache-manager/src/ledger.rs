//! The ledger's state, claiming, and what is read of it.

use crate::blocks::BlockReader;
use crate::config::LedgerConfig;
use crate::copies::{Copies, CopyEnd};
use crate::counters::Counters;
use crate::cross::says_what_it_reads;
use crate::error::LedgerError;
use crate::events::EventLog;
use crate::misses::EvictedKeys;
use crate::offloads::OffloadJob;
use crate::page_copies::PageCopy;
use crate::page_fills::Fills;
use crate::pins::Pins;
use crate::sequence::{NewSequence, Position, Sequence};
use crate::slots::{SlotId, Slots};
use crate::snapshot;
use crate::write_policy::Demotion;
use block_hash::{Identity, Token};
use block_pool::{GroupId, PageId, Pool, Pools, Step, Taken};
use radix_tree::{NodeId, ParentId, PrefixTree};
use smallvec::{SmallVec, smallvec};
use std::collections::HashMap;
use tiered_connector::job::UnitId;

/// The ledger of one replica; see the crate's page.
#[expect(clippy::struct_excessive_bools, reason = "independent facts of one ledger")]
pub struct Ledger {
    pub(crate) config: LedgerConfig,
    pub(crate) pools: Pools,
    pub(crate) tree: PrefixTree,
    pub(crate) slots: Slots,
    /// Pages that the newest [`Ledger::take`] took.
    pub(crate) taken: Vec<Taken>,
    /// Pages of each group that there is to be room for: those that the call under way still takes, and more.
    pub(crate) left: SmallVec<[u32; 4]>,
    /// Most blocks of a request that is alone, where groups share a slab.
    pub(crate) most_blocks_alone: u32,
    pub(crate) copies: Copies,
    pub(crate) pins: Pins,
    /// Offloads that nobody has taken yet.
    pub(crate) offloads: Vec<OffloadJob>,
    /// Units of each group's tier that no request uses any more.
    pub(crate) units_let_go: Vec<(GroupId, UnitId)>,
    /// Blocks of each group that the newest publication stored.
    pub(crate) published: SmallVec<[Vec<usize>; 1]>,
    pub(crate) demotion: Demotion,
    /// Planned and not taken, in order.
    pub(crate) page_copies: Vec<PageCopy>,
    pub(crate) fills: Fills,
    pub(crate) counters: Counters,
    pub(crate) events: EventLog,
    pub(crate) evicted: EvictedKeys,
    /// Newest step.
    pub(crate) step: Step,
    /// Whether `alloc` joins the newest step instead of opening the next.
    pub(crate) step_open: bool,
    /// Whether a request is planned in the newest step.
    pub(crate) step_joined: bool,
    /// Resets of the prefix cache; a sequence of an older epoch neither reads nor publishes.
    pub(crate) epoch: u32,
    /// Whether there is no memory behind the pages.
    pub(crate) asleep: bool,
    /// Latest time that was told, in seconds; 0 until one is.
    pub(crate) now: f64,
    /// Whether a time was told.
    pub(crate) has_clock: bool,
    /// Passes over batches, to find a request that is in one batch twice.
    pub(crate) batch_pass: u64,
    /// Results due for requests that were released meanwhile: by slot, the last step and the number.
    pub(crate) orphans: HashMap<SlotId, (Step, u32)>,
    /// Entries of `orphans` after the old ones were last swept out.
    pub(crate) orphans_swept: usize,
    pub(crate) reader: BlockReader,
    pub(crate) admission: Option<Box<crate::planning::Scratch>>,
    pub(crate) pass: crate::scheduling::Pass,
}

impl Ledger {
    /// A ledger with empty pools.
    ///
    /// # Panics
    /// Without a group; with pages whose ids are over an int32.
    pub fn new(mut config: LedgerConfig) -> Ledger {
        assert!(!config.groups.is_empty(), "a ledger has a group");
        if !config.prefix_caching {
            config.groups.iter_mut().for_each(|group| group.kind = group.kind.without_snapshots());
        }
        let pools = config.pools().expect("page ids fit an int32");
        config.expected.requests = config.expected.that_fit(&pools.capacity());
        let most_blocks_alone = config.most_blocks_alone(&pools.capacity());
        let pages: usize = pools.groups().map(|group| pools[group].total() as usize).sum();
        let blocks = if config.prefix_caching { pages } else { 0 };
        Ledger {
            tree: PrefixTree::new(config.page_size as usize, blocks, config.groups.len() as u8)
                .found_by(config.reuses_partly().then(|| config.first_of_blocks())),
            pools,
            slots: Slots::default(),
            taken: Vec::new(),
            left: SmallVec::new(),
            most_blocks_alone,
            copies: Copies::default(),
            pins: Pins::default(),
            offloads: Vec::new(),
            units_let_go: Vec::new(),
            published: smallvec![Vec::new(); config.groups.len()],
            demotion: Demotion::new(config.groups.len()),
            page_copies: Vec::new(),
            fills: Fills::new(&config),
            counters: Counters::default(),
            events: EventLog::new(
                config.event_buffer_max_size as usize,
                snapshot::created(&config, &EventLog::default()),
            ),
            evicted: EvictedKeys::new(blocks),
            step: Step(0),
            step_open: false,
            step_joined: false,
            epoch: 0,
            asleep: false,
            now: 0.0,
            has_clock: false,
            batch_pass: 0,
            orphans: HashMap::new(),
            orphans_swept: 64,
            reader: BlockReader::default(),
            admission: None,
            pass: crate::scheduling::Pass::default(),
            config,
        }
    }

    /// The settings.
    pub fn config(&self) -> &LedgerConfig {
        &self.config
    }

    /// Reserves a slot for a request; no page is taken.
    ///
    /// # Errors
    /// A prompt that is empty, longer than the request's own limit, or longer than the ledger's; no slot.
    pub fn claim(&mut self, mut new: NewSequence) -> Result<SlotId, Box<RefusedClaim>> {
        if let Err(error) = self.check_claim(&new) {
            return Err(Box::new(RefusedClaim { error, request: new }));
        }
        if !says_what_it_reads(&self.config, new.encoder, &new.extras) {
            (new.no_read, new.no_store) = (true, true);
        }
        let namespace = self.tree.acquire_namespace(&new.namespace);
        let groups = self.config.groups.len();
        let sequence = Sequence::new(new, groups, self.counters.claims + 1, namespace, self.epoch);
        Ok(self.seat(sequence))
    }

    /// Gives a sequence whose serial is the next claim's a slot; [`Ledger::check_slots`] said that there is one.
    pub(crate) fn seat(&mut self, sequence: Sequence) -> SlotId {
        self.counters.claims += 1;
        let slot = self.slots.insert(sequence);
        self.orphans.remove(&slot); // of the same number two million claims ago
        slot
    }

    pub(crate) fn check_slots(&self) -> Result<(), LedgerError> {
        if self.slots.len() == SlotId::MAX { Err(LedgerError::NoSlot(SlotId::MAX)) } else { Ok(()) }
    }

    fn check_claim(&self, new: &NewSequence) -> Result<(), LedgerError> {
        let tokens = new.tokens.len() as u64;
        if tokens == 0 {
            return Err(LedgerError::OutOfRange {
                name: "tokens",
                given: 0,
                allowed: "at least one token".into(),
            });
        }
        if new.extras.reach() > tokens {
            return Err(LedgerError::TooLong {
                slot: None,
                tokens: new.extras.reach(),
                limit: tokens,
                what: "the prompt, which an item of mm_items or prompt_embeds reaches past",
            });
        }
        let max_length = u64::from(new.max_length);
        if tokens > max_length {
            return Err(LedgerError::TooLong {
                slot: None,
                tokens,
                limit: max_length,
                what: "the request's max_length",
            });
        }
        if let Some(limit) = self.config.max_seq_len.map(u64::from).filter(|&limit| tokens > limit) {
            return Err(LedgerError::TooLong {
                slot: None,
                tokens,
                limit,
                what: "the manager's max_seq_len",
            });
        }
        if new.encoder > 0 && !self.config.has_cross() {
            return Err(LedgerError::OutOfRange {
                name: "encoder_length",
                given: new.encoder.into(),
                allowed: "None: no group is of cross attention".into(),
            });
        }
        if new.drafts > 0 && self.config.has_recurrent() {
            return Err(LedgerError::OutOfRange {
                name: "num_draft_tokens",
                given: new.drafts.into(),
                allowed: "0: a group keeps states, which rejected drafts cannot be taken out of".into(),
            });
        }
        self.check_slots()
    }

    /// Whether a request is claimed under `slot`.
    pub fn contains(&self, slot: SlotId) -> bool {
        self.slots.get(slot).is_some()
    }

    /// Appends one generated token to the request (the single form of [`Ledger::step`]'s tokens). A token
    /// of a step that was dropped meanwhile is dropped.
    ///
    /// # Errors
    /// An unknown slot; a request at its length limit.
    pub fn update(&mut self, slot: SlotId, token: Token) -> Result<(), LedgerError> {
        let sequence = self.slots.get_mut(slot).ok_or(LedgerError::UnknownSlot(slot))?;
        if sequence.swallow() {
            self.counters.dropped_results += 1;
            return Ok(());
        }
        if sequence.unknown == 0 {
            check_length(sequence, slot, 1, self.config.max_seq_len)?;
        }
        let awaited = sequence.unknown > 0;
        sequence.append(token);
        if awaited && !self.config.is_plain() {
            // Computed before it was known: windows pass it only now.
            self.publish(slot);
            self.slide(slot);
        }
        Ok(())
    }

    /// Where the request stands.
    ///
    /// # Errors
    /// An unknown slot.
    pub fn position(&self, slot: SlotId) -> Result<Position, LedgerError> {
        Ok(self.sequence(slot)?.position())
    }

    /// The request's known tokens.
    ///
    /// # Errors
    /// An unknown slot.
    pub fn tokens(&self, slot: SlotId) -> Result<&[Token], LedgerError> {
        let sequence = self.sequence(slot)?;
        Ok(&sequence.tokens[..sequence.known() as usize])
    }

    /// The pages of the request's blocks in a group, in order; the null page is a placeholder for a block that the
    /// group does not need.
    ///
    /// # Errors
    /// An unknown slot; a padding request.
    pub fn pages(&self, slot: SlotId, group: GroupId) -> Result<&[PageId], LedgerError> {
        match self.sequence(slot)? {
            padding if padding.dummy => Err(LedgerError::Padding(slot)),
            sequence => Ok(&sequence.row(group).pages),
        }
    }

    /// Publishes what is computed and full, and gives the hashes of the request's full blocks of known
    /// tokens, in order: none without prefix caching. Calling it again changes nothing.
    ///
    /// # Errors
    /// An unknown slot; a padding request.
    pub fn commit(&mut self, slot: SlotId) -> Result<Vec<Identity>, LedgerError> {
        if self.sequence(slot)?.dummy {
            return Err(LedgerError::Padding(slot));
        }
        if !self.config.prefix_caching {
            return Ok(Vec::new());
        }
        self.publish(slot);
        let page_size = self.config.page_size as usize;
        let sequence = self.slots.get_mut(slot).ok_or(LedgerError::UnknownSlot(slot))?;
        sequence.hash_known(page_size);
        Ok((0..sequence.chain.len()).map(|block| sequence.chain.identity(block)).collect())
    }

    /// Opens the next step if the newest is closed, tells the time in seconds, and ends copies
    /// ([`Ledger::end_copies`]). Gives the step, and the requests whose load has ended. Durations that began
    /// before any time was told count from the first that is.
    ///
    /// # Errors
    /// A time before the last one; a copy that is not in flight. Nothing is changed then.
    pub fn begin_step(
        &mut self,
        now: Option<f64>,
        ended: &[(u64, CopyEnd)],
    ) -> Result<(Step, Vec<SlotId>), LedgerError> {
        self.check_time(now)?;
        let ready = self.end_copies(ended)?;
        self.tell_time(now);
        if !self.step_open || self.step_joined {
            self.open_step();
        }
        Ok((self.step, ready))
    }

    /// Checks that a time is not before the last one.
    pub(crate) fn check_time(&self, now: Option<f64>) -> Result<(), LedgerError> {
        match now.filter(|&now| !now.is_finite() || now < self.now) {
            Some(now) => Err(LedgerError::TimeGoesBack { now, latest: self.now }),
            None => Ok(()),
        }
    }

    /// Closes the open step: its forward is about to run.
    pub fn close_step(&mut self) {
        self.step_open = false;
    }

    /// The newest step, and whether it is open: for tests.
    pub fn newest_step(&self) -> (Step, bool) {
        (self.step, self.step_open)
    }

    /// What has been counted.
    pub fn counters(&self) -> &Counters {
        &self.counters
    }

    /// The pages of the first group, to read.
    pub fn pool(&self) -> &Pool {
        &self.pools[GroupId::FIRST]
    }

    /// Every group's pages, to read.
    pub fn pools(&self) -> &Pools {
        &self.pools
    }

    /// Cached blocks on the device, referenced or not: those of the group that leads.
    pub fn cached_blocks(&self) -> usize {
        self.tree.resident(self.config.lead()) - self.tree.tails()
    }

    /// Pins that have not ended.
    pub fn pins(&self) -> usize {
        self.pins.pages.len()
    }

    /// Copies that have not ended.
    pub fn copies_in_flight(&self) -> usize {
        self.copies.in_flight.len()
    }

    /// Requests claimed.
    pub fn requests(&self) -> usize {
        self.slots.len()
    }

    pub(crate) fn open_step(&mut self) {
        self.step.0 += 1;
        self.step_open = true;
        self.step_joined = false;
    }

    pub(crate) fn sequence(&self, slot: SlotId) -> Result<&Sequence, LedgerError> {
        self.slots.get(slot).ok_or(LedgerError::UnknownSlot(slot))
    }

    /// Checks that every slot is claimed and that none is twice in `batch`.
    pub(crate) fn check_batch(&mut self, batch: &[SlotId]) -> Result<(), LedgerError> {
        self.batch_pass += 1;
        for &slot in batch {
            let sequence = self.slots.get_mut(slot).ok_or(LedgerError::UnknownSlot(slot))?;
            if std::mem::replace(&mut sequence.batch_mark, self.batch_pass) == self.batch_pass {
                return Err(LedgerError::TwiceInBatch(slot));
            }
        }
        Ok(())
    }
}

/// A claim that was refused, with the request as it was given.
pub struct RefusedClaim {
    /// Why.
    pub error: LedgerError,
    /// The request.
    pub request: NewSequence,
}

/// Checks that `more` tokens fit into the request's and the ledger's limits.
pub(crate) fn check_length(
    sequence: &Sequence,
    slot: SlotId,
    more: u32,
    max_seq_len: Option<u32>,
) -> Result<(), LedgerError> {
    let tokens = u64::from(sequence.len()) + u64::from(more);
    let limit = u64::from(sequence.max_length);
    if tokens > limit {
        return Err(LedgerError::TooLong {
            slot: Some(slot),
            tokens,
            limit,
            what: "the request's max_length",
        });
    }
    match max_seq_len.map(u64::from).filter(|&limit| tokens > limit) {
        Some(limit) => {
            Err(LedgerError::TooLong { slot: Some(slot), tokens, limit, what: "the manager's max_seq_len" })
        }
        None => Ok(()),
    }
}

/// What the block after the leading `nodes` follows.
pub(crate) fn parent_after(sequence: &Sequence, nodes: &[NodeId]) -> ParentId {
    nodes.last().map_or(ParentId::Root(sequence.namespace), |&node| ParentId::Node(node))
}
