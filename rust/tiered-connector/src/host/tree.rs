//! Trees of files, as the system shows what it has, for tests.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::{env, fs, process};

/// A folder that goes when this is dropped.
pub(super) struct Tree(PathBuf);

impl Default for Tree {
    fn default() -> Tree {
        static MADE: AtomicU32 = AtomicU32::new(0);
        let name = format!("tree-{}-{}", process::id(), MADE.fetch_add(1, Ordering::Relaxed));
        let folder = env::temp_dir().join(name);
        fs::create_dir(&folder).unwrap();
        Tree(folder)
    }
}

impl Tree {
    pub(super) fn root(&self) -> &Path {
        &self.0
    }

    pub(super) fn file(self, path: &str, content: impl AsRef<[u8]>) -> Tree {
        let path = self.0.join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, content).unwrap();
        self
    }
}

impl Drop for Tree {
    fn drop(&mut self) {
        fs::remove_dir_all(&self.0).unwrap();
    }
}
