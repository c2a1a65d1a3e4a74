"""The client's half of one session as a state machine: no sockets, no clock, no threads.

    session = ClientSession(token=..., name="level 3")
    id, data = session.hello()                  # send data
    answered, message = session.receive(data)   # answered: the id of the request, None for a push

Step numbers are kept here, per open episode, and advance when the server accepts a request: a refused request
can be made again. Phase, policy version and resumption time are taken from every message that carries them.
"""

from __future__ import annotations

from typing import Any

import msgspec

from tetherl.protocol.messages import (
    PROTOCOL_VERSION,
    AbortEpisode,
    Act,
    Action,
    Bye,
    ClientMessage,
    Done,
    EndEpisode,
    Error,
    Hello,
    LogAction,
    Phase,
    PhaseChange,
    Redirect,
    ServerMessage,
    StartEpisode,
    Welcome,
)
from tetherl.protocol.wire import WireError, decode_server, encode

Request = tuple[int, bytes | str]
"""The id of a request and what to send."""


class ClientSession:
    """One connection, seen from the client.

    Attributes:
        welcome: the server's answer to `hello`, None before it.
        phase, policy_version, resumes_in_s: the newest that the server told ("collecting", 0, None before).
        open_episodes: identity -> steps taken so far.
    """

    def __init__(
        self, *, token: str | None = None, name: str = "", purpose: str = "train", as_json: bool = False
    ) -> None:
        self.welcome: Welcome | None = None
        self.phase: Phase = "collecting"
        self.policy_version = 0
        self.resumes_in_s: float | None = None
        self.open_episodes: dict[str, int] = {}
        self._token = token
        self._name = name
        self._purpose: Any = purpose
        self._as_json = as_json
        self._next_id = 0
        self._unanswered: dict[int, ClientMessage] = {}

    def hello(self) -> Request:
        return self._request(
            Hello(
                id=self._next_id,
                protocol=PROTOCOL_VERSION,
                token=self._token,
                name=self._name,
                purpose=self._purpose,
            )
        )

    def start_episode(self, episode: str, training: bool = True) -> Request:
        return self._request(StartEpisode(id=self._next_id, episode=episode, training=training))

    def act(self, episode: str, observation: Any, reward: float = 0.0, mask: Any = None) -> Request:
        """May follow `start_episode` without waiting for its answer."""
        return self._request(
            Act(
                id=self._next_id,
                episode=episode,
                step=self.open_episodes.get(episode, 0),
                observation=observation,
                reward=reward,
                mask=msgspec.UNSET if mask is None else mask,
            )
        )

    def log_action(self, episode: str, observation: Any, action: Any, reward: float = 0.0) -> Request:
        return self._request(
            LogAction(
                id=self._next_id,
                episode=episode,
                step=self.open_episodes.get(episode, 0),
                observation=observation,
                action=action,
                reward=reward,
            )
        )

    def end_episode(
        self, episode: str, observation: Any, reward: float, *, terminated: bool, truncated: bool
    ) -> Request:
        return self._request(
            EndEpisode(
                id=self._next_id,
                episode=episode,
                step=self.open_episodes.get(episode, 0),
                reward=reward,
                observation=observation,
                terminated=terminated,
                truncated=truncated,
            )
        )

    def abort_episode(self, episode: str, reason: str = "") -> Request:
        return self._request(AbortEpisode(id=self._next_id, episode=episode, reason=reason))

    def bye(self) -> Request:
        return self._request(Bye(id=self._next_id))

    def receive(self, data: bytes | str) -> tuple[int | None, ServerMessage]:
        """Takes one message of the server: the id of the request that it answers, and the message.

        Raises:
            WireError: not a message of a server, or an answer that fits no request. The session is over.
        """
        message = decode_server(data)
        if isinstance(message, PhaseChange):
            self._take_state(message)
            return None, message
        if isinstance(message, Error) and message.re is None:
            if message.fatal or not self._unanswered:
                return None, message
            re = next(iter(self._unanswered))  # the server could not read an id: the oldest is meant
        else:
            re = message.re  # type: ignore[assignment]  # None was dealt with
        request = self._unanswered.pop(re, None)
        if request is None:
            raise WireError(f"the server answered request {re}, which is not waiting for an answer")
        if not isinstance(message, Error):
            self._check_pair(request, message)
            self._accepted(request, message)
        return re, message

    def _request(self, message: ClientMessage) -> Request:
        data = encode(message, self._as_json)  # may raise TypeError; the id is then not used up
        self._next_id += 1
        self._unanswered[message.id] = message
        return message.id, data

    @staticmethod
    def _check_pair(request: ClientMessage, message: ServerMessage) -> None:
        if isinstance(request, Hello):
            fits = isinstance(message, Welcome | Redirect)
        elif isinstance(request, Act):
            fits = isinstance(message, Action) and (message.episode, message.step) == (
                request.episode,
                request.step,
            )
        else:
            fits = isinstance(message, Done)
        if not fits:
            raise WireError(f"{type(message).__name__} does not answer {type(request).__name__} {request.id}")

    def _accepted(self, request: ClientMessage, message: ServerMessage) -> None:
        if isinstance(message, Welcome):
            self.welcome = message
        if isinstance(message, Welcome | Action | Done):
            self._take_state(message)
        if isinstance(request, StartEpisode):
            self.open_episodes[request.episode] = 0
        elif isinstance(request, Act | LogAction):
            self.open_episodes[request.episode] = request.step + 1
        elif isinstance(request, EndEpisode | AbortEpisode):
            self.open_episodes.pop(request.episode, None)

    def _take_state(self, message: Welcome | Action | Done | PhaseChange) -> None:
        self.phase = message.phase
        self.policy_version = message.policy_version
        self.resumes_in_s = message.resumes_in_s
