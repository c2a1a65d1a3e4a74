"""Settings of training from external clients."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

PositiveInt = Annotated[int, Meta(ge=1)]


class ExternalConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The `external` section: clients connect and play; tetherl does not step them."""

    observation_space: Annotated[dict[str, Any], Meta(description="space of the observations that clients send")]
    action_space: Annotated[dict[str, Any], Meta(description="space of the actions that clients receive")]
    address: Annotated[str, Meta(description="address to listen on")] = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535, description="port of the front door; 0: any free port")] = 9900
    worker_port: Annotated[
        int, Meta(ge=0, le=65535, description="port of worker 1, worker i at + i - 1; 0: any free ports")
    ] = 9901
    token_file: Annotated[
        str | None, Meta(description="file with the token clients must send (else TETHERL_TOKEN, if set)")
    ] = None
    allow_open: Annotated[bool, Meta(description="listen beyond loopback without a token; anyone can then join")] = (
        False
    )
    during_learning: Annotated[
        Literal["keep", "hold", "discard"],
        Meta(description="fate of the steps that arrive while the learner learns"),
    ] = "keep"
    env_config: Annotated[
        dict[str, Any], Meta(description="sent to each client when it joins, for the game to read")
    ] = {}
    max_sessions: Annotated[int, Meta(ge=1, description="sessions per worker")] = 1024
    max_episodes_per_session: Annotated[int, Meta(ge=1, description="open episodes per session")] = 64
    max_message_bytes: Annotated[
        Annotated[int, Meta(ge=1024)] | None,
        Meta(description="largest message; default: derived from the observation space"),
    ] = None
    max_episode_steps: Annotated[
        PositiveInt | None,
        Meta(
            description="longest allowed episode in steps, longer ones are cut and bootstrapped; "
            "default: 100000, with complete_episodes one train batch",
        ),
    ] = None
    hello_timeout_s: Annotated[float, Meta(gt=0, description="time for a new connection to say hello")] = 10.0
