//! Forwards the ranks' output in whole lines, prefixed with the rank.

use crate::report::has_colour;
use std::io::{self, Read, Write};
use std::sync::{Mutex, PoisonError};

/// Longer lines are broken, which bounds the memory of a rank that writes no newline.
const MAX_LINE: usize = 1 << 20;

/// Destination stream of a rank's output.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Target {
    Stdout,
    Stderr,
}

/// Held while lines are printed: both streams of this process may be the same terminal.
static TURN: Mutex<()> = Mutex::new(());

impl Target {
    fn has_colour(self) -> bool {
        match self {
            Self::Stdout => has_colour(&io::stdout()),
            Self::Stderr => has_colour(&io::stderr()),
        }
    }

    fn print(self, lines: &[u8]) -> io::Result<()> {
        if lines.is_empty() {
            return Ok(());
        }
        // The lock guards no data, so poisoning does not matter.
        let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
        match self {
            Self::Stdout => {
                let mut out = io::stdout().lock();
                out.write_all(lines)?;
                out.flush()
            }
            Self::Stderr => io::stderr().lock().write_all(lines),
        }
    }
}

/// Forwards a rank's stream until it ends.
///
/// # Errors
/// The launcher's stream was closed.
pub(super) fn pump(rank: usize, mut from: impl Read, to: Target) -> io::Result<()> {
    let mut lines = Prefixer::new(prefix(rank, to.has_colour()));
    let mut chunk = vec![0; 1 << 16];
    let mut ready = Vec::new();
    loop {
        match from.read(&mut chunk) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            // A read error counts as end of file.
            Ok(0) | Err(_) => break,
            Ok(length) => {
                lines.feed(&chunk[..length], &mut ready);
                to.print(&ready)?;
                ready.clear();
            }
        }
    }
    lines.finish(&mut ready);
    to.print(&ready)
}

fn prefix(rank: usize, colour: bool) -> Vec<u8> {
    // Cyan, yellow, green, magenta, blue and red, in the terminal's own shades.
    const COLOURS: [u8; 6] = [36, 33, 32, 35, 34, 31];
    let text = format!("[rank {rank}] ");
    if colour {
        format!("\x1b[{}m{text}\x1b[0m", COLOURS[rank % COLOURS.len()]).into_bytes()
    } else {
        text.into_bytes()
    }
}

/// Splits a byte stream into lines with a prefix.
#[derive(Debug)]
struct Prefixer {
    prefix: Vec<u8>,
    partial: Vec<u8>,
}

impl Prefixer {
    fn new(prefix: Vec<u8>) -> Self {
        Self {
            prefix,
            partial: Vec::new(),
        }
    }

    /// Appends completed lines to `ready`, and buffers the rest.
    fn feed(&mut self, bytes: &[u8], ready: &mut Vec<u8>) {
        for piece in bytes.split_inclusive(|&byte| byte == b'\n') {
            self.partial.extend_from_slice(piece);
            if piece.ends_with(b"\n") || self.partial.len() >= MAX_LINE {
                self.finish(ready);
            }
        }
    }

    /// Appends the buffered rest to `ready`, as a line.
    fn finish(&mut self, ready: &mut Vec<u8>) {
        if self.partial.is_empty() {
            return;
        }
        ready.extend_from_slice(&self.prefix);
        ready.append(&mut self.partial);
        if !ready.ends_with(b"\n") {
            ready.push(b'\n');
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn prefixed(chunks: &[&[u8]]) -> Vec<u8> {
        let mut lines = Prefixer::new(b"> ".to_vec());
        let mut ready = Vec::new();
        for chunk in chunks {
            lines.feed(chunk, &mut ready);
        }
        lines.finish(&mut ready);
        ready
    }

    #[test]
    fn lines_are_the_same_however_they_arrive() {
        let text = b"one\n\ntwo\xff\x00\r\nthree";
        let expected = b"> one\n> \n> two\xff\x00\r\n> three\n";
        assert_eq!(prefixed(&[text]), expected);
        for at in 0..text.len() {
            let (head, tail) = text.split_at(at);
            assert_eq!(prefixed(&[head, tail]), expected);
        }
        assert_eq!(prefixed(&[]), b"");
    }

    #[test]
    fn an_endless_line_is_broken() {
        let chunk = vec![b'x'; MAX_LINE / 2 + 1];
        let lines = prefixed(&[&chunk, &chunk, &chunk]);
        assert_eq!(lines.iter().filter(|&&byte| byte == b'\n').count(), 2);
        assert_eq!(
            lines.iter().filter(|&&byte| byte == b'x').count(),
            3 * chunk.len()
        );
    }

    #[test]
    fn ranks_are_told_apart_by_colour() {
        assert_eq!(prefix(12, false), b"[rank 12] ");
        assert_eq!(prefix(0, true), b"\x1b[36m[rank 0] \x1b[0m");
        assert_ne!(prefix(0, true), prefix(1, true));
    }
}
