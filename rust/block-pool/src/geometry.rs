//! How large a huge page is to be: the search for a size that the pages of all groups of a slab tile well.
//!
//! The least common multiple of the page sizes wastes nothing. Where it is too large, pages are padded: each at its
//! own end, and to a whole number of its rows, so that all pages of a group lie at one distance from each other over
//! the whole slab, no row is cut, and a kernel needs a page id and a stride. Nothing is left at the end of a huge page.
//!
//! Which sizes come into question depends on the pages and the limits alone. With a budget it is the one of them with
//! room for most requests: each has room for no fewer with more memory, and so has the best one.

use std::cmp::Reverse;

use thiserror::Error;

/// The pages of a group, before any padding.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PageShape {
    /// Bytes of a page: a multiple of `row_bytes`.
    pub page_bytes: u64,
    /// Bytes that padding must not cut: of one token and head in one layer, say; 1 if there is no such thing.
    pub row_bytes: u64,
    /// Pages that a request holds at one time, at most, of the requests that a slab is for.
    pub request_pages: u32,
}

/// What the search may choose.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct GeometryLimits {
    /// Part of a padded page that padding may be, in every group: at least 0, below 1.
    pub max_padding: f64,
    /// Bytes of the largest huge page.
    pub max_huge_bytes: u64,
    /// Most pages of a group in a huge page.
    pub max_ratio: u32,
}

impl Default for GeometryLimits {
    /// Padding of 5 %, 128 MiB, 256 pages.
    fn default() -> GeometryLimits {
        GeometryLimits { max_padding: 0.05, max_huge_bytes: 128 << 20, max_ratio: 256 }
    }
}

/// Page sizes or limits that cannot be worked with, or for which there is no huge page.
#[derive(Clone, PartialEq, Debug, Error)]
pub enum GeometryError {
    /// No group.
    #[error("a slab needs the page size of at least one group")]
    NoGroups,
    /// A page that is empty, or not whole rows.
    #[error("group {group}: pages of {page_bytes} bytes must be one or more rows of {row_bytes} bytes")]
    Page {
        /// Place of the group among those given.
        group: usize,
        /// What was given.
        page_bytes: u64,
        /// What was given.
        row_bytes: u64,
    },
    /// A padding that is none.
    #[error("max_padding {0}: must be at least 0 and below 1")]
    Padding(f64),
    /// A ratio that leaves nothing to choose.
    #[error("max_ratio 0: must be at least 1 page of a group in a huge page")]
    Ratio,
    /// No size within the limits.
    #[error(
        "no huge page of at most {limit} bytes holds pages of {page_bytes:?} bytes with padding of at most \
         {max_padding}: allow larger huge pages{}, more padding or more pages in one, or give groups slabs of their \
         own",
        .exact.map_or(String::new(), |exact| format!(" ({exact} bytes would need none)"))
    )]
    TooCoarse {
        /// Bytes of the largest huge page that was allowed.
        limit: u64,
        /// The pages.
        page_bytes: Vec<u64>,
        /// Padding that was allowed.
        max_padding: f64,
        /// Least common multiple of the page sizes, if it is a size at all.
        exact: Option<u64>,
    },
}

/// How the pages of a group tile a huge page.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Tiling {
    /// Pages in a huge page.
    pub ratio: u32,
    /// Bytes of a page.
    pub page_bytes: u64,
    /// Bytes from one page to the next: `ratio` of them are the huge page.
    pub padded_bytes: u64,
}

impl Tiling {
    /// Part of the memory that is padding, 0 to 1.
    pub fn padding(&self) -> f64 {
        fraction((self.padded_bytes - self.page_bytes).into(), self.padded_bytes)
    }
}

/// A huge page and how each group tiles it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Geometry {
    /// Bytes of a huge page.
    pub huge_bytes: u64,
    /// The groups, in the order in which they were given.
    pub tilings: Vec<Tiling>,
}

/// A slab within a budget.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SlabFit {
    /// Usable huge pages.
    pub huge_pages: u32,
    /// Bytes of the null huge page.
    pub null_bytes: u64,
    /// Bytes of the budget that are less than a huge page.
    pub unusable_bytes: u64,
}

impl Geometry {
    /// The geometry with room for most requests in `budget` bytes, and of those the one that wastes least of them: the
    /// padding, averaged over the groups; what is left of the budget; the null huge page; and one huge page a group,
    /// since a group keeps the rest of its last one from the others. Without a budget, the one with the least padding,
    /// and of those the smallest: the least common multiple of the page sizes, if the limits allow it.
    ///
    /// With a larger budget there is room for as many requests or more.
    ///
    /// # Errors
    /// [`GeometryError`] for sizes and limits that make no sense, and when nothing is within the limits, whatever the
    /// budget.
    pub fn search(
        pages: &[PageShape],
        limits: &GeometryLimits,
        budget: Option<u64>,
    ) -> Result<Geometry, GeometryError> {
        check(pages, limits)?;
        let exact = pages.iter().try_fold(1, |multiple, page| lcm(multiple, page.page_bytes));
        let within = |geometry: &Geometry| {
            geometry.huge_bytes <= limits.max_huge_bytes && geometry.worst_padding() <= limits.max_padding
        };
        let ranked = |geometry: Geometry| {
            let requests = budget.map_or(0, |budget| geometry.requests(budget, pages));
            (Reverse(requests), geometry.waste(budget), geometry)
        };
        candidates(pages, limits, exact)
            .filter(within)
            .map(ranked)
            .min_by(|one, other| {
                let by_requests = one.0.cmp(&other.0);
                let then_by_waste = by_requests.then(one.1.total_cmp(&other.1));
                then_by_waste.then(one.2.huge_bytes.cmp(&other.2.huge_bytes))
            })
            .map(|(_, _, geometry)| geometry)
            .ok_or_else(|| GeometryError::TooCoarse {
                limit: limits.max_huge_bytes,
                page_bytes: pages.iter().map(|page| page.page_bytes).collect(),
                max_padding: limits.max_padding,
                exact,
            })
    }

    fn of(pages: &[PageShape], huge_bytes: u64, ratios: &[u64]) -> Geometry {
        let tiling = |(page, &ratio): (&PageShape, &u64)| Tiling {
            ratio: ratio as u32,
            page_bytes: page.page_bytes,
            padded_bytes: huge_bytes / ratio,
        };
        Geometry { huge_bytes, tilings: pages.iter().zip(ratios).map(tiling).collect() }
    }

    /// Requests that `budget` bytes have room for at a time, each with its pages of every group.
    fn requests(&self, budget: u64, pages: &[PageShape]) -> u64 {
        let there = u64::from(self.fit(budget).huge_pages);
        let groups =
            || self.tilings.iter().zip(pages).map(|(tiling, page)| (tiling.ratio, page.request_pages));
        let taken = |requests: u64| -> u64 {
            groups().map(|(ratio, pages)| (requests * u64::from(pages)).div_ceil(ratio.into())).sum()
        };
        let alone = groups().filter(|&(_, pages)| pages > 0);
        let most = alone.map(|(ratio, pages)| there * u64::from(ratio) / u64::from(pages)).min();
        let (mut enough, mut too_many) = (0, most.map_or(1, |most| most + 1));
        while too_many - enough > 1 {
            let middle = u64::midpoint(enough, too_many);
            if taken(middle) <= there {
                enough = middle;
            } else {
                too_many = middle;
            }
        }
        enough
    }

    /// Part of a budget that holds no page, 0 to 1 unless the budget is too small; without one, of any memory.
    fn waste(&self, budget: Option<u64>) -> f64 {
        let aside = budget.map_or(0.0, |budget| {
            let huge_pages = u128::from(self.huge_bytes) * (1 + self.tilings.len() as u128);
            fraction(huge_pages + u128::from(budget % self.huge_bytes), budget)
        });
        self.padding() + aside
    }

    /// Part of the memory that is padding, 0 to 1, when each group has as many huge pages.
    pub fn padding(&self) -> f64 {
        self.tilings.iter().map(Tiling::padding).sum::<f64>() / f64::from(self.tilings.len() as u32)
    }

    /// The same of the group that pads most.
    pub fn worst_padding(&self) -> f64 {
        self.tilings.iter().map(Tiling::padding).fold(0.0, f64::max)
    }

    /// The slab that `budget` bytes are enough for; as many huge pages as the ids of all groups can number.
    pub fn fit(&self, budget: u64) -> SlabFit {
        let most = self.tilings.iter().map(|tiling| (1 << 31) / u64::from(tiling.ratio)).min().unwrap_or(0);
        let all = (budget / self.huge_bytes).min(most);
        SlabFit {
            huge_pages: all.saturating_sub(1) as u32,
            null_bytes: if all > 0 { self.huge_bytes } else { 0 },
            unusable_bytes: budget - all * self.huge_bytes,
        }
    }
}

fn check(pages: &[PageShape], limits: &GeometryLimits) -> Result<(), GeometryError> {
    if pages.is_empty() {
        return Err(GeometryError::NoGroups);
    }
    for (group, &PageShape { page_bytes, row_bytes, .. }) in pages.iter().enumerate() {
        if page_bytes == 0 || row_bytes == 0 || page_bytes % row_bytes != 0 {
            return Err(GeometryError::Page { group, page_bytes, row_bytes });
        }
    }
    if !(0.0..1.0).contains(&limits.max_padding) {
        return Err(GeometryError::Padding(limits.max_padding));
    }
    if limits.max_ratio == 0 {
        return Err(GeometryError::Ratio);
    }
    Ok(())
}

/// The sizes that come into question: the least common multiple, and about as much as 1, 2 and more pages of each group.
fn candidates<'a>(
    pages: &'a [PageShape],
    limits: &'a GeometryLimits,
    exact: Option<u64>,
) -> impl Iterator<Item = Geometry> + 'a {
    let exact = exact.and_then(|huge| {
        let ratios: Vec<u64> = pages.iter().map(|page| huge / page.page_bytes).collect();
        let few = ratios.iter().all(|&ratio| ratio <= limits.max_ratio.into());
        few.then(|| Geometry::of(pages, huge, &ratios))
    });
    let anchors =
        (0..pages.len()).flat_map(|anchor| (1..=limits.max_ratio).map(move |ratio| (anchor, ratio)));
    exact
        .into_iter()
        .chain(anchors.filter_map(move |(anchor, ratio)| grow(pages, limits, anchor, ratio.into())))
}

/// A geometry about as large as `ratio` pages of group `anchor`. One group after the other gets the ratio at which the
/// size grows least beside what its own pages leave empty; a huge page of these ratios is a multiple of each ratio
/// times the group's rows.
fn grow(pages: &[PageShape], limits: &GeometryLimits, anchor: usize, ratio: u64) -> Option<Geometry> {
    let mut ratios = vec![0; pages.len()];
    ratios[anchor] = ratio;
    let mut huge = ratio.checked_mul(pages[anchor].page_bytes)?;
    let mut unit = ratio.checked_mul(pages[anchor].row_bytes)?;
    for (group, page) in pages.iter().enumerate().filter(|&(group, _)| group != anchor) {
        let most = (huge / page.page_bytes).clamp(1, limits.max_ratio.into());
        let empty = |ratio: &u64| fraction(huge.saturating_sub(ratio * page.page_bytes).into(), huge);
        let few_enough = (1..=most).rev().take_while(|ratio| empty(ratio) <= limits.max_padding);
        let candidates = few_enough.filter_map(|ratio| {
            let unit = lcm(unit, ratio.checked_mul(page.row_bytes)?)?;
            let huge = huge.max(ratio.checked_mul(page.page_bytes)?).checked_next_multiple_of(unit)?;
            let empty = huge - ratio * page.page_bytes;
            (huge <= limits.max_huge_bytes).then_some((huge, unit, ratio, empty))
        });
        let grown = |&(size, _, _, empty): &(u64, u64, u64, u64)| u128::from(size - huge) + u128::from(empty);
        (huge, unit, ratios[group], _) = candidates.min_by_key(grown)?;
    }
    Some(Geometry::of(pages, huge, &ratios))
}

#[expect(clippy::cast_precision_loss, reason = "a share of memory, to compare and to show")]
fn fraction(part: u128, whole: u64) -> f64 {
    part as f64 / whole as f64
}

/// Least common multiple, if it is a `u64`.
fn lcm(one: u64, other: u64) -> Option<u64> {
    let (mut a, mut b) = (one, other);
    while b != 0 {
        (a, b) = (b, a % b);
    }
    (one / a).checked_mul(other)
}
