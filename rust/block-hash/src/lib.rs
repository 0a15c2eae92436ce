//! Tokens → chained block hashes.
//!
//! A *block* is `page_size` consecutive tokens of one sequence. Its hash covers its tokens, its
//! extra keys and the hash of the block before it, so that one hash names a whole prefix:
//!
//! ```text
//! content(i) = H(tokens of block i as int32 little-endian ‖ extra keys that touch it)
//! hash(i)    = H(content(i), hash(i − 1))            hash(−1) comes from the root
//! ```
//!
//! [`Chain`] holds one sequence's hashes and grows with its token log. [`Root`] separates seeds,
//! salts and adapters; [`ExtraKeys`] is what else tells two equal token runs apart. [`Algo`] names
//! the functions; [`Guards`] are further bits for those who cannot compare tokens. Values are equal in every process and on every CPU; [`CpuPath`] says which
//! instructions compute them.
//!
//! ```
//! use block_hash::{Algo, Chain, ExtraKeys, Root};
//!
//! let root = Root::new(None, Some("tenant-a"), None, 0);
//! let mut chain = Chain::new(Algo::AHash64, &root);
//! let mut log: Vec<i32> = (0..40).collect();
//! chain.extend(&log, 16, &ExtraKeys::default());
//! assert_eq!(chain.len(), 2); // the 8 tokens of the third block have no hash yet
//! log.extend(40..48);
//! chain.extend(&log, 16, &ExtraKeys::default());
//! assert_eq!(chain.len(), 3);
//! ```

mod ahash;
mod algo;
mod arch;
mod chain;
mod error;
mod extra;
mod guards;
mod record;
mod root;
mod sha256;

pub use algo::{Algo, Identity};
pub use arch::{CpuPath, narrow};
pub use chain::Chain;
pub use error::HashError;
pub use extra::{ContentSpan, ExtraInputs, ExtraKeys};
pub use guards::Guards;
pub use root::{Adapter, Root};

/// One token id. Negative ids are legal: some engines use them as placeholders.
pub type Token = i32;
