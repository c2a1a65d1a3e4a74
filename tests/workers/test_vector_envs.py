"""Copies of an environment as one vector: every autoreset mode gives the same transitions, and nothing else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, ClassVar

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.envs.classic_control.cartpole import CartPoleVectorEnv
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv
from gymnasium.vector.utils import batch_space

from tetherl.data.fragment import Fragment
from tetherl.errors import ConfigError, SpaceError
from tetherl.models.config import ModelConfig
from tetherl.testing.environments import CountingEnv
from tetherl.workers.rollout import RolloutWorker
from tetherl.workers.spec import WorkerSpec
from tetherl.workers.vector import EnvVector

GOLDEN = Path(__file__).parent.parent / "data" / "golden.json"
COUNTING = "tetherl.testing.environments:CountingEnv"
MODES = {"next_step": AutoresetMode.NEXT_STEP, "same_step": AutoresetMode.SAME_STEP}


class Script(VectorEnv):
    """One copy that replays a recorded stream, with one buffer for all observations."""

    instances: ClassVar[list[Script]] = []

    def __init__(self, num_envs: int, stream: list[dict[str, Any]], mode: Any) -> None:
        self.num_envs = num_envs
        self.metadata = {} if mode is None else {"autoreset_mode": mode}
        self.single_observation_space, self.single_action_space = spaces.Discrete(100), spaces.Discrete(10_000)
        self.observation_space, self.action_space = (
            batch_space(s, num_envs) for s in (self.single_observation_space, self.single_action_space)
        )
        self.stream, self.actions = list(stream), []
        self.buffer = np.zeros(num_envs, np.int64)
        Script.instances.append(self)

    def reset(self, *, seed=None, options=None):
        self.buffer[:] = self.stream.pop(0)["obs"]
        return self.buffer, {}

    def step(self, actions):
        self.actions.append(int(actions[0]))
        row = self.stream.pop(0)
        self.buffer[:] = row["obs"]
        infos = {}
        if "final_obs" in row:
            infos = {"final_obs": np.array([np.int64(row["final_obs"])], object), "_final_obs": np.array([True])}
        flags = (np.array([row[key]]) for key in ("terminated", "truncated"))
        return self.buffer, np.array([row["reward"]]), *flags, infos


def counting_vector(num_envs: int, mode: str = "next_step", **settings: Any) -> VectorEnv:
    return SyncVectorEnv([lambda: CountingEnv(**settings)] * num_envs, autoreset_mode=MODES[mode])


IDS = {
    "VectorTest/Script-v0": {"entry_point": CountingEnv, "vector_entry_point": Script},
    "VectorTest/Counting-v0": {"entry_point": CountingEnv, "vector_entry_point": counting_vector},
}


@pytest.fixture(autouse=True)
def registered():
    for name, entries in IDS.items():
        gymnasium.register(name, **entries)
    Script.instances.clear()
    yield
    for name in IDS:
        del gymnasium.registry[name]


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def worker(
    env: Any, copies: int = 1, mode: str = "own", *, index: int = 1, seed: int = 0, **more: Any
) -> RolloutWorker:
    model = more.pop("model", ModelConfig(fcnet_hiddens=[8]))
    return RolloutWorker(
        WorkerSpec(index=index, seed=seed, model=model, env=env, envs=copies, vectorization=mode, **more)
    )


def vector(env: Any, copies: int, mode: str = "auto", *, seed: int = 0, **env_config: Any) -> EnvVector:
    return EnvVector(env, env_config, copies, np.random.SeedSequence(seed), mode)


# ---- both autoreset modes


@pytest.mark.parametrize("mode", MODES)
def test_golden_autoreset_01_streams(mode):
    case = next(c for c in json.loads(GOLDEN.read_text())["cases"] if c["name"] == "autoreset_01_streams")
    more = {"action": "c0", "obs": 21, "reward": 4.0, "terminated": False, "truncated": False}
    settings = {"stream": [*case["inputs"][mode], more], "mode": MODES[mode]}
    rollout = worker("VectorTest/Script-v0", env_config=settings)
    script = Script.instances[-1]
    ends: list[int] = []
    end = rollout._end
    rollout._end = lambda copy, reward, terminated, truncated, final: (  # after a termination no fragment keeps it
        ends.append(int(final[""])),
        end(copy, reward, terminated, truncated, final),
    )
    samples = [rollout.sample(3, 1), rollout.sample(1, 2)]

    names = [row["action"] for row in settings["stream"][1:]]
    called = dict(zip(script.actions, names, strict=True))
    assert len(called) == len(names), "actions that differ from each other"
    transitions = []
    for fragment in samples[0].fragments:
        after = [int(o) for o in fragment.obs[""][1:]]
        after.append(int(fragment.final_obs[""]) if fragment.final_obs is not None else ends[0])
        for t in range(len(fragment)):
            last = t == len(fragment) - 1
            action = called[int(fragment.actions[t, 0])]
            flags = [fragment.terminated and last, fragment.truncated and last]
            transitions.append([int(fragment.obs[""][t]), action, float(fragment.rewards[t]), after[t], *flags])
    assert transitions == case["expected"]["transitions"]
    assert samples[0].counts.received == case["expected"]["env_steps"]
    assert [(e.episode_return, e.length) for e in samples[0].episodes] == [(3.0, 2), (3.0, 1)]
    assert ends == [2, 11]

    dropped = case["expected"]["dropped_rows_next_step"] if mode == "next_step" else 0
    assert len(script.actions) == samples[1].counts.received + dropped == 4 + dropped
    (last,) = samples[1].fragments
    assert (last.obs[""].tolist(), called[int(last.actions[0, 0])], last.t0) == ([20], "c0", 0)


def episodes_of(fragments: list[Fragment]) -> dict[str, list[Fragment]]:
    found: dict[str, list[Fragment]] = {}
    for fragment in fragments:
        found.setdefault(fragment.episode_id, []).append(fragment)
    return found


@pytest.mark.parametrize("ends", ["terminate", "truncate", "alternate"])
@pytest.mark.parametrize("mode", ["own next_step", "own same_step", "sync", "async"])
def test_no_step_is_lost_doubled_or_mixed(mode, ends):
    """Observations count episodes and steps: each must continue, in every copy, across samples and fragments."""
    kind, _, reset = mode.partition(" ")
    env = "VectorTest/Counting-v0" if kind == "own" else COUNTING
    settings = {"ends": ends, **({"mode": reset} if reset else {})}
    rollout = worker(env, 3, kind, env_config=settings, fragment_length=4)
    samples = [rollout.sample(5 + i, i + 1) for i in range(8)]
    rollout.close()
    fragments = [f for s in samples for f in s.fragments]
    rows = sum(len(f) for f in fragments)
    assert rows == samples[-1].counts.received >= 3 * sum(5 + i for i in range(8))
    starts: dict[int, int] = {}
    finished = 0
    for parts in episodes_of(fragments).values():
        number = int(parts[0].obs[""][0, 0])
        starts[number] = starts.get(number, 0) + 1
        steps = np.concatenate([f.obs[""] for f in parts])
        assert steps.tolist() == [[number, t] for t in range(len(steps))]
        assert np.concatenate([f.rewards for f in parts]).tolist() == [t + 1 for t in range(len(steps))]
        assert [f.t0 for f in parts] == np.cumsum([0] + [len(f) for f in parts[:-1]]).tolist()
        for f in parts:
            if f.final_obs is not None:
                assert f.final_obs[""].tolist() == [number, f.t0 + len(f)]
        over = parts[-1].terminated or parts[-1].truncated
        finished += over
        if over:
            assert parts[-1].terminated == (ends == "terminate" or (ends == "alternate" and number % 2 == 0))
    assert finished == sum(len(s.episodes) for s in samples) > 10
    assert starts[0] == 3 and starts[1] == 3, "the first episodes of all three copies"


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("rnn", ["lstm", "gru"])
def test_an_episode_begins_without_memory_in_both_modes(mode, rnn):
    model = ModelConfig(rnn=rnn, lstm_cell_size=8, lstm_use_prev_reward=True)
    rollout = worker("VectorTest/Counting-v0", 3, env_config={"mode": mode}, model=model, fragment_length=64)
    fragments = [f for i in range(4) for f in rollout.sample(10, i + 1).fragments]
    beginnings = 0
    for parts in episodes_of(fragments).values():
        first = parts[0]
        if first.t0 == 0:
            beginnings += 1
            assert not first.state_in.any() and first.prev_action is None
        for f in parts:
            begins = f.t0 == 0
            action = np.concatenate([[f.actions[0] * 0 if begins else f.prev_action], f.actions[:-1]])
            reward = np.concatenate([[0.0 if begins else f.prev_reward], f.rewards[:-1]]).astype(np.float32)
            has_prev = np.ones(len(f), bool)
            has_prev[0] = not begins
            with torch.no_grad():
                out = rollout._policy(
                    {"": torch.from_numpy(f.obs[""])},
                    *(torch.from_numpy(a) for a in (action, reward, has_prev)),
                    [len(f)],
                    torch.from_numpy(f.state_in[None]),
                )
            np.testing.assert_allclose(out.dist.numpy(), f.dist, atol=1e-5)
    assert beginnings > 6


@pytest.mark.filterwarnings("ignore:.*AutoresetMode")
@pytest.mark.parametrize("mode", [None, AutoresetMode.DISABLED, "something else"])
def test_an_environment_that_does_not_say_how_it_resets_is_refused(mode):
    settings = {"stream": [{"obs": 0}], "mode": mode}
    with pytest.raises(ConfigError, match=r"metadata\['autoreset_mode'\] must be .*rollouts.vectorization to sync"):
        worker("VectorTest/Script-v0", env_config=settings)


# ---- what is made


def test_auto_takes_the_environments_own_version_where_it_can_stand_in():
    kinds = [
        ("CartPole-v1", 2, "auto", {}, CartPoleVectorEnv),
        ("CartPole-v1", 2, "auto", {"sutton_barto_reward": True, "max_episode_steps": 7}, CartPoleVectorEnv),
        ("CartPole-v1", 2, "auto", {"disable_env_checker": True}, SyncVectorEnv),  # a setting that it does not know
        ("CartPole-v1", 1, "auto", {}, SyncVectorEnv),
        ("CartPole-v1", 1, "own", {}, CartPoleVectorEnv),
        ("CartPole-v1", 2, "sync", {}, SyncVectorEnv),
        ("Pendulum-v1", 2, "auto", {}, SyncVectorEnv),
        (COUNTING, 2, "auto", {}, SyncVectorEnv),
        (CountingEnv, 2, "auto", {}, SyncVectorEnv),
    ]
    for env, copies, mode, settings, kind in kinds:
        made = vector(env, copies, mode, **settings)
        assert type(made._env) is kind, (env, copies, mode, settings)
        assert made.observation[""].shape[0] == copies


@pytest.mark.parametrize(
    ("env", "settings", "text"),
    [
        (COUNTING, {}, "no Gymnasium id"),
        (CountingEnv, {}, "no Gymnasium id"),
        ("Pendulum-v1", {}, "cannot be made with"),
        ("CartPole-v1", {"disable_env_checker": True}, "cannot be made with.*disable_env_checker"),
        ("CartPole-v99", {}, "cannot be made with"),
    ],
)
def test_own_where_there_is_none_is_an_error_with_its_mend(env, settings, text):
    with pytest.raises(ConfigError, match=rf"rollouts.vectorization: own.*{text}.*Set it to sync or async"):
        vector(env, 2, "own", **settings)


@pytest.mark.parametrize("mode", ["own", "sync"])
def test_copies_and_workers_begin_differently_and_repeatably(mode):
    def first(index: int, seed: int) -> list[tuple[float, ...]]:
        rollout = worker("CartPole-v1", 4, mode, index=index, seed=seed)
        return [tuple(row[""].tolist()) for row in rollout._env.rows]

    begun = [first(1, 0), first(2, 0), first(1, 1), first(2, 1)]
    assert len({row for rows in begun for row in rows}) == 16
    assert begun[0] == first(1, 0)


@pytest.mark.parametrize("mode", ["own", "sync"])
def test_limits_of_episodes_hold(mode):
    rollout = worker("CartPole-v1", 4, mode, env_config={"max_episode_steps": 5})
    sample = rollout.sample(40, 1)
    assert {e.length for e in sample.episodes} == {5}
    assert all(f.truncated and f.final_obs is not None for f in sample.fragments if len(f) == 5)
    assert sample.counts.received >= 160


# ---- observations


PARTS = spaces.Dict(
    {
        "camera": spaces.Box(0, 255, (3, 2, 1), np.uint8),
        "door": spaces.Discrete(4, start=2),
        "ids": spaces.MultiDiscrete([3, 5], start=[1, -2]),
        "keys": spaces.MultiBinary(3),
        "pair": spaces.Tuple([spaces.Box(-1, 1, (2,)), spaces.Discrete(2)]),
    }
)


class Parts(gymnasium.Env):
    """Random observations of every kind; three steps an episode. `seen` are all that were given out."""

    observation_space, action_space = PARTS, spaces.MultiDiscrete([2, 3])
    seen: ClassVar[list[Any]] = []

    def __init__(self, bad: str = "") -> None:
        self.bad = bad

    def look(self):
        value = self.observation_space.sample()
        self.seen.append(value)
        return value

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        if seed is not None:
            self.observation_space.seed(seed)
        self.t = 0
        return self.look(), {}

    def step(self, action):
        assert self.action_space.contains(action)
        self.t += 1
        value, over = self.look(), self.t == 3
        if (self.bad == "final" and over) or (self.bad == "step" and self.t == 2):
            value["pair"] = (np.array([0.5, np.nan], np.float32), 0)
        return value, np.inf if self.bad == "reward" else 1.0, False, over, {}


def test_observations_of_every_kind_arrive_as_they_were_given():
    Parts.seen = []
    rollout = worker(Parts, 1, "sync", model=ModelConfig(conv_filters=[[4, 2, 1]]))
    codec = rollout._policy.codec
    fragments = rollout.sample(9, 1).fragments
    got = []
    for f in fragments:
        got += [{name: f.obs[name][t] for name in f.obs} for t in range(len(f))]
        got.append(f.final_obs)
    wanted = [codec.encode(value) for value in Parts.seen[:-1]]
    assert len(got) == len(wanted) == 12
    for a, b in zip(got, wanted, strict=True):
        assert all(
            a[leaf.name].dtype == leaf.dtype and np.array_equal(a[leaf.name], b[leaf.name]) for leaf in codec.leaves
        )


@pytest.mark.parametrize(
    ("bad", "text"),
    [
        ("step", r"rollout worker 1, environment .*Parts.*observation 'pair/0'.*nan at index \(0, 1\)"),
        ("final", r"rollout worker 1, environment .*Parts.*observation 'pair/0'.*nan at index \(1,\)"),
        ("reward", r"rollout worker 1, environment .*Parts.*copy 1 of 2: reward is inf"),
    ],
)
def test_what_does_not_fit_is_named(bad, text):
    rollout = worker(Parts, 2, "sync", env_config={"bad": bad}, model=ModelConfig(conv_filters=[[4, 2, 1]]))
    with pytest.raises(SpaceError, match=text):
        rollout.sample(5, 1)
