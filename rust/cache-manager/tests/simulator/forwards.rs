//! What the engine hands to the device.

use crate::device::{Forward, Work};
use crate::engine::Engine;
use crate::live::Out;
use crate::world::World;
use block_hash::Token;
use block_pool::{GroupId, PageId, Step};
use cache_manager::{LedgerError, SlotId, VarlenTables};

/// One request of a batch as the tables say: one past its last computed token, and how many are computed.
struct Told {
    end: usize,
    computed: usize,
}

impl<W: World> Engine<W> {
    /// Closes the open step and hands it to the device, which runs it some time later.
    pub(crate) fn launch(&mut self) -> Result<(), String> {
        let (step, open) = self.ledger.newest_step();
        if !open {
            return Ok(());
        }
        let planned: Vec<usize> = (0..self.live.len()).filter(|&index| self.live[index].planned).collect();
        let batch: Vec<SlotId> = planned.iter().map(|&index| self.live[index].slot).collect();
        self.note(|| format!("launch step {}: {batch:?}", step.0));
        let told = self.tables(&batch).map_err(|error| format!("tables: {error}"))?;
        self.ledger.close_step();
        let mut launched = Vec::with_capacity(planned.len());
        for (&index, told) in planned.iter().zip(told) {
            launched.push(self.launch_one(index, step, &told)?);
        }
        let copies = self.ledger.take_page_copies(GroupId::FIRST);
        let at = self.world.now() + self.random.below(20) as u64;
        self.world.launch(Forward { step, at, copies, batch: launched });
        Ok(())
    }

    fn tables(&mut self, batch: &[SlotId]) -> Result<Vec<Told>, LedgerError> {
        let shape = self.ledger.batch_shape(batch)?;
        let (mut lengths, mut starts) = (vec![0; batch.len()], vec![0; batch.len() + 1]);
        let mut mapping = vec![0; shape.total_active as usize];
        let mut tables =
            VarlenTables { seq_lens: &mut lengths, slot_mapping: &mut mapping, query_start_loc: &mut starts };
        self.ledger.write_varlen(GroupId::FIRST, batch, &mut tables)?;
        let unsigned = |number: i32| usize::try_from(number).expect("tables hold no negative number");
        let told = lengths.iter().zip(starts.windows(2)).map(|(&length, tokens)| Told {
            end: unsigned(length),
            computed: unsigned(tokens[1] - tokens[0]),
        });
        Ok(told.collect())
    }

    /// One request's part of a forward. The device knows by then how many drafts of the forward before were right,
    /// and so where the request stands; the ledger may learn it later.
    fn launch_one(&mut self, index: usize, step: Step, told: &Told) -> Result<Work, String> {
        let page_size = self.ledger.config().page_size as usize;
        let live = &mut self.live[index];
        let row = self.ledger.pages(live.slot, GroupId::FIRST).map_err(|error| error.to_string())?.to_vec();
        let active = self.ledger.position(live.slot).map_or(0, |position| position.active as usize);
        let drafts = told.computed - active;
        let moved: usize = live.out.iter().map(|out| out.sampled.len().saturating_sub(1)).sum();
        let end = told.end - drafts + moved;
        let mut sampled = Vec::new();
        if end == live.log.len() {
            for _ in 0..=self.random.below(drafts + 1) {
                let token = (200 + self.random.below(3)) as Token;
                sampled.push(token);
                live.push(token);
            }
        }
        // Drafts that were right have KV now; the drafter writes as many again behind them.
        let computed = end + sampled.len().saturating_sub(1);
        let guessed_to = if sampled.is_empty() { computed } else { end + 2 * live.drafts };
        let cell = |token: usize| row[token / page_size].index() * page_size + token % page_size;
        let written: Vec<usize> = (end - active..computed).map(cell).collect();
        let guessed: Vec<usize> = (computed..guessed_to).map(cell).collect();
        let kv = live.kv[..computed].to_vec();
        live.planned = false;
        live.out.push_back(Out { step: step.0, sampled });
        let cells = written.iter().chain(&guessed);
        cells.map(|cell| PageId((cell / page_size) as u32)).try_for_each(|page| self.check_written(page))?;
        Ok(Work { row, written, kv, guessed })
    }

    /// A page that a forward writes to is nobody's but its request's. What a fork let go of may be copied meanwhile: a
    /// step planned before writes behind its tokens.
    fn check_written(&self, page: PageId) -> Result<(), String> {
        let pool = self.ledger.pool();
        let copies = self.world.copied_pages().iter().filter(|(_, copied)| *copied == page).count();
        let leaving = self.leaving.iter().filter(|job| self.ledger.is_copying(job.id.0));
        let harmless = leaving.filter(|job| job.pages.contains(&page)).count();
        if pool.refs(page) == 0 || pool.node(page).is_some() || copies > harmless {
            return Err(format!("a forward writes to {page}, which others read"));
        }
        Ok(())
    }
}
