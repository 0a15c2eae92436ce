//! How the pages of several groups tile one slab.

use block_pool::{Geometry, GeometryLimits, PageShape};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

/// Bytes of a page, bytes of a row in it, and pages that a request holds.
type Pages = (u64, u64, u32);
/// Pages in a huge page, and bytes of a padded one.
type Tiling = (u32, u64);

/// A slab of at most `budget` bytes for groups with pages of `(bytes, bytes of a row, pages in a request)`: bytes of a
/// huge page, usable huge pages beside the null one, and for each group its pages in a huge page and the bytes of a
/// padded page.
#[pyfunction]
#[pyo3(signature = (pages, budget, *, max_padding, max_huge_bytes, max_ratio))]
pub(crate) fn slab_geometry(
    pages: Vec<Pages>,
    budget: u64,
    max_padding: f64,
    max_huge_bytes: u64,
    max_ratio: u32,
) -> PyResult<(u64, u32, Vec<Tiling>)> {
    let shape = |(page_bytes, row_bytes, request_pages)| PageShape { page_bytes, row_bytes, request_pages };
    let shapes: Vec<PageShape> = pages.into_iter().map(shape).collect();
    let limits = GeometryLimits { max_padding, max_huge_bytes, max_ratio };
    let geometry = Geometry::search(&shapes, &limits, Some(budget))
        .map_err(|error| PyValueError::new_err(error.to_string()))?;
    let tilings = geometry.tilings.iter().map(|tiling| (tiling.ratio, tiling.padded_bytes)).collect();
    Ok((geometry.huge_bytes, geometry.fit(budget).huge_pages, tilings))
}
