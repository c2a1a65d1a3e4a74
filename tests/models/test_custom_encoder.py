"""Encoders of the user's own: the contract, its errors, and the example of the documentation."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from gymnasium import spaces
from torch import nn

from tetherl.algorithm import Algorithm
from tetherl.config import RunConfig
from tetherl.errors import ConfigError

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
HERE = "custom_encoders_of_this_test"
SOURCE = """
import torch
from torch import nn

class Plain(nn.Module):
    def __init__(self, observation_space, action_space, config):
        super().__init__()
        self.given = (observation_space, action_space, config)
        self.dense = nn.Linear(5, config.custom_config.get("units", 7))

    def forward(self, obs):
        self.seen = dict(obs)
        return self.dense(obs[""].float())

class Leaves(nn.Module):
    def __init__(self, observation_space, action_space, config):
        super().__init__()

    def forward(self, obs):
        self.seen = {k: (tuple(v.shape), v.dtype) for k, v in obs.items()}
        return obs["camera"].flatten(1).float() + obs["door"].float().unsqueeze(1)

class Raises(nn.Module):
    def __init__(self, observation_space, action_space, config):
        raise KeyError("depth")

class Fails(Plain):
    def forward(self, obs):
        return self.dense(obs["speed"])

class Flat(Plain):
    def forward(self, obs):
        return super().forward(obs).sum(1)

def number(*args):
    return 3
"""


@pytest.fixture(autouse=True)
def module(tmp_path, monkeypatch):
    (tmp_path / f"{HERE}.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop(HERE, None)


def test_the_class_is_given_spaces_and_settings_and_its_features_are_used(kit):
    net = kit.policy(custom=f"{HERE}:Plain", custom_config={"units": 9}, vf_share_layers=True)
    own = net.trunk.encoder.module
    assert own.given[0] == kit.VECTOR and own.given[1] == kit.ACTIONS["discrete"]
    assert own.given[2].custom_config == {"units": 9}
    assert net.trunk.width == 9 and net.value_trunk is None
    before = net(*kit.rows(net, 2).tensors()).values
    with torch.no_grad():
        own.dense.bias.add_(1)
    assert not torch.allclose(net(*kit.rows(net, 2).tensors()).values, before)


def test_leaves_arrive_in_their_own_dtypes(kit):
    space = spaces.Dict({"camera": spaces.Box(0, 255, (4, 3, 2), np.uint8), "door": spaces.Discrete(5, start=3)})
    net = kit.policy(space, custom=f"{HERE}:Leaves")
    net.act(*kit.rows(net, 6), None, explore=True, generator=torch.Generator())
    assert net.trunk.encoder.module.seen == {
        "camera": ((6, 4, 3, 2), torch.uint8),
        "door": ((6,), torch.int64),
    }
    assert net.trunk.width == 24, "two parts, but no joint layer: joining is the module's own affair"


def test_normalised_observations_arrive_normalised(kit):
    net = kit.policy(spaces.Box(0, 255, (5,)), custom=f"{HERE}:Plain", normalize_observations=True)
    rows = kit.rows(net, 50)
    net.normalizer.merge(net.normalizer.moments(rows.tensors()[0]))
    net(*rows.tensors())
    seen = net.trunk.encoder.module.seen[""]
    torch.testing.assert_close(seen.mean(0), torch.zeros(5), atol=1e-5, rtol=0)


@pytest.mark.parametrize("rnn", [None, "lstm", "gru"])
def test_with_core_and_separate_value_function(kit, rnn):
    net = kit.lively(kit.policy(custom=f"{HERE}:Plain", rnn=rnn, vf_share_layers=False))
    assert net.trunk.encoder.module is not net.value_trunk.encoder.module
    rows = kit.rows(net, 4)
    state = np.zeros((4, net.state_size), np.float32) if rnn else None
    acted = net.act(*rows, state, explore=True, generator=torch.Generator().manual_seed(0))
    out = net(*rows.tensors(), [1] * 4, None)
    np.testing.assert_allclose(acted.dist, out.dist.detach(), atol=1e-5)
    (out.dist.sum() + out.values.sum()).backward()
    assert all(p.grad is not None for p in net.parameters())
    other = kit.policy(custom=f"{HERE}:Plain", rnn=rnn, vf_share_layers=False, seed=1)
    other.load_weights(net.weights())
    assert torch.equal(other(*rows.tensors(), [1] * 4, None).dist, out.dist)


def test_the_seed_decides_its_weights_and_the_global_state_stays(kit):
    torch.manual_seed(1)
    before = torch.get_rng_state()
    a, b, c = (kit.policy(custom=f"{HERE}:Plain", seed=s).weights() for s in (3, 3, 4))
    assert torch.equal(torch.get_rng_state(), before)
    key = "trunk.encoder.module.dense.weight"
    assert np.array_equal(a[key], b[key]) and not np.array_equal(a[key], c[key])
    assert not np.array_equal(a[key], a["value_" + key]), "two copies, two beginnings"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("Plain", r"'Plain' names no class; expected 'module:Name'"),
        ("no.such:Thing", r"'no.such:Thing' cannot be imported"),
        (f"{HERE}:Missing", r"cannot be imported.*Missing"),
        (f"{HERE}:Raises", r"cannot be built: KeyError: 'depth'"),
        (f"{HERE}:Fails", r"fails on two observations of zeros \('': \[2, 5\] torch.float32\): KeyError: 'speed'"),
        (f"{HERE}:Flat", r"must return features \[N, width\].*got \[2\]"),
        (f"{HERE}:number", r"gave a int, expected a torch.nn.Module"),
    ],
)
def test_what_is_wrong_is_said_at_construction(kit, name, text):
    with pytest.raises(ConfigError, match=rf"model\.custom: .*{text}"):
        kit.policy(custom=name)


def test_the_example_of_the_documentation_trains(tmp_path, monkeypatch):
    page = PAGE.read_text()
    program, settings = (re.search(rf"```{kind}\n(.*?)```", page, re.DOTALL)[1] for kind in ("python", "yaml"))
    (tmp_path / "my_models.py").write_text(program)
    (tmp_path / "my_radar.py").write_text(
        "import gymnasium, numpy as np\n"
        "class Radar(gymnasium.Env):\n"
        "    observation_space = gymnasium.spaces.Box(0, 9, (12,))\n"
        "    action_space = gymnasium.spaces.Discrete(2)\n"
        "    def reset(self, *, seed=None, options=None):\n"
        "        super().reset(seed=seed)\n"
        "        self.t = 0\n"
        "        return self.look(), {}\n"
        "    def look(self):\n"
        "        return self.np_random.uniform(0, 9, 12).astype(np.float32)\n"
        "    def step(self, action):\n"
        "        self.t += 1\n"
        "        return self.look(), float(action), self.t == 9, False, {}\n"
    )
    config = {
        "env": "my_radar:Radar",
        "name": "radar",
        "runs_dir": str(tmp_path),
        "engine": "inline",
        "algorithm": {"train_batch_size": 128, "minibatch_size": 64, "epochs": 1},
        "stop": {"iterations": 2},
        **yaml.safe_load(settings),
    }
    with Algorithm(RunConfig.from_dict(config)) as algorithm:
        assert isinstance(algorithm.policy.trunk.encoder.module, nn.Module)
        assert algorithm.policy.trunk.encoder.module.conv.out_channels == 8
        algorithm.run()
        assert algorithm.metrics["learner/ratio_max_first"] <= 1e-4
    for name in ("my_models", "my_radar"):
        sys.modules.pop(name, None)
