"""Writing files so that a crash or a power cut leaves the old content or the new, never a mixture."""

from __future__ import annotations

import errno
import os
import sys
from pathlib import Path


def write_file(path: Path, data: bytes) -> None:
    """Create `path` with `data` and wait until the disk has it. OSError when it cannot (disk full …)."""
    with open(path, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def replace_file(path: Path, data: bytes) -> None:
    """Give `path` the content `data` in one step; on OSError the old content is untouched.

    The file is written aside as `.NAME.tmp` first. That name is fixed, so crashes leave one such file at
    most; it needs one writer at a time, which the run's lock provides.
    """
    aside = path.with_name(f".{path.name}.tmp")
    try:
        write_file(aside, data)
        os.replace(aside, path)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise
    sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    """Wait until creations and renames inside the directory `path` are on the disk."""
    if sys.platform == "win32":  # directories cannot be opened there
        return
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    except OSError as error:
        # Some network file systems do not know fsync on a directory. Anything else is a real failure.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(fd)
