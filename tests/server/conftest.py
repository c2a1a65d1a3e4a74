"""A policy that can be steered, a server around it, and a client that sends whatever it is told to."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
from gymnasium import spaces
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect as ws_connect

from tetherl.server.config import ExternalConfig
from tetherl.server.policy_server import PolicyServer
from tetherl.spaces import ActionCodec, ObservationCodec

DEADLINE = 60.0

BOX = {"type": "Box", "low": -10, "high": 10, "shape": [3], "dtype": "float32"}
DISCRETE = {"type": "Discrete", "n": 5}


class FakePolicy:
    """Acts with `weights['a']`; notes what it was fed. Its recurrent state counts the steps of an episode."""

    def __init__(self, observation_space=None, *, recurrent=False):
        self.codec = ObservationCodec(observation_space or spaces.Box(-10, 10, (3,), np.float32))
        self.actions = ActionCodec(spaces.Discrete(5))
        self.dist = SimpleNamespace(inputs_size=5)
        self.is_recurrent = recurrent
        self.uses_prev_action = self.uses_prev_reward = recurrent
        self.state_size = 2 if recurrent else 0
        self.action = 0
        self.calls = []
        self.error = None
        self.gate = None  # when set, act() waits for it
        self.entered = threading.Event()

    def load_weights(self, weights):
        self.action = int(weights["a"])

    def act(self, obs, prev_action, prev_reward, has_prev, state, *, explore, generator, mask=None):
        self.entered.set()
        if self.gate is not None:
            assert self.gate.wait(DEADLINE)
        if self.error is not None:
            raise self.error
        n = len(has_prev)
        self.calls.append(
            SimpleNamespace(
                n=n,
                obs=obs,
                explore=explore,
                prev_action=prev_action.copy(),
                prev_reward=prev_reward.copy(),
                has_prev=has_prev.copy(),
                state=None if state is None else state.copy(),
                mask=None if mask is None else mask.copy(),
            )
        )
        return SimpleNamespace(
            actions=np.full((n, 1), self.action, np.int64),
            logp=np.full(n, -0.5, np.float32),
            dist=np.zeros((n, 5), np.float32),
            state=None if state is None else state + 1,
        )


class Client:
    """Speaks the protocol message by message. Pushed phase changes are kept aside in `phases`."""

    def __init__(self, url, *, as_json=False, **connect_kw):
        connecting = ws_connect(url, compression=None, open_timeout=DEADLINE, close_timeout=2, **connect_kw)
        self.ws = connecting.__enter__()
        self.as_json = as_json
        self.id = 0
        self.phases = []

    def send(self, type, **fields):
        self.id += 1
        message = {"type": type, "id": self.id, **fields}
        data = msgspec.json.encode(message).decode() if self.as_json else msgspec.msgpack.encode(message)
        self.ws.send(data)
        return self.id

    def receive(self, timeout=DEADLINE, *, phase=False):
        """The next reply; with phase=True the next push as well."""
        end = time.monotonic() + timeout
        while True:
            data = self.ws.recv(max(0.0, end - time.monotonic()))
            decode = msgspec.json.decode if isinstance(data, str) else msgspec.msgpack.decode
            message = decode(data)
            if message["type"] != "phase":
                return message
            self.phases.append(message)
            if phase:
                return message

    def ask(self, type, **fields):
        id = self.send(type, **fields)
        reply = self.receive()
        assert reply["re"] == id, reply
        return reply

    def hello(self, **fields):
        return self.ask("hello", protocol=1, **fields)

    def start(self, episode="e", **fields):
        return self.ask("start_episode", episode=episode, **fields)

    def act(self, step, reward=0.0, episode="e", obs=(1.0, 2.0, 3.0)):
        return self.ask("act", episode=episode, step=step, observation=list(obs), reward=reward if step else 0.0)

    def end(self, step, reward=0.0, episode="e", **fields):
        return self.ask("end_episode", episode=episode, step=step, reward=reward, **fields)

    def closed(self):
        """Reads until the server closes; the close code and reason."""
        try:
            while True:
                self.receive()
        except ConnectionClosed as closed:
            return (closed.rcvd.code, closed.rcvd.reason) if closed.rcvd else (None, "")

    def kill(self):
        """The process is gone: no goodbye."""
        self.ws.socket.shutdown(2)


@pytest.fixture
def deadline():
    return DEADLINE


@pytest.fixture
def fake_policy():
    return FakePolicy


@pytest.fixture
def config():
    """Builds an ExternalConfig; any free port."""

    def build(**fields):
        given = {"observation_space": BOX, "action_space": DISCRETE, "port": 0, "worker_port": 0} | fields
        return ExternalConfig(**given)

    return build


@pytest.fixture
def serve(config):
    """serve(policy=, config fields..., server=dict(...)) -> server, url; stops them at the end."""
    servers = []

    def start(policy=None, *, server=None, weights=True, **fields):
        given = {"worker": 1, "worker_port": 0, "token": None} | (server or {})
        made = PolicyServer(policy or FakePolicy(), config(**fields), **given)
        servers.append(made)
        url = made.start()
        if weights:
            made.set_weights({"a": np.array(1)}, 1)
        return made, url

    yield start
    for made in servers:
        made.stop()


@pytest.fixture
def join():
    """Opens clients and closes them at the end: join(url, **hello fields) -> Client that said hello."""
    clients = []

    def open_client(url, *, hello=True, as_json=False, connect=None, **fields):
        client = Client(url, as_json=as_json, **(connect or {}))
        clients.append(client)
        if hello:
            client.welcome = client.hello(**fields)
            assert client.welcome["type"] == "welcome", client.welcome
        return client

    yield open_client
    closers = [threading.Thread(target=client.ws.close, daemon=True) for client in clients]
    for closer in closers:
        closer.start()
    for closer in closers:
        closer.join(5)


@pytest.fixture
def until():
    """Waits until a condition holds."""

    def wait(condition, what="condition"):
        end = time.monotonic() + DEADLINE
        while not condition():
            assert time.monotonic() < end, f"{what} did not come true within {DEADLINE} s"
            time.sleep(0.005)

    return wait


@pytest.fixture
def balanced():
    """Checks a worker's books against the fragments that were taken from it."""

    def check(counts, *samples):
        emitted = sum(len(f) for sample in samples for f in sample.fragments)
        assert counts.emitted == emitted
        assert counts.received == counts.emitted + counts.open + sum(counts.dropped.values())

    return check
