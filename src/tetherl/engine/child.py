"""What a local actor's process runs: it constructs the actor, answers calls, and ends with its parent."""

from __future__ import annotations

import contextlib
import faulthandler
import fcntl
import io
import os
import select
import signal
import socket
import sys
import threading
import traceback
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tetherl.engine.contract import load_target
from tetherl.engine.failures import Failure
from tetherl.engine.transport import Blob, Channel, Frame, Kind


def main() -> None:
    """Arguments: where tetherl is, a name for the process list, socket, lifeline, the parent's process id."""
    sock, lifeline, parent = sys.argv[3:]
    end_with_parent(int(lifeline), int(parent))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent steers the stop
    faulthandler.enable()  # a crash in native code leaves its traceback in the output
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)  # it is a pipe, but someone watches
    channel = Channel(socket.socket(fileno=int(sock)))
    channel.socket.set_inheritable(False)
    path = channel.receive()
    if path is None:
        return
    sys.path[:] = path.take()
    start = channel.receive()
    if start is None:
        return
    try:
        target, args, kwargs, max_concurrency = start.take()
        args, kwargs = start.deliver(args, kwargs)
        actor = load_target(target)(*args, **kwargs)
    except BaseException as error:
        channel.send(Kind.NOT_STARTED, 0, Blob.of(Failure.of(error, travels=True)))
        sys.exit(1)
    del args, kwargs
    channel.send(Kind.READY, 0, Blob())
    serve(actor, channel, max_concurrency)


def serve(actor: Any, channel: Channel, max_concurrency: int) -> None:
    """Answer calls until asked to close: in this thread when one at a time, else in a pool of threads."""
    pool = ThreadPoolExecutor(max_concurrency) if max_concurrency > 1 else None
    while (frame := channel.receive()) is not None and frame.kind != Kind.CLOSE:
        if pool is None:
            answer(actor, channel, frame)
        else:
            pool.submit(answer, actor, channel, frame)
        del frame
    if hasattr(actor, "close"):
        try:
            actor.close()
        except BaseException:
            traceback.print_exc()
    if pool is not None:
        pool.shutdown()


def answer(actor: Any, channel: Channel, frame: Frame) -> None:
    """Run one call and send what came of it."""
    kind = Kind.RESULT
    try:
        method, args, kwargs = frame.take()
        args, kwargs = frame.deliver(args, kwargs)
        blob = Blob.of(getattr(actor, method)(*args, **kwargs))
    except BaseException as error:  # SystemExit too: only the parent ends an actor
        kind, blob = Kind.RAISED, Blob.of(Failure.of(error, travels=True))
    with contextlib.suppress(ConnectionError):  # the parent is gone: the lifeline ends this process
        channel.send(kind, frame.call, blob)


def end_with_parent(lifeline: int, parent: int) -> None:
    """See to it that this process, and what it has started, ends when its parent does, by whatever cause.

    `lifeline` is a pipe that nobody writes to; its other end is closed by the parent's death. A thread
    notices that, or, where a copy of the other end lives on in a forked process, the change of the parent's
    id. While native code holds the interpreter lock no thread runs, so on Linux the kernel is asked as well
    to send SIGIO, which by default ends a process, when the pipe closes. (Elsewhere such a process ends when
    the native call returns.)
    """
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            signal.signal(signal.SIGIO, signal.SIG_DFL)
            fcntl.fcntl(lifeline, fcntl.F_SETOWN, -os.getpgrp())
            fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC)

    def watch() -> None:
        poll = select.poll()
        poll.register(lifeline, select.POLLIN)
        while not poll.poll(1000) and os.getppid() == parent:
            pass
        os.killpg(0, signal.SIGKILL)

    os.set_inheritable(lifeline, False)
    threading.Thread(target=watch, name="lifeline", daemon=True).start()
