//! C's pointers: checked, then followed.

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
    // SAFETY: not null and aligned, as was checked; the caller vouches for the rest.
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
/// A `pointer` that is not null must point to text that ends with a zero, and that nobody changes while `'a`
/// lasts.
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

/// A text of the library's as C has it: of static lifetime.
pub(crate) fn static_text(text: &'static str) -> *const c_char {
    static TEXTS: Mutex<BTreeMap<&str, CString>> = Mutex::new(BTreeMap::new());
    let mut texts = TEXTS.lock().unwrap_or_else(PoisonError::into_inner);
    // What is kept here is never dropped, and stays where it is when others are added.
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
    // SAFETY: the caller vouches for it.
    unsafe { text(pointer, name) }.map(Some)
}

/// The `count` values that `pointer` points to. Null is allowed for none.
///
/// # Safety
/// Where `count` is not zero, a `pointer` that is not null must point to `count` values, which nobody changes
/// while `'a` lasts.
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
    // SAFETY: not null, aligned and not too long, as was checked; the caller vouches for the rest.
    Ok(unsafe { slice::from_raw_parts(pointer, count) })
}

/// The `bytes` bytes that `pointer` points to, which may be uninitialized: they are set to zero.
///
/// # Safety
/// Where `bytes` is not zero, a `pointer` that is not null must be valid for writes of `bytes` bytes, which
/// nobody else reads or changes while `'a` lasts.
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
    // SAFETY: not null, as was checked; the caller vouches for writes.
    unsafe { pointer.write_bytes(0, bytes) };
    // SAFETY: as above, and initialized just now.
    Ok(unsafe { slice::from_raw_parts_mut(pointer.cast(), bytes) })
}

/// Fails for null, and for an address that no `T` has.
pub(crate) fn check<T>(pointer: *const T, name: &str) -> Outcome {
    if pointer.is_null() {
        return Err(Failure::invalid(
            format!("{name} is null; expected a pointer"),
            format!("give a valid pointer as {name}"),
        ));
    }
    if !pointer.is_aligned() {
        return Err(Failure::invalid(
            format!(
                "{name} is at {pointer:p}; expected an address aligned to {} bytes",
                align_of::<T>()
            ),
            format!("give a pointer to what the type of {name} says"),
        ));
    }
    Ok(())
}

/// Fails for a length that no memory has.
fn fits<T>(count: usize, name: &str) -> Outcome {
    let bytes = count.checked_mul(size_of::<T>());
    if bytes.is_none_or(|bytes| bytes > isize::MAX as usize) {
        return Err(Failure::invalid(
            format!("{name} has {count} elements; expected a length that memory can have"),
            "give the length in elements",
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
        // SAFETY: null is what is checked for.
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
        // SAFETY: the address is refused before it is followed, and where it is not, lies in the words.
        unsafe {
            assert!(load(between.cast::<u64>(), "it").is_err());
            assert!(values(between.cast::<u64>(), 1, "it").is_err());
            assert!(load(between.cast::<u32>(), "it").is_ok());
        }
    }

    #[test]
    fn text_that_is_not_utf_8_and_lengths_of_no_memory_are_errors() {
        let word = 7_u64;
        // SAFETY: the text ends with a zero; the lengths are refused before the pointer is followed.
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
