"""The server's half of one session as a state machine: no sockets, no clock, no threads.

    session = ServerSession(token=..., decode_observation=codec.encode, decode_action=actions.from_env, ...)
    message = session.receive(data)          # never raises, whatever `data` is
    reply = message if isinstance(message, Error) else answer(message)
    send(session.encode(reply)); close when session.closed

States: not greeted (only `hello` is accepted, every error ends the session) -> greeted -> closed (after
`bye`, or after a fatal error). An episode's step counter advances only when a message is accepted: a refused
message can be corrected and sent again under a new id.
"""

from __future__ import annotations

import hmac
import logging
import math
from collections.abc import Callable
from typing import Any

import msgspec

from tetherl.protocol.messages import (
    PROTOCOL_VERSION,
    AbortEpisode,
    Act,
    Bye,
    ClientMessage,
    EndEpisode,
    Error,
    Hello,
    LogAction,
    StartEpisode,
)
from tetherl.protocol.wire import WireError, decode_client, decode_value, encode, peek

MAX_REWARD = 3.4e38
"""Rewards are stored as float32; anything larger would become infinite."""

_log = logging.getLogger(__name__)


class _Refusal(Exception):
    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


def _unchanged(value: Any) -> Any:
    return value


class ServerSession:
    """What one connection may send next.

    Attributes:
        greeted: a valid `hello` has been accepted.
        closed: nothing more will be accepted; close the connection after sending the last answer.
        as_json: answers go out as JSON text (the client's first message was text).
        name, purpose: from the `hello`.
        open_episodes: identity -> the step number its next message must carry.

    Args:
        token: what `hello` must carry; None accepts any client.
        max_episodes: open episodes allowed at a time.
        max_message_bytes: larger messages are refused unread.
        decode_observation, decode_action, decode_mask: from the wire value (arrays already NumPy) to the internal
            form; they raise ValueError with a message for the client.
    """

    def __init__(
        self,
        *,
        token: str | None,
        max_episodes: int,
        max_message_bytes: int,
        decode_observation: Callable[[Any], Any] = _unchanged,
        decode_action: Callable[[Any], Any] = _unchanged,
        decode_mask: Callable[[Any], Any] = _unchanged,
    ) -> None:
        self.greeted = False
        self.closed = False
        self.as_json = False
        self.name = ""
        self.purpose = "train"
        self.open_episodes: dict[str, int] = {}
        self._token = token
        self._max_episodes = max_episodes
        self._max_message_bytes = max_message_bytes
        self._decode_observation = decode_observation
        self._decode_action = decode_action
        self._decode_mask = decode_mask
        self._heard = False
        self._last_id = -1

    def encode(self, message: Any) -> bytes | str:
        """A server message in this client's encoding."""
        return encode(message, self.as_json)

    def receive(self, data: bytes | str) -> ClientMessage | Error:
        """Takes one WebSocket message; never raises.

        Returns the accepted message, its observation, action and mask in internal form, or an `Error` to send back
        (then nothing has changed, except that a fatal one has closed the session).
        """
        if not self._heard:
            self._heard = True
            self.as_json = isinstance(data, str)
        if self.closed:
            return Error(re=None, code="bad_message", message="this session is over", fatal=True)
        if len(data) > self._max_message_bytes:
            limit = self._max_message_bytes
            text = f"message has {len(data)} bytes; at most {limit} are allowed (external.max_message_bytes)"
            return self._error(None, "too_large", text)
        try:
            message = decode_client(data)
        except WireError as error:
            return self._undecodable(data, error)
        try:
            self._accept(message)
        except _Refusal as refusal:
            return self._error(message.id, refusal.code, str(refusal))
        except Exception:
            _log.exception("a message of client %r could not be checked", self.name)
            return self._error(message.id, "internal", "the server failed to check this message; see its log")
        return message

    def _error(self, re: int | None, code: str, text: str) -> Error:
        fatal = not self.greeted  # a stranger gets one try
        self.closed = self.closed or fatal
        return Error(re=re, code=code, message=text, fatal=fatal)

    def _undecodable(self, data: bytes | str, error: WireError) -> Error:
        seen = peek(data)
        if seen.type == "hello" and seen.protocol is not None and seen.protocol != PROTOCOL_VERSION:
            return self._error(seen.id, "bad_version", _version_text(seen.protocol))
        if seen.id is not None and seen.id > self._last_id:
            self._last_id = seen.id
        return self._error(seen.id, error.code, str(error))

    def _accept(self, message: ClientMessage) -> None:
        if not self.greeted and not isinstance(message, Hello):
            raise _Refusal("not_greeted", f"the first message must be hello, not {_type_of(message)}")
        if message.id <= self._last_id:
            raise _Refusal(
                "bad_message",
                f"id {message.id} is not above the last one, {self._last_id}; ids must increase",
            )
        self._last_id = message.id
        if isinstance(message, Act | LogAction):
            self._step(message)
        elif isinstance(message, EndEpisode):
            self._end(message)
        elif isinstance(message, StartEpisode):
            self._start(message)
        elif isinstance(message, AbortEpisode):
            self._next_step(message.episode)
            del self.open_episodes[message.episode]
        elif isinstance(message, Bye):
            self.closed = True
        else:
            self._hello(message)

    def _hello(self, hello: Hello) -> None:
        if self.greeted:
            raise _Refusal("bad_message", "hello was already said on this connection")
        if hello.protocol != PROTOCOL_VERSION:
            raise _Refusal("bad_version", _version_text(hello.protocol))
        if self._token is not None:
            given = (hello.token or "").encode("utf-8", "surrogatepass")
            if not hmac.compare_digest(given, self._token.encode("utf-8", "surrogatepass")):
                came = "none" if hello.token is None else "a different one"
                raise _Refusal(
                    "bad_token",
                    f"this server asks for a token and {came} came; set TETHERL_TOKEN (or pass token=) to "
                    "the server's token",
                )
        self.greeted = True
        self.name = hello.name
        self.purpose = hello.purpose

    def _start(self, start: StartEpisode) -> None:
        if start.episode in self.open_episodes:
            raise _Refusal("episode_exists", f"episode {start.episode!r} is already open in this session")
        if len(self.open_episodes) >= self._max_episodes:
            raise _Refusal(
                "too_many_episodes",
                f"{len(self.open_episodes)} episodes are open in this session, the most that "
                "external.max_episodes_per_session allows; end or abort one first",
            )
        self.open_episodes[start.episode] = 0

    def _step(self, message: Act | LogAction) -> None:
        step = self._check_step(message)
        observation = self._observation(message.observation)
        if isinstance(message, LogAction):
            message.action = self._internal(message.action, self._decode_action, "bad_action", "action")
        elif message.mask is msgspec.UNSET:
            message.mask = None
        elif message.mask is not None:
            try:
                message.mask = self._internal(message.mask, self._decode_mask, "bad_mask", "action mask")
            except _Refusal as refusal:
                raise _Refusal(refusal.code, f"episode {message.episode!r}, step {step}: {refusal}") from None
        message.observation = observation
        self.open_episodes[message.episode] = step + 1

    def _end(self, message: EndEpisode) -> None:
        self._check_step(message)
        if not (message.terminated or message.truncated):
            raise _Refusal("bad_message", "end_episode needs terminated or truncated (or both) to be true")
        if message.observation is not None:
            message.observation = self._observation(message.observation)
        elif not message.terminated:
            raise _Refusal(
                "bad_observation",
                "a truncated episode must end with the observation after its last action: its value counts",
            )
        del self.open_episodes[message.episode]

    def _check_step(self, message: Act | LogAction | EndEpisode) -> int:
        expected = self._next_step(message.episode)
        if message.step != expected:
            raise _Refusal(
                "wrong_step",
                f"episode {message.episode!r}: {_type_of(message)} carries step {message.step}, "
                f"expected {expected} ({expected} steps were taken)",
            )
        if not math.isfinite(message.reward) or abs(message.reward) > MAX_REWARD:
            raise _Refusal("bad_reward", f"reward is {message.reward}; it must be a finite float32 number")
        if expected == 0 and message.reward != 0:
            raise _Refusal(
                "bad_reward",
                f"reward {message.reward} came before any action of episode {message.episode!r}; a reward "
                "belongs to the action before it, so at step 0 it must be 0",
            )
        return expected

    def _next_step(self, episode: str) -> int:
        step = self.open_episodes.get(episode)
        if step is None:
            raise _Refusal("unknown_episode", f"episode {episode!r} is not open in this session; start it first")
        return step

    def _observation(self, value: Any) -> Any:
        if value is None:
            raise _Refusal("bad_observation", "observation is null; send what the environment shows")
        return self._internal(value, self._decode_observation, "bad_observation", "observation")

    @staticmethod
    def _internal(value: Any, decode: Callable[[Any], Any], code: str, what: str) -> Any:
        try:
            return decode(decode_value(value))
        except ValueError as error:
            text = str(error)
            raise _Refusal(code, text if text.startswith(what) else f"{what}: {text}") from None


def _type_of(message: ClientMessage) -> str:
    return str(message.__struct_config__.tag)


def _version_text(theirs: int) -> str:
    older = "client" if theirs < PROTOCOL_VERSION else "server"
    return f"the client speaks protocol version {theirs}, the server {PROTOCOL_VERSION}; update the {older}"
