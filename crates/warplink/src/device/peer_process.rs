//! The process at the other end of a Unix socket.

use rustix::process::{Pid, geteuid};
use std::ffi::{c_int, c_void};
use std::io;
use std::os::fd::{AsFd, AsRawFd};

/// Linux's numbers on x86-64 and AArch64.
const SOL_SOCKET: c_int = 1;
const SO_PEERCRED: c_int = 17;

unsafe extern "C" {
    fn getsockopt(
        socket: c_int,
        level: c_int,
        name: c_int,
        value: *mut c_void,
        length: *mut u32,
    ) -> c_int;
}

/// Process and user at the other end of a Unix socket when it was connected, according to the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PeerProcess {
    /// `None` if it is in a PID namespace that this process does not see into, such as another container's.
    pub(crate) id: Option<Pid>,
    user: u32,
}

impl PeerProcess {
    pub(crate) fn of(socket: impl AsFd) -> io::Result<Self> {
        // Process, user and group. The kernel reports process 0 for one that it cannot name here, which the type that
        // rustix reads these as must not hold.
        let mut credentials = [0; 3];
        let expected = size_of_val(&credentials) as u32;
        let mut length = expected;
        // SAFETY: declared as in C; the kernel writes at most `length` bytes, which are integers of any value.
        let code = unsafe {
            getsockopt(
                socket.as_fd().as_raw_fd(),
                SOL_SOCKET,
                SO_PEERCRED,
                credentials.as_mut_ptr().cast(),
                &raw mut length,
            )
        };
        if code != 0 {
            return Err(io::Error::last_os_error());
        }
        if length != expected {
            return Err(io::ErrorKind::InvalidData.into());
        }
        let [process, user, _group]: [u32; 3] = credentials;
        Ok(Self {
            id: Pid::from_raw(process.cast_signed()),
            user,
        })
    }

    /// Whether it runs as the user of this process.
    pub(crate) fn is_same_user(&self) -> bool {
        // Not as rustix's type, which has no place for the kernel's "unknown".
        self.user == geteuid().as_raw()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::net::{AddressFamily, SocketType};
    use std::os::unix::net::UnixStream;

    #[test]
    fn own_process_is_known_and_one_that_the_kernel_does_not_name_is_not() {
        let (socket, _other) = UnixStream::pair().unwrap();
        let own = PeerProcess::of(&socket).unwrap();
        assert_eq!(own.id, Some(rustix::process::getpid()));
        assert!(own.is_same_user());
        // Without a peer the kernel reports process 0, as for one in another namespace.
        let alone = rustix::net::socket(AddressFamily::UNIX, SocketType::STREAM, None).unwrap();
        let nobody = PeerProcess::of(&alone).unwrap();
        assert_eq!(nobody.id, None);
        assert!(!nobody.is_same_user());
    }
}
