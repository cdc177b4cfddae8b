//! Checked dereferences of C pointers.

use crate::status::{Failure, Outcome};
use std::collections::BTreeMap;
use std::ffi::{CStr, CString, c_char, c_void};
use std::slice;
use std::sync::{Mutex, PoisonError};

/// Writes `value` to where `pointer` points.
///
/// # Safety
/// A `pointer` that is not null must be valid for a write.
pub(crate) unsafe fn store<T>(pointer: *mut T, name: &str, value: T) -> Outcome {
    check(pointer, name)?;
    // SAFETY: not null and aligned, as checked; the rest is guaranteed by the caller.
    unsafe { pointer.write(value) };
    Ok(())
}

/// Reads the value that `pointer` points to.
///
/// # Safety
/// A `pointer` that is not null must point to a `T`.
pub(crate) unsafe fn load<T: Copy>(pointer: *const T, name: &str) -> Outcome<T> {
    check(pointer, name)?;
    // SAFETY: as above.
    Ok(unsafe { pointer.read() })
}

/// The text that `pointer` points to.
///
/// # Safety
/// A `pointer` that is not null must point to zero-terminated text that is not modified during `'a`.
pub(crate) unsafe fn text<'a>(pointer: *const c_char, name: &str) -> Outcome<&'a str> {
    check(pointer, name)?;
    // SAFETY: as above.
    let text = unsafe { CStr::from_ptr(pointer) };
    text.to_str().map_err(|_| {
        Failure::invalid(
            format!("{name} is not UTF-8; expected text in UTF-8"),
            format!("give {name} as UTF-8"),
        )
    })
}

/// Converts a static text to a C string of static lifetime.
pub(crate) fn static_text(text: &'static str) -> *const c_char {
    static TEXTS: Mutex<BTreeMap<&str, CString>> = Mutex::new(BTreeMap::new());
    let mut texts = TEXTS.lock().unwrap_or_else(PoisonError::into_inner);
    // Entries are never removed, and the text of a `CString` does not move when the map grows.
    let kept = texts.entry(text);
    kept.or_insert_with(|| CString::new(text).unwrap_or_default())
        .as_ptr()
}

/// As [`text`], where null means none.
///
/// # Safety
/// As for [`text`].
pub(crate) unsafe fn optional_text<'a>(
    pointer: *const c_char,
    name: &str,
) -> Outcome<Option<&'a str>> {
    if pointer.is_null() {
        return Ok(None);
    }
    // SAFETY: guaranteed by the caller.
    unsafe { text(pointer, name) }.map(Some)
}

/// The `count` values that `pointer` points to. `pointer` may be null if `count` is 0.
///
/// # Safety
/// If `count` is not zero, a `pointer` that is not null must point to `count` values that are not modified
/// during `'a`.
pub(crate) unsafe fn values<'a, T>(
    pointer: *const T,
    count: usize,
    name: &str,
) -> Outcome<&'a [T]> {
    if count == 0 {
        return Ok(&[]);
    }
    check(pointer, name)?;
    fits::<T>(count, name)?;
    // SAFETY: not null, aligned and not too long, as checked; the rest is guaranteed by the caller.
    Ok(unsafe { slice::from_raw_parts(pointer, count) })
}

/// The `bytes` bytes that `pointer` points to, which may be uninitialized: they are set to zero.
///
/// # Safety
/// If `bytes` is not zero, a `pointer` that is not null must be valid for writes of `bytes` bytes, and nothing
/// else may read or write them during `'a`.
pub(crate) unsafe fn new_bytes<'a>(
    pointer: *mut c_void,
    bytes: usize,
    name: &str,
) -> Outcome<&'a mut [u8]> {
    if bytes == 0 {
        return Ok(&mut []);
    }
    check(pointer, name)?;
    fits::<u8>(bytes, name)?;
    // Rust has no slices of uninitialized bytes, and C's buffers usually are.
    // SAFETY: not null, as checked; the caller guarantees that it is valid for writes.
    unsafe { pointer.write_bytes(0, bytes) };
    // SAFETY: as above, and initialized by the write.
    Ok(unsafe { slice::from_raw_parts_mut(pointer.cast(), bytes) })
}

/// Fails for null and for misaligned pointers.
pub(crate) fn check<T>(pointer: *const T, name: &str) -> Outcome {
    if pointer.is_null() {
        return Err(Failure::invalid(
            format!("{name} is null; expected a pointer"),
            format!("pass a valid pointer as {name}"),
        ));
    }
    // C does not enforce it, and misaligned accesses are undefined in Rust.
    if !pointer.is_aligned() {
        return Err(Failure::invalid(
            format!(
                "{name} is at {pointer:p}; expected an address aligned to {} bytes",
                align_of::<T>()
            ),
            format!("pass a pointer to an object of the type of {name}"),
        ));
    }
    Ok(())
}

/// Fails for lengths that exceed the address space.
fn fits<T>(count: usize, name: &str) -> Outcome {
    let bytes = count.checked_mul(size_of::<T>());
    if bytes.is_none_or(|bytes| bytes > isize::MAX as usize) {
        return Err(Failure::invalid(
            format!("{name} has {count} elements; expected a length that memory can have"),
            "pass the length in elements",
        ));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn null_is_an_error_and_nothing_at_null_is_not() {
        let null = std::ptr::null_mut::<c_void>();
        // SAFETY: null is rejected before it is dereferenced.
        unsafe {
            assert!(store(null.cast::<u32>(), "it", 1).is_err());
            assert!(load(null.cast::<u32>(), "it").is_err());
            assert!(text(null.cast(), "it").is_err());
            assert!(optional_text(null.cast(), "it").unwrap().is_none());
            assert!(values(null.cast::<u64>(), 1, "it").is_err());
            assert!(values(null.cast::<u64>(), 0, "it").unwrap().is_empty());
            assert!(new_bytes(null, 1, "it").is_err());
            assert!(new_bytes(null, 0, "it").unwrap().is_empty());
        }
    }

    #[test]
    fn an_address_that_is_not_aligned_is_an_error() {
        let words = [1_u64, 2];
        let between = (&raw const words).cast::<u8>().wrapping_add(4);
        // SAFETY: misaligned addresses are rejected before they are dereferenced; the aligned one is within `words`.
        unsafe {
            assert!(load(between.cast::<u64>(), "it").is_err());
            assert!(values(between.cast::<u64>(), 1, "it").is_err());
            assert!(load(between.cast::<u32>(), "it").is_ok());
        }
    }

    #[test]
    fn text_that_is_not_utf_8_and_lengths_of_no_memory_are_errors() {
        let word = 7_u64;
        // SAFETY: the text is zero-terminated; bad lengths are rejected before the pointer is dereferenced.
        unsafe {
            assert!(text(c"\xff".as_ptr(), "it").is_err());
            assert_eq!(text(c"some".as_ptr(), "it").unwrap(), "some");
            for count in [usize::MAX, usize::MAX / 8, isize::MAX as usize / 8 + 1] {
                assert!(values(&raw const word, count, "it").is_err());
            }
            assert_eq!(values(&raw const word, 1, "it").unwrap(), [7]);
            let mut fresh = std::mem::MaybeUninit::<u64>::uninit();
            assert_eq!(
                new_bytes(fresh.as_mut_ptr().cast(), 8, "it").unwrap(),
                [0; 8]
            );
        }
    }
}
