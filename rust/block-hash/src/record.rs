//! The framing of every variable field that enters a hash: tag, length, payload.
//!
//! A record is `tag: u32 ‖ payload length in bytes: u32 ‖ payload`, little-endian. With the tag
//! and the length in front, a list of records reads back in one way only, so two different lists
//! never give the same bytes.

/// Appends one record, its payload given in parts.
pub(crate) fn push(out: &mut Vec<u8>, tag: u32, payload: &[&[u8]]) {
    let length: usize = payload.iter().map(|part| part.len()).sum();
    out.extend_from_slice(&tag.to_le_bytes());
    out.extend_from_slice(&(length as u32).to_le_bytes());
    for part in payload {
        out.extend_from_slice(part);
    }
}
