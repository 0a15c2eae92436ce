//! What requests take until they end, at most, for schedulers that never preempt.
//!
//! A group that keeps everything takes pages and gives none back, so its need is what the longest sequence has, less
//! what is held. A group that forgets gives pages back as it takes others: what counts is the most that it will hold
//! at one time. Pages that others hold too do not come back when one request lets go of them, so that they are neither
//! counted as held nor as needed, as long as they are in the window.

use crate::error::LedgerError;
use crate::groups::{GroupKind, state_block};
use crate::hits::Found;
use crate::ledger::Ledger;
use crate::needs::{Next, Outlook};
use crate::page_copies::Leaving;
use crate::sequence::Sequence;
use crate::slots::SlotId;
use crate::twins::Twins;
use block_pool::{GroupId, PageId};
use smallvec::SmallVec;
use std::collections::{HashMap, HashSet};

/// Requests, and what is found for them.
struct Batch<'a> {
    nexts: &'a [Next],
    found: &'a Found,
    /// Of each request; none where they are not looked at.
    twins: &'a [Twins],
    two_steps: bool,
}

/// Who of a batch has a page of a group that forgets.
#[derive(Default)]
struct Users {
    /// Requests that hold it, and of them the last that keeps it, or the first if none does.
    holders: u32,
    /// Those of them that wait for the copy that fills it.
    awaited: u32,
    owner: Option<usize>,
    /// Requests that will have it after their next `alloc`, and the last of them.
    later: u32,
    last: usize,
    /// Whether each of them will need as many pages, beside those that it has with others, as it ever does.
    all_peak: bool,
}

/// What the next `alloc` of a request does to one of its pages.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Fate {
    /// It is a hit.
    Found,
    /// It is that of a block which the request computes first.
    Adopted,
    Kept,
    /// It is kept, and a copy on its way fills it.
    Awaited,
    GivenBack,
    /// It is given back once its copy is made.
    Copied,
}

impl Fate {
    /// Whether the request has the page afterwards.
    fn stays(self) -> bool {
        matches!(self, Fate::Found | Fate::Adopted | Fate::Kept | Fate::Awaited)
    }

    /// Whether the request holds the page now.
    fn is_held(self) -> bool {
        !matches!(self, Fate::Found | Fate::Adopted)
    }

    /// Whether the page, which the request holds, is free when it lets go of it.
    fn comes_back(self) -> bool {
        matches!(self, Fate::Kept | Fate::Awaited | Fate::GivenBack)
    }
}

/// Pages of one request in such a group.
#[derive(Default)]
pub(crate) struct Share {
    /// Blocks that it will have with others.
    pub(crate) with_others: SmallVec<[u32; 8]>,
    /// Those that it will once it has computed them.
    pub(crate) adopted: SmallVec<[u32; 4]>,
    /// Pages that come back when it lets go of them.
    own: u32,
}

impl Ledger {
    /// Pages of each group that each request takes from what is free until it ends, beside those it has, if no forward
    /// computes more than `outlook` says: one number for each group of each request, request after request. A request
    /// ends with `max_new_tokens`, or at its or the ledger's length limit. Changes nothing.
    ///
    /// # Errors
    /// As for [`Ledger::needed_blocks_one_step`].
    pub fn remaining_blocks_to_completion(
        &mut self,
        batch: &[SlotId],
        outlook: Outlook<'_>,
    ) -> Result<Vec<u32>, LedgerError> {
        self.forecast(batch, outlook, |ledger, nexts, found| {
            let groups = ledger.config.groups.len();
            let mut needs = vec![0; nexts.len() * groups];
            let mut leaving = Leaving::new();
            let twins: SmallVec<[Twins; 4]> = nexts.iter().map(|next| ledger.twins_of(next, found)).collect();
            for group in ledger.config.group_ids() {
                let column = needs.iter_mut().skip(group.index()).step_by(groups);
                let kind = ledger.config.kind(group);
                if kind.lasts() {
                    for (next, need) in nexts.iter().zip(column) {
                        *need = ledger.needed(next, found, group, 0, &mut leaving);
                    }
                } else if kind.forgets() {
                    let batch = Batch { nexts, found, twins: &twins, two_steps: outlook.two_steps };
                    let most = ledger.most_at_once(&batch, group, &mut leaving);
                    column.zip(most).for_each(|(need, most)| *need = most);
                } else {
                    let mut needed = |next: &Next| {
                        let covered = ledger.covered_at_end(next, outlook.two_steps);
                        ledger.needed(next, found, group, covered, &mut leaving)
                    };
                    let needed = nexts.iter().map(&mut needed).collect();
                    let needed = ledger.less_twins(nexts, &twins, group, outlook.two_steps, needed);
                    column.zip(needed).for_each(|(need, needed)| *need = needed);
                }
            }
            needs
        })
    }

    /// Tokens that a group which keeps everything has pages for in the end.
    pub(crate) fn covered_at_end(&self, next: &Next, two_steps: bool) -> u32 {
        let Some(sequence) = self.slots.get(next.slot) else { return 0 };
        let tokens = sequence.most_tokens(&self.config);
        (tokens + sequence.room_at_end(two_steps)).max(sequence.prompt_end)
    }

    /// What every request still needs in a group that forgets.
    fn most_at_once(&self, batch: &Batch<'_>, group: GroupId, leaving: &mut Leaving) -> SmallVec<[u32; 4]> {
        let mut copies = |next: &Next| match (self.slots.get(next.slot), next.forward) {
            (Some(sequence), Some(forward)) if self.config.kind(group).is_recurrent() => {
                let from_hit = !next.hit.is_empty();
                self.goes_on_from_copy(sequence, group, forward.start, from_hit, leaving)
                    && !self.keeps_state(next, group)
            }
            (Some(sequence), Some(forward)) => self.copies_first(sequence, group, forward.start, leaving),
            _ => false,
        };
        let copies: SmallVec<[bool; 4]> = batch.nexts.iter().map(&mut copies).collect();
        let without_twins = self.balances(&Batch { twins: &[], ..*batch }, group, &copies);
        if self.config.kind(group).is_recurrent() || batch.twins.iter().all(Twins::is_empty) {
            return without_twins;
        }
        // Who holds a twin's page may lose it, when it lets go, to who adopts it: less may be needed as if nobody did.
        let with_twins = self.balances(batch, group, &copies);
        std::cmp::min_by_key(with_twins, without_twins, |needs| needs.iter().sum::<u32>())
    }

    fn balances(&self, batch: &Batch<'_>, group: GroupId, copies: &[bool]) -> SmallVec<[u32; 4]> {
        let nexts = batch.nexts;
        let mut users: HashMap<PageId, Users> = HashMap::new();
        for (index, &copies) in copies.iter().enumerate() {
            self.pages_of(batch, index, group, copies, |_, page, fate| {
                let users = users.entry(page).or_insert_with(|| Users { all_peak: true, ..Users::default() });
                users.holders += u32::from(fate.is_held());
                users.awaited += u32::from(fate == Fate::Awaited);
                // It is free when those have let go of it that keep it now.
                if fate.comes_back() && (fate.stays() || users.owner.is_none()) {
                    users.owner = Some(index);
                }
                users.later += u32::from(fate.stays());
                users.last = index;
            });
        }
        let pool = &self.pools[group];
        // Planned copies end before the next forward, and so does the one that a request waits for.
        let pinned = |page, users: &Users| {
            let pins = pool.pins(page);
            pins > users.awaited && pins > users.awaited + self.planned_pins(group, page)
        };
        let outside = |page, users: &Users| pool.refs(page) > users.holders || pinned(page, users);
        let shared = |page, users: &Users| users.later > 1 || outside(page, users);
        let mut balances: SmallVec<[i64; 4]> = SmallVec::new();
        for (index, (next, &copies)) in nexts.iter().zip(copies).enumerate() {
            let mut share = Share::default();
            self.pages_of(batch, index, group, copies, |block, page, fate| match users.get(&page) {
                Some(users) if !shared(page, users) => {
                    share.own += u32::from(fate.comes_back() && users.owner == Some(index)); // once
                }
                _ if fate == Fate::Adopted => share.adopted.push(block),
                _ if fate.stays() => share.with_others.push(block),
                _ => {}
            });
            share.adopted.retain(|block| !share.with_others.contains(block));
            let (mut most, mut peak) = if self.config.kind(group).is_recurrent() {
                self.state_peaks(next, group, batch.two_steps, &share)
            } else {
                self.peaks(next, group, batch.two_steps, &share)
            };
            if let Some(back) = &next.back {
                let held = back.rows[group.index()].shape.pages();
                most = most.max(held - share.with_others.len() as u32);
                peak = peak.max(held);
            }
            // It may need the most while it has such a page, or as it stands.
            if most < peak || most <= share.own {
                self.pages_of(batch, index, group, copies, |_, page, fate| {
                    if let Some(users) = users.get_mut(&page).filter(|_| fate.stays()) {
                        users.all_peak = false;
                    }
                });
            }
            balances.push(i64::from(most) - i64::from(share.own));
        }
        let shared = || users.iter().filter(|(page, users)| shared(**page, users));
        for (&page, users) in shared() {
            // Held now, and gone when all are at their peak.
            balances[users.last] -= i64::from(users.all_peak && !outside(page, users));
        }
        let mut needs: SmallVec<[u32; 4]> =
            balances.into_iter().map(|balance| u32::try_from(balance).unwrap_or(0)).collect();
        for (&page, users) in shared() {
            // Idle now, and there for none of those who find it to give back.
            needs[users.last] += u32::from(pool.is_evictable(page));
        }
        needs
    }

    /// The pages of a request of the batch in a group, now or after its next `alloc`, with their blocks and what it does to
    /// them.
    fn pages_of(
        &self,
        batch: &Batch<'_>,
        index: usize,
        group: GroupId,
        copies: bool,
        mut each: impl FnMut(u32, PageId, Fate),
    ) {
        let (next, found) = (&batch.nexts[index], batch.found);
        let twins = batch.twins.get(index).zip(self.slots.get(next.slot));
        for (block, page) in twins.iter().flat_map(|(twins, sequence)| self.adoptions(sequence, twins, group))
        {
            each(block, page, Fate::Adopted);
        }
        if let Some(back) = &next.back {
            back.rows[group.index()].stored().for_each(|(block, page)| each(block, page, Fate::Found));
            return;
        }
        let (Some(sequence), Some(forward)) = (self.slots.get(next.slot), next.forward) else { return };
        let page_size = self.config.page_size;
        let kind = self.config.kind(group);
        let needed = kind.needed(forward.start, page_size);
        let found_from = sequence.nodes.len() as u32;
        let first = if kind.is_recurrent() {
            state_block(forward.start, page_size)
        } else {
            forward.start / page_size
        };
        // A load moves the request as a hit does.
        let (replaced, moves) = match &sequence.load {
            Some(load) => (load.first..load.end, true),
            None => (found_from..next.hit_end, next.hit_end > 0),
        };
        for (block, page) in sequence.row(group).held() {
            let block = block as u32;
            let fate = if replaced.contains(&block) || moves && !needed.has(block) {
                Fate::GivenBack
            } else if copies && block == first {
                Fate::Copied
            } else {
                Fate::Kept
            };
            each(block, page, fate);
        }
        let awaited = self.awaited_pages(sequence, group);
        sequence.on_the_way(group, |block, page| {
            let kept = if awaited.contains(&page) { Fate::Awaited } else { Fate::Kept };
            each(block.unwrap_or(0), page, if block.is_some() { kept } else { Fate::GivenBack });
        });
        let found_blocks = (found_from..next.hit_end).filter(|&block| needed.has(block));
        for (block, &page) in found_blocks.zip(found.pages(&next.hit, group)) {
            each(block, page, Fate::Found);
        }
    }

    /// The pages of a group that the copy fills which a request waits for.
    fn awaited_pages(&self, sequence: &Sequence, group: GroupId) -> HashSet<PageId> {
        let returning = sequence.suspension.as_ref().and_then(|suspension| suspension.copy());
        let awaited = sequence.load.as_ref().map(|load| load.copy).or(returning);
        let copy = awaited.and_then(|copy| self.copies.in_flight.get(&copy.0));
        let pages = copy.into_iter().flat_map(|copy| copy.pages.iter());
        pages.filter(|&(of, _)| of == group).map(|(_, page)| page).collect()
    }

    /// The most blocks that a request will hold at one time in a group that forgets, without those it has with others
    /// and with them.
    pub(crate) fn peaks(&self, next: &Next, group: GroupId, two_steps: bool, share: &Share) -> (u32, u32) {
        let (Some(sequence), Some(forward)) = (self.slots.get(next.slot), next.forward) else {
            return (0, 0);
        };
        let (kind, page_size) = (self.config.kind(group), self.config.page_size);
        let prompt_blocks = sequence.prompt_end / page_size;
        let (mut most, mut peak) = (0, 0);
        let mut at = |start: u32, end: u32| {
            let beams = sequence.beams - 1;
            let other_beams = beams.saturating_mul(kind.held_from(prompt_blocks, start, end, page_size));
            let held = kind.held(start, end, page_size).saturating_add(other_beams);
            let needed = kind.needed(start, page_size);
            let shared = share.with_others.iter().filter(|&&block| needed.has(block)).count();
            let computed = |&&block: &&u32| needed.has(block) && (block + 1) * page_size <= start;
            let adopted = share.adopted.iter().filter(computed).count();
            most = most.max(held - (shared + adopted) as u32);
            peak = peak.max(held);
        };
        // Where it has let go of what is behind: at the results that it knows then, or at a hit.
        let known = if sequence.steps_out.is_empty() || next.hit_end > 0 {
            forward.start
        } else {
            sequence.processed.min(sequence.known()).max(sequence.computed_then(two_steps))
        };
        let steps = 1 + u32::from(two_steps);
        let (room, drafts) = (sequence.room_at_end(two_steps), 2 * sequence.drafts);
        let tokens = sequence.most_tokens(&self.config);
        // No more forwards are out at a time than these.
        if let Some(more) = steps.checked_sub(1 + sequence.steps_out.len() as u32) {
            at(known, self.covered_next(next, group, more > 0).min(tokens + room));
        }
        let given = sequence.prompt_end.max(sequence.len());
        if known < given {
            let chunks = next.most.saturating_mul(steps);
            let last = given.saturating_sub(chunks).max(known);
            // At the end, and before each block is adopted.
            let before = share.adopted.iter().map(|block| (block + 1) * page_size - 1);
            for last in before.filter(|before| (known..last).contains(before)).chain([last]) {
                kind.fullest(known, last, page_size, |start| {
                    at(start, start.saturating_add(chunks).min(given) + drafts);
                });
            }
            let last = given.saturating_sub(next.most).max(known);
            at(last, (given + steps - 1).min(tokens) + drafts);
        }
        let first = known.max(sequence.prompt_end);
        if first < tokens {
            at(tokens - 1, tokens + room);
            let last = tokens.saturating_sub(steps).max(first);
            kind.fullest(first, last, page_size, |start| at(start, (start + steps).min(tokens) + room));
        }
        (most, peak)
    }
}

impl Sequence {
    /// Tells of the pages of a group that it waits for, each with its block; without one if it is given back when the
    /// request is here.
    fn on_the_way(&self, group: GroupId, mut each: impl FnMut(Option<u32>, PageId)) {
        if let Some(load) = &self.load {
            let row = &load.rows[group.index()];
            let behind = load.end.max(self.row(group).pages.len() as u32);
            let blocks = (load.first..).zip(&row.pages).chain((behind..).zip(&row.rest));
            let held = blocks.filter(|&(_, &page)| page != PageId::NULL);
            held.for_each(|(block, &page)| each(Some(block), page));
            row.spare.iter().for_each(|&page| each(None, page));
        }
        if let Some(suspension) = &self.suspension {
            suspension.blocks_returning(group).for_each(|(block, page)| each(Some(block as u32), page));
        }
    }

    /// Tokens that are computed at least when the next forward is planned, by those whose results it waits for.
    pub(crate) fn computed_then(&self, two_steps: bool) -> u32 {
        let awaited = self.steps_out.len().checked_sub(1 + usize::from(two_steps));
        awaited.map_or(0, |last| self.steps_out[last].end)
    }

    /// Tokens that there are pages for behind the last one.
    fn room_at_end(&self, two_steps: bool) -> u32 {
        self.drafts * (2 + u32::from(two_steps))
    }
}

impl GroupKind {
    /// Of the forwards that start at the tokens `from ..= to` and compute equally many, at least one that holds the most
    /// blocks, and the latest such.
    pub(crate) fn fullest(&self, from: u32, to: u32, page_size: u32, mut each: impl FnMut(u32)) {
        each(to);
        match *self {
            GroupKind::Full | GroupKind::Recurrent(_) | GroupKind::Scratch | GroupKind::Cross => {}
            GroupKind::Window { window, .. } => {
                // The window begins at the last token of a page.
                let behind = (i64::from(to) + 2 - i64::from(window)).rem_euclid(i64::from(page_size)) as u32;
                if to - from >= behind {
                    each(to - behind);
                }
            }
            GroupKind::Chunked { chunk } => {
                // At the end of a chunk; where chunks begin in a page is the same again after so many.
                let ends = (to + 1) / chunk;
                for end in (1..=ends).rev().take((page_size / gcd(chunk, page_size)) as usize) {
                    if end * chunk > from {
                        each(end * chunk - 1);
                    }
                }
            }
        }
    }
}

fn gcd(a: u32, b: u32) -> u32 {
    if b == 0 { a } else { gcd(b, a % b) }
}
