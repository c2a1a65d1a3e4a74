"""One child process: started, its output passed on, its end noticed and described, nothing left of it."""

from __future__ import annotations

import codecs
import contextlib
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence

TAIL_LINES = 40
_LINE_LIMIT = 2000


class ChildProcess:
    """A running program with a session (and so a process group) of its own.

    Of its own, so that Ctrl-C in a terminal reaches the parent only, which steers the stop; and so that what
    the program has started itself (a game, a simulator) can be ended with it.
    Its stdout and stderr both go to the parent's stderr: the parent's stdout may be a document for a program.
    """

    def __init__(
        self, command: Sequence[str], *, name: str, env: dict[str, str] | None, pass_fds: Sequence[int]
    ) -> None:
        self.memory_bytes = 0  # resident, when it was last looked at (about every second); 0 if unknown
        self._tail: deque[str] = deque(maxlen=TAIL_LINES)
        self._output, output = os.pipe()
        try:
            self._popen = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**os.environ, **(env or {})},
                pass_fds=pass_fds,
                start_new_session=True,
            )
        except BaseException:
            os.close(self._output)
            raise
        finally:
            os.close(output)
        self.pid = self._popen.pid
        self._forwarder = threading.Thread(target=self._forward, name=f"{name} output", daemon=True)
        self._forwarder.start()

    @property
    def exit_code(self) -> int | None:
        """None while it runs; negative: the signal that killed it."""
        return self._popen.poll()

    def wait(self, deadline: float) -> bool:
        """Wait for the end until `time.monotonic()` is `deadline`; False if it still runs then."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._popen.wait(max(0.0, deadline - time.monotonic()))
        return self.exit_code is not None

    def send_signal(self, number: int) -> None:
        self._popen.send_signal(number)

    def end(self) -> None:
        """Kill what still runs, it or what it has left in its group; wait; pass on the last output."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        self.wait(time.monotonic() + 10.0)  # a killed process ends soon, unless the kernel itself hangs
        self._forwarder.join()

    def tail(self) -> str:
        """The last lines of its output, indented."""
        return "\n".join(f"    {line}" for line in self._tail)

    def _forward(self) -> None:
        """Pass the output on until there is none to come, and keep its last lines."""
        poll = select.poll()
        poll.register(self._output, select.POLLIN)
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        partial = ""
        looked = 0.0
        while True:
            if time.monotonic() - looked > 1.0:
                looked = time.monotonic()
                self._look_at_memory()
            # Asked before polling: what it wrote before its end is read. A process that it left behind
            # outside its group may hold the pipe open for ever; its output is not waited for.
            ended = self.exit_code is not None
            if not poll.poll(0 if ended else 500):
                if ended:
                    break
                continue
            data = os.read(self._output, 65536)
            if not data:
                break
            text = decoder.decode(data)
            *lines, partial = (partial + text).split("\n")
            self._tail.extend(line[-_LINE_LIMIT:].rstrip() for line in lines)
            partial = partial[-_LINE_LIMIT:]
            with contextlib.suppress(Exception):  # a closed stderr of ours must not block the child
                sys.stderr.write(text)
                sys.stderr.flush()
        if partial:
            self._tail.append(partial)
        os.close(self._output)

    def _look_at_memory(self) -> None:
        with contextlib.suppress(OSError, ValueError, IndexError):  # not Linux, or just gone
            with open(f"/proc/{self.pid}/statm") as file:
                self.memory_bytes = int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") or self.memory_bytes
