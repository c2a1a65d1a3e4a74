"""What goes wrong in an actor, as data that travels between processes, and the errors made from it."""

from __future__ import annotations

import contextlib
import pickle
import signal
import traceback
from dataclasses import dataclass

from tetherl.errors import ActorDiedError, ActorMethodError, ActorStartError


@dataclass(frozen=True, slots=True)
class Failure:
    """An exception, described where it was raised."""

    summary: str  # "ValueError: no such level"
    traceback: str
    pickled: bytes | None = None  # the exception itself, if it can be pickled

    @classmethod
    def of(cls, error: BaseException, *, travels: bool = False) -> Failure:
        """Describe `error`, without the engine's own frame; `travels`: take the exception itself along."""
        inner = error.__traceback__.tb_next if error.__traceback__ else None
        text = "".join(traceback.format_exception(type(error), error, inner)).rstrip()
        summary = "".join(traceback.format_exception_only(error)).strip()
        pickled = None
        if travels:
            with contextlib.suppress(Exception):  # many exceptions cannot travel; the text always does
                import cloudpickle

                pickled = cloudpickle.dumps(error)
        return cls(summary, text, pickled)

    def original(self) -> BaseException | None:
        """The exception, or None where it cannot be had in this process."""
        with contextlib.suppress(Exception):
            error = pickle.loads(self.pickled) if self.pickled else None
            return error if isinstance(error, BaseException) else None
        return None


def method_error(name: str, method: str, failure: Failure, cause: BaseException | None) -> ActorMethodError:
    error = ActorMethodError(f"{name}: {method}() raised {failure.summary}", failure.traceback)
    error.__cause__ = cause
    return error


def start_error(name: str, failure: Failure, cause: BaseException | None) -> ActorStartError:
    error = ActorStartError(f"{name} could not be started: {failure.summary}", failure.traceback)
    error.__cause__ = cause
    return error


def closed_error(name: str) -> ActorDiedError:
    return ActorDiedError(f"{name} was closed; start a new one to go on")


def death_error(
    name: str, exit_code: int | None, *, doing: str = "", memory_bytes: int = 0, output: str = ""
) -> ActorDiedError:
    """The error for a process that ended by itself: who, how, doing what, how much memory, last words."""
    if exit_code is None:
        how = "ended, nobody knows how"
    elif exit_code < 0:
        how = f"was killed by signal {-exit_code} ({_signal_name(-exit_code)})"
    else:
        how = f"exited with code {exit_code}"
    message = f"{name} {how}"
    if doing:
        message += f" while {doing}"
    if memory_bytes:
        message += f"; it used {memory_bytes / 2**20:.0f} MiB of memory when last looked at"
    if exit_code == -signal.SIGKILL:
        message += ". If nobody killed it, the system was short of memory (see the kernel log): use fewer processes"
    if output:
        message += f"\n\nThe last lines of its output:\n{output}"
    return ActorDiedError(message, exit_code)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return "a real-time signal"
