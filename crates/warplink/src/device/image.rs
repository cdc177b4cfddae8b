//! Validates machine code supplied by the caller: complete, and in a format that the driver accepts. The
//! driver determines an image's length from its content, so it would read past the end of a truncated one.

use crate::error::{Error, Result};

/// ELF machine number of CUDA.
const CUDA_MACHINE: u64 = 190;

/// First directive of PTX text, after comments.
const PTX_START: &str = ".version";

/// Fails unless the image is a complete cubin, a complete fat binary, or PTX.
pub(super) fn check(image: &[u8]) -> Result<()> {
    let expected = match image {
        [0x7f, b'E', b'L', b'F', 2, 1, ..] => {
            let machine = number(image, 0x12, 2);
            if machine.is_some_and(|machine| machine != CUDA_MACHINE) {
                return Err(refused("the image is an object file for CPUs".to_owned()));
            }
            elf_bytes(image)
        }
        // 0xba55ed50, the magic number of fat binaries, little-endian.
        [0x50, 0xed, 0x55, 0xba, ..] => fat_binary_bytes(image),
        [] => return Err(refused("the image has no bytes".to_owned())),
        _ if is_ptx(image) => return Ok(()),
        _ => {
            let first: Vec<String> = image
                .iter()
                .take(8)
                .map(|byte| format!("{byte:02x}"))
                .collect();
            let text = format!("the image starts with the bytes {}", first.join(" "));
            return Err(refused(text));
        }
    };
    match expected {
        Some(bytes) if bytes <= image.len() as u64 => Ok(()),
        Some(bytes) => Err(refused(format!(
            "the image has {} bytes of the {bytes} that it names",
            image.len()
        ))),
        None => Err(refused(format!("the image has {} bytes", image.len()))),
    }
}

fn refused(message: String) -> Error {
    Error::invalid(format!(
        "{message}; expected a whole cubin, a whole fat binary, or PTX"
    ))
    .with_help("pass the whole file that nvcc produced with -cubin, -fatbin or -ptx")
}

/// Length of an ELF object according to its tables, which nvcc places last.
fn elf_bytes(image: &[u8]) -> Option<u64> {
    let table = |start, size, count| {
        let (start, size, count) = (
            number(image, start, 8)?,
            number(image, size, 2)?,
            number(image, count, 2)?,
        );
        start.checked_add(size * count)
    };
    // Offsets of the 64-bit ELF header: start, entry size and count of the program headers, then of the sections.
    let (programs, sections) = (table(0x20, 0x36, 0x38)?, table(0x28, 0x3a, 0x3c)?);
    Some(programs.max(sections).max(0x40))
}

/// Length of a fat binary according to its header.
fn fat_binary_bytes(image: &[u8]) -> Option<u64> {
    // The header's own length, and that of everything behind it.
    number(image, 6, 2)?.checked_add(number(image, 8, 8)?)
}

/// Little-endian number of `bytes` bytes at `start`.
fn number(image: &[u8], start: usize, bytes: usize) -> Option<u64> {
    let bytes = image.get(start..start + bytes)?.iter().rev();
    Some(bytes.fold(0, |number, byte| number << 8 | u64::from(*byte)))
}

/// Whether it is PTX text, optionally terminated by a zero.
fn is_ptx(image: &[u8]) -> bool {
    let text = image.strip_suffix(&[0]).unwrap_or(image);
    let Ok(mut text) = std::str::from_utf8(text) else {
        return false;
    };
    if text.contains('\0') {
        return false;
    }
    loop {
        text = text.trim_start();
        let comment = if text.starts_with("//") {
            text.split_once('\n')
        } else if text.starts_with("/*") {
            text.split_once("*/")
        } else {
            return text.starts_with(PTX_START);
        };
        let Some((_, rest)) = comment else {
            return false;
        };
        text = rest;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn put(image: &mut [u8], start: usize, bytes: usize, number: u64) {
        image[start..start + bytes].copy_from_slice(&number.to_le_bytes()[..bytes]);
    }

    /// A CUDA ELF object with 3 sections whose table is at the end.
    fn cubin() -> Vec<u8> {
        let mut image = vec![0; 500 + 3 * 64];
        image[..6].copy_from_slice(&[0x7f, b'E', b'L', b'F', 2, 1]);
        put(&mut image, 0x12, 2, CUDA_MACHINE);
        put(&mut image, 0x28, 8, 500);
        put(&mut image, 0x3a, 2, 64);
        put(&mut image, 0x3c, 2, 3);
        image
    }

    fn fat_binary() -> Vec<u8> {
        let mut image = vec![0; 16 + 100];
        put(&mut image, 0, 4, 0xba55_ed50);
        put(&mut image, 4, 2, 1);
        put(&mut image, 6, 2, 16);
        put(&mut image, 8, 8, 100);
        image
    }

    #[test]
    fn whole_images_are_taken_and_no_part_of_one() {
        for image in [cubin(), fat_binary()] {
            assert!(check(&image).is_ok());
            for bytes in 0..image.len() {
                assert!(check(&image[..bytes]).is_err(), "{bytes}");
            }
            // Trailing bytes are ignored.
            assert!(check(&[&image[..], &[0; 8]].concat()).is_ok());
        }
    }

    #[test]
    fn ptx_is_text_that_starts_with_its_version() {
        let good = [
            ".version 8.0\n",
            "//\n// Generated\n\n.version 8.0\0",
            "/* x\n */ .version 8.0",
        ];
        for text in good {
            assert!(check(text.as_bytes()).is_ok(), "{text}");
        }
        let bad = [
            "",
            "\0",
            "__global__ void f() {}",
            "// .version",
            "/* .version",
            ".version\08",
            "\u{e9}",
        ];
        for text in bad {
            assert!(check(text.as_bytes()).is_err(), "{text}");
        }
        assert!(check(b".version \xff").is_err());
    }

    #[test]
    fn rejection_names_the_defect() {
        let text = |image: &[u8]| check(image).unwrap_err().to_string();
        let garbage = text(b"nonsense, and more");
        assert!(
            garbage.starts_with("the image starts with the bytes 6e 6f 6e 73 65 6e 73 65;"),
            "{garbage}"
        );
        let cut = text(&fat_binary()[..40]);
        assert!(
            cut.starts_with("the image has 40 bytes of the 116 that it names;"),
            "{cut}"
        );
        let mut object = cubin();
        put(&mut object, 0x12, 2, 62);
        let object = text(&object);
        assert!(
            object.starts_with("the image is an object file for CPUs;"),
            "{object}"
        );
    }

    #[test]
    fn numbers_that_no_image_has_are_errors() {
        let mut image = cubin();
        put(&mut image, 0x28, 8, u64::MAX);
        assert!(check(&image).is_err());
        let mut image = fat_binary();
        put(&mut image, 8, 8, u64::MAX);
        assert!(check(&image).is_err());
    }
}
