//! Waiting for processes that a test started. The tests of other crates use this file, too.

// Each test binary uses a part of this.
#![allow(dead_code, unreachable_pub)]
#![allow(clippy::unwrap_used)]

use std::io::Read;
use std::process::Child;
use std::time::{Duration, Instant};

/// How a process ended.
#[derive(Debug)]
pub struct Ended {
    pub code: Option<i32>,
    pub output: String,
    pub after: Duration,
}

/// Waits for all, and kills what is left at the limit. Output is read beside the waiting, so that a
/// full pipe holds nobody up.
pub fn wait_all(children: Vec<Child>, started: Instant, limit: Duration) -> Vec<Ended> {
    let waiting: Vec<_> = children
        .into_iter()
        .map(|mut child| {
            let mut readers = Vec::new();
            let pipes: [Box<dyn Read + Send>; 2] = [
                Box::new(child.stdout.take().unwrap()),
                Box::new(child.stderr.take().unwrap()),
            ];
            for mut pipe in pipes {
                readers.push(std::thread::spawn(move || {
                    let mut text = Vec::new();
                    pipe.read_to_end(&mut text).unwrap();
                    String::from_utf8_lossy(&text).into_owned()
                }));
            }
            (child, readers)
        })
        .collect();
    waiting
        .into_iter()
        .map(|(mut child, readers)| {
            let status = loop {
                if let Some(status) = child.try_wait().unwrap() {
                    break Some(status);
                }
                if started.elapsed() > limit {
                    child.kill().unwrap();
                    child.wait().unwrap();
                    break None;
                }
                std::thread::sleep(Duration::from_millis(2));
            };
            let after = started.elapsed();
            let output: Vec<String> = readers
                .into_iter()
                .map(|reader| reader.join().unwrap())
                .collect();
            let mut output = output.concat();
            let code = status.and_then(|status| status.code());
            match status {
                Some(status) if code.is_none() => output += &format!("\nended by {status}\n"),
                Some(_) => {}
                None => output += "\nkilled at the limit of the test\n",
            }
            Ended {
                code,
                output,
                after,
            }
        })
        .collect()
}
