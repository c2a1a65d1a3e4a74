"""The error tree. Every error that tetherl raises on purpose is one of these.

TetherlError
├── ConfigError              a configuration value is wrong (exit code 2)
│   └── PlanError            the resource plan does not fit the machine (exit code 3)
├── MissingExtraError        an optional dependency is needed; says which extra to install
├── SpaceError               an observation or action does not fit its declared space
├── ClientError              raised by the client
│   ├── RefusedError         the server refused the session (token, protocol version, limits)
│   ├── RequestError         one request was refused; the session goes on
│   ├── DisconnectedError    no connection to the server could be had within the time allowed
│   └── EpisodeLostError     the connection was lost and this open episode with it; start a new one
├── ServerError              a policy server or front door cannot start or has failed
├── EngineError              something about processes
│   ├── ActorStartError      an actor's constructor failed (carries its traceback)
│   ├── ActorMethodError     an actor's method raised; the actor lives (carries its traceback)
│   └── ActorDiedError       an actor's process is gone (carries exit code or signal)
├── RunError                 something about a run directory
│   └── CheckpointError      a checkpoint is incomplete, corrupted or does not fit
└── TrainingError            learning cannot go on (for example repeated non-finite losses)

Messages say what came, what was expected and what to do about it.
"""

from __future__ import annotations


class TetherlError(Exception):
    """Base of all errors raised on purpose by tetherl."""


class ConfigError(TetherlError):
    """A configuration value is wrong: names the key, the value, what is allowed and the nearest valid key."""


class PlanError(ConfigError):
    """The resource plan does not fit the machine: names the process, what is missing and what to lower."""


class MissingExtraError(TetherlError):
    """A command or module needs an optional dependency that is not installed."""

    def __init__(self, what: str, extra: str) -> None:
        super().__init__(f"{what} needs the extra '{extra}': pip install 'tetherl[{extra}]'")
        self.extra = extra


class SpaceError(TetherlError, ValueError):
    """An observation or action does not fit its declared space."""


class ClientError(TetherlError):
    """Base of what a client raises."""


class RefusedError(ClientError):
    """The server refused the session; trying again unchanged will not help."""

    def __init__(self, message: str, code: str = "refused") -> None:
        super().__init__(message)
        self.code = code


class RequestError(ClientError):
    """The server refused one request; the session goes on."""

    def __init__(self, message: str, code: str = "bad_request") -> None:
        super().__init__(message)
        self.code = code


class DisconnectedError(ClientError):
    """No connection to the server within the time allowed."""


class EpisodeLostError(ClientError):
    """The connection was lost and the open episode with it: reset the environment, start a new episode."""


class ServerError(TetherlError):
    """A policy server or the front door cannot start, or has failed."""


class EngineError(TetherlError):
    """Base of errors about processes."""


class ActorStartError(EngineError):
    """An actor could not be constructed; `remote_traceback` holds the traceback from its process."""

    def __init__(self, message: str, remote_traceback: str = "") -> None:
        super().__init__(message + (f"\n\n{remote_traceback}" if remote_traceback else ""))
        self.remote_traceback = remote_traceback


class ActorMethodError(EngineError):
    """An actor's method raised; the actor lives on. `remote_traceback` holds the traceback from its process."""

    def __init__(self, message: str, remote_traceback: str = "") -> None:
        super().__init__(message + (f"\n\n{remote_traceback}" if remote_traceback else ""))
        self.remote_traceback = remote_traceback


class ActorDiedError(EngineError):
    """An actor's process has ended; `exit_code` is negative for a signal, None when unknown."""

    def __init__(self, message: str, exit_code: int | None = None) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class RunError(TetherlError):
    """Something is wrong with a run directory."""


class CheckpointError(RunError):
    """A checkpoint is incomplete, corrupted or does not fit the configuration."""


class TrainingError(TetherlError):
    """Learning cannot go on."""
