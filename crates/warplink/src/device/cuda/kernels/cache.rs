//! On-disk cache of machine code, keyed by its source. Each entry carries a digest of its content, so
//! truncated or corrupted entries are recompiled.

use crate::error::Result;
use crate::file;
use sha2::{Digest, Sha256};
use std::fs;
use std::path::Path;

/// Length of a digest in bytes.
const DIGEST: usize = 32;

/// Cache key of an entry compiled from `parts`.
pub(crate) fn key(parts: &[&str]) -> String {
    let mut digest = Sha256::new();
    for part in parts {
        // Length-prefixed, so that different lists of parts cannot collide.
        digest.update((part.len() as u64).to_le_bytes());
        digest.update(part);
    }
    format!("{:x}", digest.finalize())
}

/// Returns entry `key`, or produces it with `make` and stores it. A cache that cannot be read or written only
/// costs time.
pub(crate) fn get_or_make(
    directory: Option<&Path>,
    key: &str,
    make: impl FnOnce() -> Result<Vec<u8>>,
) -> Result<Vec<u8>> {
    let Some(directory) = directory else {
        return make();
    };
    let path = directory.join(format!("{key}.cubin"));
    if let Some(content) = fs::read(&path).ok().and_then(|bytes| checked(&bytes)) {
        return Ok(content);
    }
    let content = make()?;
    if let Err(error) = file::replace(&path, &[&Sha256::digest(&content), &content]) {
        tracing::debug!(%error, path = %path.display(), "a kernel was not kept on disk");
    }
    Ok(content)
}

/// Content of an entry, if its digest matches.
fn checked(bytes: &[u8]) -> Option<Vec<u8>> {
    let (digest, content) = bytes.split_at_checked(DIGEST)?;
    (!content.is_empty() && digest == Sha256::digest(content).as_slice()).then(|| content.to_vec())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Error;

    fn never() -> Result<Vec<u8>> {
        Err(Error::invalid("made again"))
    }

    #[test]
    fn keeps_valid_entries_and_rebuilds_damaged_ones() {
        let root = tempfile::tempdir().unwrap();
        let directory = root.path().join("below");
        let key = key(&["source", "sm_90"]);
        let made = || Ok(vec![1, 2, 3, 4]);
        assert_eq!(
            get_or_make(Some(&directory), &key, made).unwrap(),
            [1, 2, 3, 4]
        );
        assert_eq!(
            get_or_make(Some(&directory), &key, never).unwrap(),
            [1, 2, 3, 4]
        );

        let path = directory.join(format!("{key}.cubin"));
        let whole = fs::read(&path).unwrap();
        let mut altered = whole.clone();
        *altered.last_mut().unwrap() ^= 1;
        for damaged in [
            &whole[..whole.len() - 1],
            &whole[..DIGEST],
            &whole[..5],
            &[],
            &altered,
        ] {
            fs::write(&path, damaged).unwrap();
            assert!(get_or_make(Some(&directory), &key, never).is_err());
            assert_eq!(
                get_or_make(Some(&directory), &key, made).unwrap(),
                [1, 2, 3, 4]
            );
            assert_eq!(fs::read(&path).unwrap(), whole);
        }
        // No temporary file is left.
        assert_eq!(fs::read_dir(&directory).unwrap().count(), 1);
    }

    #[test]
    fn a_place_that_cannot_be_written_only_costs_time() {
        let root = tempfile::tempdir().unwrap();
        let file = root.path().join("file");
        fs::write(&file, "").unwrap();
        assert_eq!(
            get_or_make(Some(&file.join("below")), "key", || Ok(vec![7])).unwrap(),
            [7]
        );
        assert_eq!(get_or_make(None, "key", || Ok(vec![8])).unwrap(), [8]);
    }

    #[test]
    fn keys_tell_lists_of_parts_apart() {
        assert_ne!(key(&["ab", "c"]), key(&["a", "bc"]));
        assert_ne!(key(&["a"]), key(&["a", ""]));
        assert_eq!(key(&["a"]).len(), 64);
    }
}
