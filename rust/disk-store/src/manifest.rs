//! The manifest of a store: what it is a store of, and the secrets that its blocks were named with.

use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::collections::BTreeMap;
use thiserror::Error;
use xxhash_rust::xxh3::xxh3_64;

/// The format that this code writes and reads.
pub const FORMAT: u32 = 1;
/// The field of the file that is a checksum of the others.
const CHECKSUM: &str = "checksum";

/// What blocks are blocks of: a name and a value for each thing that has to agree, such as the model and its dtype.
pub type Fingerprint = BTreeMap<String, String>;

/// What stands in the manifest, as JSON.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Manifest {
    /// [`FORMAT`] of whoever made the store.
    pub format: u32,
    /// A number drawn for this store, which its entries are bound to.
    pub store: u64,
    /// What its blocks are blocks of.
    pub fingerprint: Fingerprint,
    /// The seed of the block hashes, 64 hexadecimal digits.
    pub seed: String,
    /// The secret of the blocks' second identities, 64 hexadecimal digits.
    pub secret: String,
    /// Bytes of a block.
    pub block_bytes: u64,
    /// Bytes of an entry.
    pub entry_bytes: u64,
}

/// Why a store is not the one that was asked for.
#[derive(Clone, PartialEq, Eq, Debug, Error)]
pub enum Mismatch {
    /// Another format.
    #[error("it has format {found}, and this version reads {FORMAT}")]
    Format {
        /// Its format.
        found: u64,
    },
    /// Another fingerprint.
    #[error("it holds blocks of another cache: {}", shown(.0))]
    Fingerprint(Vec<Difference>),
    /// Another seed.
    #[error("its blocks were hashed with another seed than the one that was given")]
    Seed,
    /// No manifest at all.
    #[error("its manifest cannot be read: {0}")]
    Damaged(String),
}

/// A thing that does not agree.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Difference {
    /// Its name.
    pub name: String,
    /// What the store has.
    pub stored: Option<String>,
    /// What was asked for.
    pub given: Option<String>,
}

fn shown(differences: &[Difference]) -> String {
    let value = |value: &Option<String>| value.clone().unwrap_or_else(|| "nothing".into());
    let one =
        |it: &Difference| format!("{} is {} there, {} here", it.name, value(&it.stored), value(&it.given));
    differences.iter().map(one).collect::<Vec<_>>().join("; ")
}

/// XXH3-64 of the fields without spaces, in the order of their names, as 16 hexadecimal digits.
fn checksum(fields: &Value) -> String {
    format!("{:016x}", xxh3_64(fields.to_string().as_bytes()))
}

impl Manifest {
    /// The manifest of a new store, with secrets of its own; the seed too, if none is given.
    ///
    /// # Errors
    /// The system has no random numbers.
    pub fn fresh(
        fingerprint: Fingerprint,
        seed: Option<String>,
        block_bytes: u64,
        entry_bytes: u64,
    ) -> std::io::Result<Manifest> {
        let mut random = [0; 72];
        let drawn = rustix::rand::getrandom(&mut random, rustix::rand::GetRandomFlags::empty())?;
        if drawn < random.len() {
            return Err(std::io::ErrorKind::UnexpectedEof.into());
        }
        let hex = |bytes: &[u8]| bytes.iter().fold(String::new(), |text, byte| text + &format!("{byte:02x}"));
        let mut store = [0; 8];
        store.copy_from_slice(&random[64..]);
        Ok(Manifest {
            format: FORMAT,
            store: u64::from_le_bytes(store),
            fingerprint,
            seed: seed.unwrap_or_else(|| hex(&random[..32])),
            secret: hex(&random[32..64]),
            block_bytes,
            entry_bytes,
        })
    }

    /// The text of the file: the fields, and a checksum of them.
    pub fn to_text(&self) -> String {
        let mut value = serde_json::to_value(self).unwrap_or_default();
        let sum = checksum(&value);
        if let Some(fields) = value.as_object_mut() {
            fields.insert(CHECKSUM.into(), sum.into());
        }
        format!("{value:#}\n")
    }

    /// What the text of a file says.
    ///
    /// # Errors
    /// It is no manifest, or one of another format.
    pub fn from_text(text: &str) -> Result<Manifest, Mismatch> {
        let damaged = |error: serde_json::Error| Mismatch::Damaged(error.to_string());
        let mut value: Value = serde_json::from_str(text).map_err(damaged)?;
        // The format first: another one may have other fields.
        match value.get("format").and_then(Value::as_u64) {
            Some(found) if found != u64::from(FORMAT) => return Err(Mismatch::Format { found }),
            _ => {}
        }
        let sum = value.as_object_mut().and_then(|fields| fields.remove(CHECKSUM));
        if sum != Some(checksum(&value).into()) {
            return Err(Mismatch::Damaged("its checksum is another".into()));
        }
        serde_json::from_value(value).map_err(damaged)
    }

    /// Whether this is a store of what `fingerprint` says, hashed with `seed` if one is given.
    ///
    /// # Errors
    /// What does not agree.
    pub fn check(&self, fingerprint: &Fingerprint, seed: Option<&str>) -> Result<(), Mismatch> {
        let names = self
            .fingerprint
            .keys()
            .chain(fingerprint.keys().filter(|&name| !self.fingerprint.contains_key(name)));
        let difference = |name: &String| Difference {
            name: name.clone(),
            stored: self.fingerprint.get(name).cloned(),
            given: fingerprint.get(name).cloned(),
        };
        let differences: Vec<Difference> = names.map(difference).filter(|it| it.stored != it.given).collect();
        if !differences.is_empty() {
            return Err(Mismatch::Fingerprint(differences));
        }
        if seed.is_some_and(|seed| seed != self.seed) {
            return Err(Mismatch::Seed);
        }
        Ok(())
    }

    /// Whether blocks and entries are as long as those of `other`.
    ///
    /// # Errors
    /// What does not agree.
    pub fn check_sizes(&self, other: &Manifest) -> Result<(), Mismatch> {
        let sizes = [
            ("block_bytes", self.block_bytes, other.block_bytes),
            ("entry_bytes", self.entry_bytes, other.entry_bytes),
        ];
        let differences: Vec<Difference> = sizes
            .into_iter()
            .filter(|(_, stored, given)| stored != given)
            .map(|(name, stored, given)| Difference {
                name: name.into(),
                stored: Some(stored.to_string()),
                given: Some(given.to_string()),
            })
            .collect();
        if differences.is_empty() { Ok(()) } else { Err(Mismatch::Fingerprint(differences)) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fingerprint(fields: &[(&str, &str)]) -> Fingerprint {
        fields.iter().map(|&(name, value)| (name.into(), value.into())).collect()
    }

    fn manifest() -> Manifest {
        Manifest {
            format: FORMAT,
            store: u64::MAX,
            fingerprint: fingerprint(&[("model", "m"), ("dtype", "bfloat16"), ("page_size", "16")]),
            seed: "ab".repeat(32),
            secret: "cd".repeat(32),
            block_bytes: 4096,
            entry_bytes: 192,
        }
    }

    #[test]
    fn a_manifest_is_text_that_comes_back_as_it_went() {
        let text = manifest().to_text();
        assert!(text.ends_with("}\n"));
        assert_eq!(Manifest::from_text(&text), Ok(manifest()));
    }

    #[test]
    fn no_flipped_bit_of_a_manifest_makes_another_one() {
        let text = manifest().to_text();
        let mut damaged = 0;
        for at in 0..text.len() * 8 {
            let mut bytes = text.clone().into_bytes();
            bytes[at / 8] ^= 1 << (at % 8);
            match Manifest::from_text(&String::from_utf8_lossy(&bytes)) {
                Ok(same) => assert_eq!(same, manifest(), "a space became another one"),
                Err(_) => damaged += 1,
            }
        }
        assert!(damaged > text.len() * 7);
    }

    #[test]
    fn another_format_is_told_of_before_anything_else() {
        let told = Manifest::from_text(r#"{"format": 2, "unheard_of": []}"#);
        assert_eq!(told, Err(Mismatch::Format { found: 2 }));
        for text in ["", "[]", "{}", r#"{"format": "1"}"#, &manifest().to_text()[..40]] {
            assert!(matches!(Manifest::from_text(text), Err(Mismatch::Damaged(_))), "{text}");
        }
    }

    #[test]
    fn each_field_that_does_not_agree_is_named_with_both_values() {
        let manifest = manifest();
        let own = manifest.fingerprint.clone();
        assert_eq!(manifest.check(&own, None), Ok(()));
        assert_eq!(manifest.check(&own, Some(&"ab".repeat(32))), Ok(()));
        assert_eq!(manifest.check(&own, Some(&"ac".repeat(32))), Err(Mismatch::Seed));
        let other = fingerprint(&[("model", "n"), ("dtype", "bfloat16"), ("shards", "2")]);
        let refused = manifest.check(&other, None).unwrap_err();
        assert_eq!(
            refused.to_string(),
            "it holds blocks of another cache: model is m there, n here; page_size is 16 there, nothing here; \
             shards is nothing there, 2 here"
        );
    }
}
