"""The messages of the tetherl protocol, version 1. docs/protocol.md shows an example of each.

Every message is a map with a `type`. Over a WebSocket, a binary message is MessagePack and a text message the
same map as JSON; the server answers in the encoding of the client's `hello`. Requests carry an `id` chosen by
the client (increasing); their reply repeats it as `re`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

PROTOCOL_VERSION = 1

Phase = Literal["collecting", "learning", "stopped"]
"""What the algorithm is doing."""

Count = Annotated[int, Meta(ge=0, le=2**53 - 1)]
"""A number that every language can hold exactly (JavaScript's are doubles)."""

Name = Annotated[str, Meta(max_length=200)]
EpisodeName = Annotated[str, Meta(min_length=1, max_length=200)]


class Hello(msgspec.Struct, tag="hello", forbid_unknown_fields=True, kw_only=True):
    """First message of a client."""

    id: Count
    protocol: Count
    token: Annotated[str, Meta(max_length=4096)] | None = None
    name: Name = ""
    purpose: Literal["train", "evaluate"] = "train"


class StartEpisode(msgspec.Struct, tag="start_episode", forbid_unknown_fields=True, kw_only=True):
    """Opens an episode under an identity that the client chooses (unique among its open episodes)."""

    id: Count
    episode: EpisodeName
    training: bool = True


class Act(msgspec.Struct, tag="act", forbid_unknown_fields=True, kw_only=True):
    """Asks for the action in `observation`; `reward` is what the action of step - 1 brought (0 at step 0).
    `mask`: one boolean per choice, false where it is not allowed now; null or left out: all are."""

    id: Count
    episode: EpisodeName
    step: Count
    observation: Any
    reward: float = 0.0
    mask: Any | msgspec.UnsetType = msgspec.UNSET


class LogAction(msgspec.Struct, tag="log_action", forbid_unknown_fields=True, kw_only=True):
    """Reports an action that the client chose itself in `observation`. A step; for learning it is context."""

    id: Count
    episode: EpisodeName
    step: Count
    observation: Any
    action: Any
    reward: float = 0.0


class EndEpisode(msgspec.Struct, tag="end_episode", forbid_unknown_fields=True, kw_only=True):
    """Ends an episode after `step` steps. `observation` (after the last action) is a must when truncated."""

    id: Count
    episode: EpisodeName
    step: Count
    reward: float = 0.0
    observation: Any = None
    terminated: bool = False
    truncated: bool = False


class AbortEpisode(msgspec.Struct, tag="abort_episode", forbid_unknown_fields=True, kw_only=True):
    """The episode cannot go on (the game crashed): cut at its last complete step, left out of statistics."""

    id: Count
    episode: EpisodeName
    reason: Name = ""


class Bye(msgspec.Struct, tag="bye", forbid_unknown_fields=True, kw_only=True):
    """A clean goodbye; the server closes the connection."""

    id: Count


class Welcome(msgspec.Struct, tag="welcome", kw_only=True):
    """Answer to `hello`."""

    re: int
    protocol: int
    server: str
    session: str
    worker: int
    observation_space: dict[str, Any]
    action_space: dict[str, Any]
    env_config: dict[str, Any]
    phase: Phase
    policy_version: int
    resumes_in_s: float | None = None
    max_message_bytes: int = 0


class Redirect(msgspec.Struct, tag="redirect", kw_only=True):
    """Answer of the front door to `hello`: connect to `url` and say hello there. The address asked stays the
    one to come back to when that connection is lost."""

    re: int
    url: str


class Action(msgspec.Struct, tag="action", kw_only=True):
    """Answer to `act`."""

    re: int
    episode: str
    step: int
    action: Any
    phase: Phase
    policy_version: int
    resumes_in_s: float | None = None


class Done(msgspec.Struct, tag="done", kw_only=True):
    """Answer to `start_episode`, `log_action`, `end_episode`, `abort_episode`."""

    re: int
    phase: Phase
    policy_version: int
    resumes_in_s: float | None = None


class PhaseChange(msgspec.Struct, tag="phase", kw_only=True):
    """Pushed on each change. `resumes_in_s`: expected seconds until collecting again, null until one was
    timed."""

    phase: Phase
    policy_version: int
    resumes_in_s: float | None = None


class Error(msgspec.Struct, tag="error", kw_only=True):
    """A request (`re`) was refused, or with `re` null and `fatal` true the session is."""

    re: int | None
    code: str
    message: str
    fatal: bool = False


ClientMessage = Hello | StartEpisode | Act | LogAction | EndEpisode | AbortEpisode | Bye
ServerMessage = Welcome | Redirect | Action | Done | PhaseChange | Error
