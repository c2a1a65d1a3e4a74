"""One writing process per run directory."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import socket
import sys
from datetime import UTC, datetime
from pathlib import Path

from tetherl.errors import RunError

if sys.platform == "win32":
    import msvcrt

    def _lock(fd: int) -> None:
        # A locked range cannot be read by others there, so a byte far behind the content is locked.
        os.lseek(fd, 1 << 30, os.SEEK_SET)
        msvcrt.locking(fd, msvcrt.LK_NBLCK, 1)
        os.lseek(fd, 0, os.SEEK_SET)

else:
    import fcntl

    def _lock(fd: int) -> None:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)


class RunLock:
    """Holds the lock file `path` from construction until `release`.

    The operating system owns the lock, so it ends with the process, however that ends: there are no stale
    locks. Child processes that are spawned do not inherit it. The file's content only says who holds it, for
    the message to the second process. RunError when another holder lives or the file cannot be locked.
    """

    def __init__(self, path: Path) -> None:
        self.path = Path(path)
        try:
            fd = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o666)
        except OSError as error:
            raise RunError(f"the lock {self.path} cannot be opened: {error.strerror or error}") from error
        try:
            _lock(fd)
            os.ftruncate(fd, 0)
            holder = {
                "pid": os.getpid(),
                "host": socket.gethostname(),
                "since": datetime.now(UTC).isoformat(timespec="seconds"),
            }
            os.write(fd, json.dumps(holder).encode())
        except OSError as error:
            os.close(fd)
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES, errno.EDEADLK):
                raise RunError(
                    f"the run {self.path.parent} is in use by {_holder(self.path)}. "
                    "Stop that process first, or give this run another name."
                ) from None
            raise RunError(
                f"the lock {self.path} cannot be taken: {error.strerror or error}. "
                "Put the runs on a file system that supports file locks, with free space."
            ) from error
        self._fd: int | None = fd

    def release(self) -> None:
        """Let others have the run. Releasing twice is fine."""
        if self._fd is not None:
            with contextlib.suppress(OSError):  # a full disk must not keep the lock
                os.ftruncate(self._fd, 0)
            os.close(self._fd)
            self._fd = None


def _holder(path: Path) -> str:
    try:
        holder = json.loads(path.read_text())
        pid, host, since = holder["pid"], holder["host"], holder["since"]
    except (OSError, ValueError, TypeError, KeyError):
        return "another process"
    if pid == os.getpid() and host == socket.gethostname():
        return f"this very process (pid {pid}, since {since})"
    return f"process {pid} on {host} (since {since})"
