"""Where a group listens: its handshake address and its directory of sockets.

The directory is private to the user, and a lock beside the sockets keeps a second router off the same worker
URL: libzmq takes over a live ipc path without a word.
"""

from __future__ import annotations

import errno
import fcntl
import ipaddress
import logging
import os
import re
import stat
from types import TracebackType

from smg.errors import AddressError
from smg.protocol import addresses

# sun_path of Linux's sockaddr_un, less its terminating zero
MAX_PATH_BYTES = 107
_LONGEST_INCARNATION = 9_999_999_999

_log = logging.getLogger("smg")


def handshake_address(path: str, override: str | None = None) -> str:
    """Where the group listens for HELLOs: `tcp://127.0.0.1:<derived from path>`, or `override`.

    An override is `tcp://<host>:<port>`; port 0 lets the OS choose. It is the one way to listen off-host, and
    that is logged as a warning. Raises AddressError.
    """
    if override is None:
        return addresses.handshake_address(path)
    match = re.fullmatch(r"tcp://(\[[0-9A-Fa-f:.%\w]+\]|[^\s:/\[\]]+):(\d{1,5})", override)
    if match is None or int(match[2]) > 0xFFFF:
        raise AddressError(f"handshake address {override!r}: must be tcp://<host>:<port>, e.g. tcp://127.0.0.1:30500")
    if not _is_loopback(match[1].strip("[]")):
        _log.warning("%s is not loopback: any host that reaches it can join as an engine", override)
    return override


class SocketDirectory:
    """The ipc sockets of one group: their paths, the directory they are in, and the lock that is held on it.

    `acquire` before the first bind, `release` after the last close; both may be called again. Only the
    process that acquired removes anything. Construction touches no file; it checks that the longest path for
    `ranks` ranks fits a socket address.
    """

    def __init__(self, url: str, ranks: int) -> None:
        self.url = url
        self.path = os.path.abspath(addresses.worker_path(url))
        self.directory, self._stem = os.path.split(self.path)
        self.lock_path = f"{self.path}.lock"
        self._names = re.compile(re.escape(self._stem) + r"-(in|out)-[0-9]+-[0-9]+\.sock")
        self._lock: int | None = None
        self._pid = 0
        longest = len(self._socket("out", max(ranks - 1, 0), _LONGEST_INCARNATION).encode())
        if longest > MAX_PATH_BYTES:
            raise AddressError(
                f"worker URL {url!r}: socket paths would have {longest} bytes, {longest - MAX_PATH_BYTES} "
                f"more than the {MAX_PATH_BYTES} a socket address holds; choose a shorter path"
            )

    def input(self, rank: int, incarnation: int) -> str:
        """Address of the ROUTER that sends requests to this incarnation of a rank."""
        return addresses.SCHEME + self._socket("in", rank, incarnation)

    def output(self, rank: int, incarnation: int) -> str:
        """Address of the PULL that this incarnation of a rank pushes its outputs to."""
        return addresses.SCHEME + self._socket("out", rank, incarnation)

    def acquire(self) -> None:
        """Make or check the directory, take the lock, remove what a dead router left. Raises AddressError."""
        if self._lock is not None:
            return
        try:
            self._make_private_directory()
            self._lock = self._take_lock()
            self._pid = os.getpid()
        except OSError as error:
            raise AddressError(f"worker URL {self.url!r}: {error}") from error
        try:
            for path in self._leftovers():
                _log.info("removing stale socket %s", path)
                os.unlink(path)
        except BaseException as error:
            self.release()
            if isinstance(error, OSError):
                raise AddressError(f"worker URL {self.url!r}: {error}") from error
            raise

    def discard(self, rank: int, incarnation: int) -> None:
        """Unlink the two sockets of a dead incarnation, as far as they are there."""
        if self._lock is not None and self._pid == os.getpid():
            for direction in ("in", "out"):
                _unlink(self._socket(direction, rank, incarnation))

    def release(self) -> None:
        """Unlink the group's sockets and drop the lock. In a forked child: only forget the lock."""
        if self._lock is None:
            return
        lock, self._lock = self._lock, None
        if self._pid == os.getpid():
            try:
                for entry in self._entries():
                    if _is_socket(entry):
                        _unlink(entry.path)
                _unlink(self.lock_path)
            except OSError as error:
                _log.warning("sockets of %s could not be removed: %s", self.url, error)
            # explicit, since a forked child's copy of the descriptor would keep the lock
            fcntl.flock(lock, fcntl.LOCK_UN)
        os.close(lock)

    def __enter__(self) -> SocketDirectory:
        self.acquire()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def _socket(self, direction: str, rank: int, incarnation: int) -> str:
        return f"{self.path}-{direction}-{rank}-{incarnation}.sock"

    def _make_private_directory(self) -> None:
        directory = self.directory
        missing = []
        while not os.path.lexists(directory):
            missing.append(directory)
            directory = os.path.dirname(directory)
        for directory in reversed(missing):
            try:
                os.mkdir(directory, 0o700)
            except FileExistsError:
                pass  # another router of this user was faster; what it made is checked below
        found = os.lstat(self.directory)
        if not stat.S_ISDIR(found.st_mode):
            kind = "a symbolic link" if stat.S_ISLNK(found.st_mode) else "not a directory"
            raise AddressError(f"socket directory {self.directory} is {kind}; name a real directory in the URL")
        if found.st_uid != os.geteuid():
            raise AddressError(
                f"socket directory {self.directory} belongs to uid {found.st_uid}, not to this process's uid "
                f"{os.geteuid()}; choose a directory of your own"
            )
        mode = stat.S_IMODE(found.st_mode)
        if mode & 0o777 != 0o700:
            raise AddressError(
                f"socket directory {self.directory} has mode {mode:04o}; it must be private, since sockets "
                f"are not authenticated: choose another one, or run: chmod 0700 {self.directory}"
            )

    def _take_lock(self) -> int:
        while True:
            lock = os.open(self.lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if _same_file(lock, self.lock_path):
                    os.ftruncate(lock, 0)
                    os.pwrite(lock, b"%d\n" % os.getpid(), 0)
                    return lock
            except OSError as error:
                holder = os.pread(lock, 32, 0).decode("ascii", "replace").strip()
                os.close(lock)
                if error.errno not in (errno.EAGAIN, errno.EACCES):
                    raise
                raise AddressError(
                    f"worker URL {self.url!r} is served by another group, in process {holder or 'unknown'}; "
                    f"stop that one or use another URL (lock: {self.lock_path})"
                ) from None
            # between open and flock its last holder removed the file: this lock guards nothing
            os.close(lock)

    def _leftovers(self) -> list[str]:
        entries = self._entries()
        for entry in entries:
            if not _is_socket(entry):
                raise AddressError(f"{entry.path} is where a socket goes but is not one; move it away")
        return [entry.path for entry in entries]

    def _entries(self) -> list[os.DirEntry[str]]:
        with os.scandir(self.directory) as entries:
            return [entry for entry in entries if self._names.fullmatch(entry.name)]


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _is_socket(entry: os.DirEntry[str]) -> bool:
    return stat.S_ISSOCK(entry.stat(follow_symlinks=False).st_mode)


def _same_file(descriptor: int, path: str) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.lstat(path))
    except FileNotFoundError:
        return False


def _unlink(path: str) -> None:
    try:
        os.unlink(path)
    except FileNotFoundError:
        pass
