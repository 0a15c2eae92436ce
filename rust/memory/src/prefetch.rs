//! What will be read soon.

/// How many steps of a loop before its own an element is fetched, where each step looks at little.
pub const AHEAD: usize = 16;

/// Tells the processor that the element `ahead` behind `element` in memory is used soon. It need not exist.
#[inline]
pub fn prefetch<T>(element: &T, ahead: usize) {
    let address = std::ptr::from_ref(element).wrapping_add(ahead);
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a hint, which reads nothing and cannot fault, whatever the address.
    unsafe {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        _mm_prefetch::<_MM_HINT_T0>(address.cast());
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = address;
}
