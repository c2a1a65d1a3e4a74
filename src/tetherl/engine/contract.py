"""What every engine promises.

An actor is an object that an engine constructs and keeps; only its methods can be called, from outside, and
every call gives a `concurrent.futures.Future`. Wait for the first of several with
`concurrent.futures.wait(futures, timeout, return_when=FIRST_COMPLETED)`.

How things fail, on every engine (never raised by `start` or `call` themselves, always by the future):

| what happened                                  | error            | afterwards                             |
|------------------------------------------------|------------------|----------------------------------------|
| the constructor raised                         | ActorStartError  | `ready` and every call fail with it    |
| a method raised                                | ActorMethodError | the actor lives on                     |
| the process ended, or the actor was closed     | ActorDiedError   | this and every later call fail with it |
| arguments or result cannot be sent or read     | EngineError      | the actor lives on                     |
| the actor was closed before the call started   | CancelledError   | as after an end                        |

The first two carry the remote traceback, and the original exception as `__cause__` where it can travel.
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, NoReturn, Protocol

Target = Callable[..., Any] | str
"""What an actor is made from: a class, another callable that returns the object, or "module:Name"."""


class Ref(ABC):
    """A value that was shared once with `Engine.put` and is read by many calls.

    Given as a top-level argument of a call (or of a constructor) it arrives there as the value. The shared
    copy is freed when the last Ref to it is dropped; calls that were made before still get it.
    """

    @abstractmethod
    def get(self) -> Any:
        """The value, read here."""

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a Ref inside another value cannot be delivered: pass it as an argument of the call itself, "
            "or call its get() first"
        )


class Actor(Protocol):
    """A handle on one actor. Its methods may be called from any thread."""

    name: str
    """How errors name it, for example "rollout worker 2"."""
    ready: Future[None]
    """Done when the constructor has returned; fails with ActorStartError or ActorDiedError."""

    def call(self, method: str, /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Call a method; returns at once (the inline engine: when the method has run).

        With `max_concurrency` 1 calls run one after the other in the order in which they were made; with n,
        up to n at a time, each in its own thread. A call that has not started can be cancelled with
        `future.cancel()`; a running one goes on, also when `future.result(timeout)` gave up waiting.
        Callbacks of the future must not block: they may run in the thread that reads the actor's answers.
        """
        ...

    def alive(self) -> bool:
        """False when the actor could not be constructed, has died or was closed."""
        ...

    @property
    def pid(self) -> int | None:
        """Process id of the actor's own process; None if it has none (any more)."""
        ...

    def close(self, timeout: float = 5.0) -> None:
        """End the actor; closing twice is fine.

        Calls that have not started are cancelled. The actor's own `close()` is called if it has one: after
        the running call, or with max_concurrency > 1 beside the running calls, which it should make return.
        What has not ended after `timeout` seconds is ended by force where there is a process to end.
        """
        ...


class Engine(Protocol):
    """Starts actors and owns them."""

    def start(
        self,
        target: Target,
        /,
        *args: Any,
        name: str,
        max_concurrency: int = 1,
        env: dict[str, str] | None = None,
        **kwargs: Any,
    ) -> Actor:
        """Make an actor: `target(*args, **kwargs)` is evaluated where the actor lives.

        Returns at once; see `Actor.ready`. `env`: environment variables that are set before the actor's
        interpreter starts (the inline engine has no interpreter to start and ignores them).
        """
        ...

    def put(self, value: Any) -> Ref:
        """Share a value: serialised once, read by as many calls as wanted."""
        ...

    def close(self, timeout: float = 5.0) -> None:
        """Close all actors, asking all of them before waiting for any. No process is left. Idempotent."""
        ...


def load_target(target: Target) -> Callable[..., Any]:
    """The callable that "module:Name" names; a callable is returned as it is."""
    if not isinstance(target, str):
        return target
    module, colon, name = target.partition(":")
    if not (module and colon and name):
        raise ValueError(f"{target!r} does not name a class: expected 'module:Name', for example 'mygame.env:MyEnv'")
    found: Any = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    return found


def check_start(name: str, max_concurrency: int) -> None:
    """Refuse what is a mistake of the calling program."""
    if max_concurrency < 1:
        raise ValueError(f"{name}: max_concurrency is {max_concurrency}, expected at least 1")
