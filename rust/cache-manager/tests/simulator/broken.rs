//! Faults that the simulator must find.

/// What a broken variant does.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Broken {
    /// Blocks are found when their store begins.
    FindsBlocksEarly,
    /// The ledger is told that a load has ended when it begins.
    EndsLoadsEarly,
    /// The ledger is told that an offload has ended when it begins: its pages are used again.
    EndsOffloadsEarly,
    /// Stores and loads wait for no forward.
    IgnoresFences,
    /// A copy of several jobs ends with the first.
    EndsWithFirstJob,
    /// Units count as read when a load begins: they are given to other blocks.
    FreesUnitsEarly,
    /// The index is told that failed stores ended well.
    TrustsFailedStores,
    /// The ledger is told that failed loads ended well.
    TrustsFailedLoads,
    /// A reset forgets nothing here.
    KeepsBlocksAtReset,
    /// The ledger is told that a copy ahead of eviction has ended when it begins: its pages are used again.
    EndsDemotionsEarly,
    /// The ledger is told that a suspension has ended when it begins.
    EndsSuspensionsEarly,
    /// Private units are given to blocks.
    GivesHeldUnitsAway,
    /// Private units that are let go are given away while a copy uses them.
    FreesPrivateUnitsEarly,
    /// Private units are read in another order than they were written.
    MixesPrivateUnits,
    /// Blocks are loaded into pages of others before a request needs them.
    MixesPrefetchedBlocks,
}
