"""How values travel between two processes of one machine.

A value becomes a blob: pickled (protocol 5), its large buffers beside the pickle instead of copied into it.
Small blobs go through the socket. Larger ones go into one anonymous file in shared memory, whose descriptor
is sent along; the file has no name, so nothing is left behind by any kind of end, and it is gone as soon as
the receiver has read it. The receiver copies every array out into memory of its own: such an array is
writable (if it was so before), keeps nothing else alive and holds no descriptor. Views on a mapping would save
about 2 of 20 ms for 29 MB (their page faults cost nearly what the copy costs); but each message would hold a
descriptor, and its smallest array all of its memory.

Pickle is fit for this use only: both ends are one program's own processes, joined by an unnamed socket pair.

    blob   uint32 n | n x uint64 segment sizes | pickle | buffer | buffer | ...
    frame  uint8 kind | uint8 descriptors | bool: the first descriptor is the blob | uint64 call
           | uint32 size | blob, unless it is in the descriptor
"""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import socket
import struct
import tempfile
import threading
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from tetherl.errors import EngineError

SOCKET_LIMIT = 64 * 1024
"""Blobs of more bytes than this travel in a file."""
PICKLE_LIMIT = 4 * 1024
"""Buffers of fewer bytes than this are copied into the pickle."""
MAX_DESCRIPTORS = 250
"""The kernel passes at most 253 descriptors with one message."""

_HEADER = struct.Struct("=BB?QI")
_NO_SIGNAL = getattr(socket, "MSG_NOSIGNAL", 0)  # a dead receiver is an error here, not a signal


class Kind(IntEnum):
    """What a frame says."""

    PATH = 1  # to the actor: the module search path
    START = 2  # target, args, kwargs, max_concurrency
    CALL = 3  # method, args, kwargs
    CLOSE = 4
    READY = 5  # from the actor: constructed
    RESULT = 6
    RAISED = 7  # a Failure
    NOT_STARTED = 8  # a Failure of the constructor


class Blob:
    """A serialised value: bytes, or an anonymous file that is closed with the blob."""

    __slots__ = ("data", "fd")

    def __init__(self, data: bytes | bytearray = b"", fd: int | None = None) -> None:
        self.data = data
        self.fd = fd

    @classmethod
    def of(cls, value: Any, *, in_file: bool = False) -> Blob:
        """Serialise `value`, which may be changed afterwards. `in_file`: even if it is small."""
        import cloudpickle

        buffers: list[memoryview] = []

        def beside(buffer: pickle.PickleBuffer) -> bool:
            view = buffer.raw()
            if view.nbytes < PICKLE_LIMIT:
                return True  # true means: into the pickle
            buffers.append(view)
            return False

        file = io.BytesIO()
        cloudpickle.Pickler(file, protocol=5, buffer_callback=beside).dump(value)
        segments: list[memoryview] = [file.getbuffer(), *buffers]
        table = struct.pack(f"=I{len(segments)}Q", len(segments), *(s.nbytes for s in segments))
        if in_file or len(table) + sum(s.nbytes for s in segments) > SOCKET_LIMIT:
            return cls(fd=_write_file([memoryview(table), *segments]))
        return cls(b"".join([table, *segments]))

    def load(self) -> Any:
        """The value; may be called again, each time for a new copy."""
        offset = 4
        (count,) = struct.unpack("=I", self._read(0, offset))
        sizes = struct.unpack(f"={count}Q", self._read(offset, 8 * count))
        offset += 8 * count
        segments = []
        for size in sizes:
            segments.append(self._read(offset, size))
            offset += size
        return pickle.loads(segments[0], buffers=segments[1:])

    def _read(self, offset: int, size: int) -> bytearray:
        if self.fd is None:
            return bytearray(memoryview(self.data)[offset : offset + size])
        result = bytearray(size)
        view = memoryview(result)
        while view:
            # The position is given each time: processes that were sent the descriptor share its own position.
            done = os.preadv(self.fd, [view], offset)
            if done == 0:
                raise EngineError("a message in shared memory is shorter than it says")
            view, offset = view[done:], offset + done
        return result

    def close(self) -> None:
        fd, self.fd = self.fd, None
        if fd is not None:
            os.close(fd)

    def __del__(self) -> None:
        self.close()


def _write_file(segments: Sequence[memoryview]) -> int:
    """A new anonymous file with the segments one after the other; gives its descriptor."""
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("tetherl")
    else:
        fd, path = tempfile.mkstemp()
        os.unlink(path)
    try:
        for segment in segments:
            view = segment
            while view:
                view = view[os.write(fd, view) :]
    except BaseException:
        os.close(fd)
        raise
    return fd


class Shared:
    """Stands among a call's arguments for the n-th shared value that comes with the message."""

    __slots__ = ("index",)

    def __init__(self, index: int) -> None:
        self.index = index


@dataclass(slots=True)
class Frame:
    kind: Kind
    call: int
    blob: Blob
    shared: list[Blob]

    def take(self) -> Any:
        """The value, once; the memory of the message is free afterwards."""
        try:
            return self.blob.load()
        finally:
            self.blob.close()

    def deliver(self, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        """The arguments with every `Shared` replaced by its value."""

        def value(argument: Any) -> Any:
            return self.shared[argument.index].load() if isinstance(argument, Shared) else argument

        delivered = [value(a) for a in args], {key: value(a) for key, a in kwargs.items()}
        self.shared.clear()
        return delivered


class Channel:
    """Frames over a stream socket. One thread receives; any thread sends."""

    def __init__(self, sock: socket.socket) -> None:
        self.socket = sock
        self._sending = threading.Lock()

    def send(self, kind: Kind, call: int, blob: Blob, shared: Sequence[Blob] = ()) -> None:
        """Send one frame. OSError if the other end is gone."""
        fds = [b.fd for b in (blob, *shared) if b.fd is not None]
        if len(fds) > MAX_DESCRIPTORS:
            raise EngineError(f"{len(shared)} Refs in one call; at most {MAX_DESCRIPTORS - 1} can be delivered")
        frame = _HEADER.pack(kind, len(fds), blob.fd is not None, call, len(blob.data)) + blob.data
        passed = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", fds))] if fds else []
        with self._sending:
            sent = self.socket.sendmsg([frame], passed, _NO_SIGNAL)
            if sent < len(frame):
                self.socket.sendall(memoryview(frame)[sent:], _NO_SIGNAL)

    def receive(self) -> Frame | None:
        """The next frame; None when the other end is gone."""
        header, fds = bytearray(), list[int]()
        try:
            while len(header) < _HEADER.size:
                # Descriptors come with the first byte of the message they were sent with.
                data, new, _, _ = socket.recv_fds(self.socket, _HEADER.size - len(header), MAX_DESCRIPTORS + 3)
                fds += new
                if not data:
                    return None
                header += data
            for fd in fds:
                os.set_inheritable(fd, False)
            kind, expected, in_file, call, size = _HEADER.unpack(header)
            blobs = [Blob(fd=fd) for fd in fds]
            fds = []  # the blobs own them from here on
            if len(blobs) != expected:
                raise EngineError(
                    f"{expected - len(blobs)} of {expected} file descriptors could not be received: this "
                    "process has too many files open; raise the limit (ulimit -n)"
                )
            body = bytearray(size)
            view = memoryview(body)
            while view:
                done = self.socket.recv_into(view)
                if done == 0:
                    return None
                view = view[done:]
        except ConnectionError:
            return None
        finally:
            for fd in fds:
                os.close(fd)
        return Frame(Kind(kind), call, blobs.pop(0) if in_file else Blob(body), blobs)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.socket.close()
