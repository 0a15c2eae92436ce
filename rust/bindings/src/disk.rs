//! The native class `DiskDirectory`: where blocks survive their process.

use block_pool::EvictionPolicy;
use cache_manager::content_bytes;
use disk_store::directory::{Directory, OpenError};
use disk_store::entry::entry_bytes;
use disk_store::manifest::{Fingerprint, Manifest};
use disk_store::store::{Files, Layout, Sync as Fsync};
use parking_lot::Mutex;
use pyo3::exceptions::{PyOSError, PyRuntimeError, PyValueError};
use pyo3::prelude::*;
use std::path::PathBuf;
use std::sync::{Arc, Weak};
use tiered_connector::host::Arena;
use tiered_connector::index::TierIndex;
use tiered_connector::vault::DiskVault;

/// A directory for the blocks of one cache, locked while it is used.
///
/// Args:
///     path: the directory, which is made if it is not there; None is a place without a name, in `parent`, that
///         ends with the process.
///     parent: where such a place is made.
///     fingerprint: what blocks are blocks of, by name. A store of something else is refused.
///     page_size: tokens of a block.
///     block_bytes: size of a block.
///     seed: the seed of the block hashes, 64 hexadecimal digits. None: the store's own.
///
/// Raises:
///     ValueError: it is another store.
///     OSError: it is in use, or the system refuses.
#[pyclass(module = "pagekeeper._native", frozen)]
pub(crate) struct DiskDirectory {
    directory: Mutex<Option<Directory>>,
    /// The tier that has it.
    vault: Mutex<Weak<DiskVault>>,
    manifest: Mutex<Manifest>,
    content_bytes: usize,
    named: bool,
    #[cfg(feature = "faults")]
    pub(crate) faults: Arc<crate::faults::DiskFaults>,
}

impl DiskDirectory {
    /// Opens the store for a tier above whose units are those of `arena`, for a pool of so many pages: of a `share` of
    /// `bytes` bytes, or of twice the pool, as far as its share of the room goes, if that is None.
    pub(crate) fn open(
        &self,
        arena: Arc<Arena>,
        pages: usize,
        (bytes, share): (Option<u64>, Share),
        depth: usize,
        fsync: &str,
        policy: EvictionPolicy,
    ) -> PyResult<(TierIndex, Arc<DiskVault>)> {
        let sync = match fsync {
            "batch" => Fsync::Batch,
            "none" => Fsync::None,
            "always" => Fsync::Always,
            _ => {
                let message = format!("fsync={fsync:?}: must be 'batch', 'none' or 'always'");
                return Err(PyValueError::new_err(message));
            }
        };
        let block_bytes = arena.unit_bytes();
        let Manifest { store, block_bytes: stored, .. } = *self.manifest.lock();
        if stored != block_bytes as u64 {
            return Err(PyValueError::new_err(format!(
                "disk: its blocks have {stored} bytes, a page has {block_bytes}"
            )));
        }
        let mut place = self.directory.lock();
        let directory = place.take().ok_or_else(|| PyRuntimeError::new_err("disk: another tier has it"))?;
        let one = Layout { block_bytes, content_bytes: self.content_bytes, slots: 1 };
        let bytes = bytes.map(|bytes| share.of(bytes));
        let layout = layout(&directory, one, bytes, 2 * (block_bytes * pages) as u64, share)?;
        let files = Files::open(directory, &layout, true).map_err(|error| raised(&error))?;
        #[cfg(feature = "faults")]
        let files = crate::faults::files(files, &self.faults);
        let (index, vault) = DiskVault::open(files, store, layout, sync, depth.clamp(1, 1024), policy, arena)
            .map_err(|error| PyOSError::new_err(format!("disk: {error}")))?;
        let vault = Arc::new(vault);
        *self.vault.lock() = Arc::downgrade(&vault);
        Ok((index, vault))
    }
}

/// A part of what several groups have together.
#[derive(Clone, Copy)]
pub(crate) struct Share {
    pub(crate) own: u64,
    pub(crate) all: u64,
}

impl Share {
    fn of(self, bytes: u64) -> u64 {
        (u128::from(bytes) * u128::from(self.own) / u128::from(self.all)) as u64
    }
}

/// The sizes of a store of `bytes` bytes and blocks like `one`; of as many as there is room for, up to `wished`, if that is None.
fn layout(
    directory: &Directory,
    one: Layout,
    bytes: Option<u64>,
    wished: u64,
    share: Share,
) -> PyResult<Layout> {
    let each = one.slot_bytes() as u64 + one.entry_bytes() as u64;
    let room = directory.room().map_err(|error| raised(&error))?;
    let bytes = bytes.unwrap_or(wished.min(share.of(room / 10 * 9)));
    let slots = bytes.saturating_sub(one.entry_at(0)) / each;
    if slots == 0 {
        let hundredths = one.bytes().div_ceil((1 << 30) / 100); // of a GiB
        return Err(PyValueError::new_err(format!(
            "the disk tier has {bytes} bytes, but one block takes {}: give disk_offload_max_gb={}.{:02} or more",
            one.bytes(),
            hundredths / 100,
            hundredths % 100
        )));
    }
    Ok(Layout { slots: slots.min(block_pool::Pool::MAX_PAGES.into()) as u32, ..one })
}

pub(crate) fn raised(error: &OpenError) -> PyErr {
    match error {
        OpenError::Mismatch { .. } | OpenError::Foreign { .. } | OpenError::NoSpace { .. } => {
            PyValueError::new_err(error.to_string())
        }
        OpenError::InUse { .. } | OpenError::Io { .. } => PyOSError::new_err(error.to_string()),
    }
}

#[pymethods]
impl DiskDirectory {
    #[new]
    #[pyo3(signature = (path, *, parent, fingerprint, page_size, block_bytes, seed))]
    #[expect(clippy::needless_pass_by_value, reason = "arguments of Python's")]
    fn new(
        path: Option<PathBuf>,
        parent: PathBuf,
        fingerprint: Fingerprint,
        page_size: u32,
        block_bytes: u64,
        seed: Option<String>,
    ) -> PyResult<DiskDirectory> {
        let directory = match path {
            Some(path) => Directory::open(&path).map_err(|error| raised(&error))?,
            None => Directory::private(&parent),
        };
        let content_bytes = content_bytes(page_size);
        let entry_bytes = entry_bytes(content_bytes) as u64;
        let fresh = || Manifest::fresh(fingerprint.clone(), seed.clone(), block_bytes, entry_bytes);
        let manifest =
            directory.found(&fingerprint, seed.as_deref(), fresh).map_err(|error| raised(&error))?;
        let named = directory.is_named();
        Ok(DiskDirectory {
            directory: Mutex::new(Some(directory)),
            vault: Mutex::default(),
            manifest: Mutex::new(manifest),
            content_bytes,
            named,
            #[cfg(feature = "faults")]
            faults: Arc::default(),
        })
    }

    /// The seed of the block hashes, 64 hexadecimal digits; None where nothing survives, and any will do.
    #[getter]
    fn seed(&self) -> Option<String> {
        self.named.then(|| self.manifest.lock().seed.clone())
    }

    /// The secret of the blocks' second identities, 64 hexadecimal digits.
    #[getter]
    fn secret(&self) -> String {
        self.manifest.lock().secret.clone()
    }

    /// What its blocks are blocks of is something else from now on. They have to be forgotten before.
    fn revise(&self, py: Python<'_>, fingerprint: Fingerprint) -> PyResult<()> {
        let Some(vault) = self.vault.lock().upgrade() else { return Ok(()) };
        let manifest = Manifest { fingerprint, ..self.manifest.lock().clone() };
        py.detach(|| vault.store().revise(&manifest)).map_err(|error| raised(&error))?;
        *self.manifest.lock() = manifest;
        Ok(())
    }

    /// Gives the directory up, if no tier has taken it.
    fn close(&self) {
        drop(self.directory.lock().take());
    }
}
