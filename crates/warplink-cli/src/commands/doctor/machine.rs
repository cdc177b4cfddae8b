//! Operating-system prerequisites of the host device and of exchanging handles.

use super::{Found, Prerequisite};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketFlags, SocketType,
};
use rustix::process::{Resource, getrlimit};
use rustix::thread::futex;
use std::fs::File;
use std::io::{self, IoSlice, IoSliceMut, Read, Write};
use std::mem::MaybeUninit;
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;
use std::sync::atomic::AtomicU32;
use std::time::Duration;
use warplink::DeviceKind;

const AREA: &str = "machine";

/// Descriptors that a rank may need: a few for each peer, and one for each allocation shared by descriptor.
const DESCRIPTORS: u64 = 1024;

/// Time limit of every operation within this machine.
const TIMEOUT: Duration = Duration::from_secs(5);

pub(super) fn checks() -> Vec<Prerequisite> {
    let tried = |name, outcome: io::Result<()>, detail: &str, help: &str| {
        let found = match outcome {
            Ok(()) => Found::ok(detail),
            Err(error) => Found::missing(error.to_string(), help),
        };
        Prerequisite::new(AREA, name, found)
    };
    vec![
        tried(
            "shared memory (memfd)",
            memfd(),
            "written and read back",
            "use a kernel of version 3.17 or newer, and a sandbox that allows memfd_create",
        )
        .needed_by(DeviceKind::Host),
        tried(
            "descriptors over Unix sockets",
            descriptor(),
            "passed and read",
            "use a sandbox that allows Unix sockets and SCM_RIGHTS",
        )
        .needed_by(DeviceKind::Host),
        tried(
            "futex",
            futexes(),
            "works",
            "use a sandbox that allows futex",
        )
        .needed_by(DeviceKind::Host),
        tried(
            "loopback TCP",
            loopback(),
            "connected to 127.0.0.1",
            "bring up the loopback interface: ip link set lo up",
        ),
        Prerequisite::new(AREA, "boot id", boot_id()),
        Prerequisite::new(AREA, "open files", open_files()),
    ]
}

fn memfd() -> io::Result<()> {
    let file = File::from(memfd_create("warplink-doctor", MemfdFlags::CLOEXEC)?);
    ftruncate(&file, 4096)?;
    file.write_all_at(b"warplink", 4088)?;
    let mut back = [0; 8];
    file.read_exact_at(&mut back, 4088)?;
    same(&back)
}

fn same(bytes: &[u8]) -> io::Result<()> {
    if bytes == b"warplink" {
        Ok(())
    } else {
        Err(io::Error::other(
            "the data read differs from the data written",
        ))
    }
}

/// Sends a descriptor over a socket pair, and reads through it.
fn descriptor() -> io::Result<()> {
    let file = File::from(memfd_create("warplink-doctor", MemfdFlags::CLOEXEC)?);
    file.write_all_at(b"warplink", 0)?;
    let (here, there) = rustix::net::socketpair(
        AddressFamily::UNIX,
        SocketType::STREAM,
        SocketFlags::CLOEXEC,
        None,
    )?;
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let descriptors = [file.as_fd()];
    // With one byte of data: a message on a stream socket without data carries no descriptors.
    control.push(SendAncillaryMessage::ScmRights(&descriptors));
    rustix::net::sendmsg(
        &here,
        &[IoSlice::new(&[1])],
        &mut control,
        SendFlags::NOSIGNAL,
    )?;
    // A closed socket would end the read below without data.
    drop(here);
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let mut byte = [0];
    rustix::net::recvmsg(
        &there,
        &mut [IoSliceMut::new(&mut byte)],
        &mut control,
        RecvFlags::CMSG_CLOEXEC,
    )?;
    let passed = control.drain().find_map(|message| match message {
        RecvAncillaryMessage::ScmRights(mut descriptors) => descriptors.next(),
        _ => None,
    });
    let passed =
        passed.ok_or_else(|| io::Error::other("no descriptor arrived with the message"))?;
    let mut back = [0; 8];
    File::from(passed).read_exact_at(&mut back, 0)?;
    same(&back)
}

/// Waits for a word that has already changed, which returns at once if futexes work.
fn futexes() -> io::Result<()> {
    let word = AtomicU32::new(1);
    // The expected value differs from the word, so that the call returns at once where futexes work.
    match futex::wait(&word, futex::Flags::empty(), 0, None) {
        Ok(()) | Err(Errno::AGAIN) => {}
        Err(errno) => return Err(errno.into()),
    }
    futex::wake(&word, futex::Flags::empty(), 1)?;
    Ok(())
}

fn loopback() -> io::Result<()> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
    let mut here = TcpStream::connect_timeout(&listener.local_addr()?, TIMEOUT)?;
    let (mut there, _) = listener.accept()?;
    here.write_all(b"warplink")?;
    there.set_read_timeout(Some(TIMEOUT))?;
    let mut back = [0; 8];
    there.read_exact(&mut back)?;
    same(&back)
}

/// Ranks consider themselves on one machine if their boot ids are equal.
fn boot_id() -> Found {
    const PATH: &str = "/proc/sys/kernel/random/boot_id";
    match std::fs::read_to_string(PATH) {
        Ok(text) if text.chars().filter(char::is_ascii_hexdigit).count() == 32 => {
            Found::ok(format!("{}; identifies this machine", text.trim()))
        }
        _ => Found::warning(
            format!("{PATH} cannot be read; machines cannot be distinguished"),
            "mount /proc",
        ),
    }
}

fn open_files() -> Found {
    let limit = getrlimit(Resource::Nofile).current;
    match limit {
        None => Found::ok("no limit"),
        // Each connection to a peer and each mapped allocation takes a descriptor.
        Some(limit) if limit >= DESCRIPTORS => Found::ok(format!("at most {limit}")),
        Some(limit) => Found::warning(
            format!("at most {limit}; many ranks or allocations may need more"),
            format!("raise the limit with: ulimit -n {DESCRIPTORS}"),
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::commands::doctor::CheckStatus;

    #[test]
    fn this_machine_has_what_the_host_device_needs() {
        for check in checks() {
            assert!(!check.stops(DeviceKind::Host), "{check:?}");
            assert_eq!(
                check.found.help.is_some(),
                check.found.status != CheckStatus::Ok
            );
        }
    }
}
