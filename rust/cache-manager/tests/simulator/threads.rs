//! A tier of real threads: the product's connector, its lanes and its copies, which are slow and may fail. The
//! device runs in the thread of the ledger.

use crate::device::{Device, Forward};
use crate::random::Random;
use crate::slow::{Faulty, Slow};
use crate::world::{World, check_copied};
use block_pool::{EvictionPolicy, GroupId, PageId};
use cache_manager::{BlockKey, CopyEnd, CopyJob, Ledger, LedgerConfig, OffloadJob, OuterTier, PrivateTier};
use completion::Completion;
use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;
use tiered_connector::connector::{Closed, NoUnits, TieredConnector};
use tiered_connector::groups::TieredGroups;
use tiered_connector::job::{Direction, Origin, TierKey, UnitId};

/// Longest wait for copies that nothing holds up.
const PATIENCE: Duration = Duration::from_secs(30);

pub(crate) struct Threads {
    now: u64,
    device: Device,
    connector: TieredGroups,
    engine: Arc<Slow>,
    /// Real time that passes with each moment.
    moment: Duration,
    is_refused: usize,
    /// Copies that the connector took and did not tell of.
    in_flight: BTreeSet<u64>,
    told: Vec<(u64, CopyEnd)>,
    /// Blocks that were offered and asked for.
    blocks: (u64, u64),
    random: Random,
}

impl Threads {
    pub(crate) fn new(config: &LedgerConfig, faulty: Option<Faulty>, random: &mut Random) -> Threads {
        let policies = [EvictionPolicy::PriorityLru, EvictionPolicy::PrioritySlru];
        let device = Device::new(config.groups[0].pages, config.page_size);
        let units = 3 + random.below(20) as u32;
        let engine = Arc::new(Slow::new(&device, config.groups[0].pages, units, faulty, random));
        let unit_bytes = device.bytes() / (config.groups[0].pages as usize + 1);
        let (policy, lanes) = (policies[random.below(2)], 1 + random.below(3));
        let connector = TieredConnector::new(units, unit_bytes, policy, lanes, Box::new(Arc::clone(&engine)));
        Threads {
            now: 0,
            device,
            connector: TieredGroups::new(vec![connector.expect("the system has a few threads left")]),
            engine,
            moment: Duration::from_micros([5, 20, 100][random.below(3)]),
            is_refused: [0, 12][random.below(2)],
            in_flight: BTreeSet::new(),
            told: Vec::new(),
            blocks: (0, 0),
            random: Random(random.next()),
        }
    }

    pub(crate) fn connector(&self) -> &TieredConnector {
        &self.connector.groups()[0]
    }

    fn run_until(&mut self, until: u64) -> Result<(), String> {
        while self.device.next_at().is_some_and(|at| at <= until) {
            self.device.run_one()?;
            self.engine.pass_fence(self.device.last_run());
        }
        Ok(())
    }
}

impl World for Threads {
    fn now(&self) -> u64 {
        self.now
    }

    fn device(&self) -> &Device {
        &self.device
    }

    fn launch(&mut self, forward: Forward) {
        self.device.launch(forward);
    }

    fn pass(&mut self, time: u64) -> Result<(), String> {
        let until = self.now.saturating_add(time);
        self.run_until(until)?;
        if until == u64::MAX {
            let ends = self.connector.drain(PATIENCE);
            self.engine.catch_up();
            return if ends { Ok(()) } else { Err("copies do not end".into()) };
        }
        self.now = until;
        self.engine.catch_up();
        std::thread::sleep(self.moment * time as u32);
        Ok(())
    }

    fn reset(&mut self) {
        self.connector.reset().expect("no process was forked");
    }

    fn shut_down(&mut self) {
        let timeout = if self.random.one_in(2) { Duration::ZERO } else { Duration::from_millis(2) };
        self.connector.shutdown(timeout);
        self.engine.catch_up();
    }

    fn learn(&mut self, _: TierKey, _: &[u64]) {}

    fn take_told(&mut self) -> Vec<(u64, CopyEnd)> {
        std::mem::take(&mut self.told)
    }

    fn copied_pages(&self) -> Vec<(Direction, PageId)> {
        self.engine.copied_pages()
    }

    fn private_units(&self) -> Vec<UnitId> {
        self.connector.groups()[0].private_units().expect("no process was forked")
    }

    fn check_away(&self, _: u64, _: &[u64]) -> Result<(), String> {
        Ok(()) // it shows when the request comes back
    }

    fn check(&mut self, ledger: &Ledger) -> Result<(), String> {
        if let Some(fault) = self.engine.take_fault() {
            return Err(fault);
        }
        self.connector.groups()[0].verify().map_err(|fault| format!("index: {fault}"))?;
        for &copy in &self.in_flight {
            if !ledger.is_copying(copy) || !self.connector.is_copying(copy) {
                return Err(format!("copy {copy} is in flight for the ledger or the connector alone"));
            }
        }
        check_copied(ledger, &self.copied_pages())
    }

    fn check_end(&self) -> Result<(), String> {
        let metrics = self.connector.groups()[0].metrics();
        let index = metrics.index;
        let offered = index.stored + index.unstored + index.known + index.no_unit;
        if (offered, index.loaded + index.unloaded) != self.blocks || metrics.jobs > 0 {
            return Err(format!("offered and asked for were {:?} blocks: {metrics:?}", self.blocks));
        }
        Ok(())
    }
}

impl OuterTier for Threads {
    fn leading(&mut self, keys: &mut dyn Iterator<Item = BlockKey>) -> usize {
        OuterTier::leading(&mut &self.connector, keys)
    }

    fn has(&mut self, group: GroupId, key: &BlockKey) -> bool {
        OuterTier::has(&mut &self.connector, group, key)
    }

    fn load(&mut self, keys: &[BlockKey], job: &CopyJob) -> Option<Completion> {
        if self.random.one_in(self.is_refused) {
            return None;
        }
        let begun = OuterTier::load(&mut &self.connector, keys, job)?;
        self.blocks.1 += keys.len() as u64;
        self.in_flight.insert(job.id.0);
        Some(begun)
    }

    fn offload(&mut self, job: &OffloadJob, origin: &dyn Fn(usize) -> Origin) -> bool {
        let takes =
            !self.random.one_in(self.is_refused) && OuterTier::offload(&mut &self.connector, job, origin);
        if takes {
            self.blocks.0 += job.keys.len() as u64;
            self.in_flight.insert(job.copy.id.0);
        }
        takes
    }

    fn touch(&mut self, hashes: &[u64]) {
        self.connector.touch(hashes);
    }

    fn take_ended(&mut self) -> Vec<(u64, CopyEnd)> {
        let ended = OuterTier::take_ended(&mut &self.connector);
        for (copy, _) in &ended {
            self.in_flight.remove(copy);
        }
        self.told.extend_from_slice(&ended);
        ended
    }
}

impl PrivateTier for Threads {
    fn check_open(&mut self) -> Result<(), Closed> {
        self.connector.check_open()
    }

    fn reserve(&mut self, group: GroupId, count: usize) -> Result<Vec<UnitId>, NoUnits> {
        self.connector.reserve(group, count)
    }

    fn store_private(&mut self, units: &[UnitId], job: &CopyJob) -> Result<Completion, Closed> {
        self.in_flight.insert(job.id.0);
        PrivateTier::store_private(&mut &self.connector, units, job)
    }

    fn load_private(&mut self, units: &[UnitId], job: &CopyJob) -> Result<Completion, Closed> {
        self.in_flight.insert(job.id.0);
        PrivateTier::load_private(&mut &self.connector, units, job)
    }

    fn free_private(&mut self, group: GroupId, units: &[UnitId]) {
        PrivateTier::free_private(&mut &self.connector, group, units);
    }
}
