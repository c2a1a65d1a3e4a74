"""Previous action and reward as network input."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch
from gymnasium import spaces

from tetherl.models.previous import PreviousInputs
from tetherl.spaces import ActionCodec

GOLDEN = Path(__file__).parent.parent / "data" / "golden.json"


def _case(name: str) -> dict:
    cases = json.loads(GOLDEN.read_text())["cases"]
    return next(c for c in cases if c["name"] == name)


def encode(space, rows, rewards=None, has_prev=None, *, action=True, reward=False) -> torch.Tensor:
    codec = ActionCodec(space)
    rows = torch.as_tensor(np.asarray(rows, codec.dtype)).view(-1, codec.width)
    rewards = torch.zeros(len(rows)) if rewards is None else torch.tensor(rewards, dtype=torch.float32)
    has = torch.ones(len(rows), dtype=torch.bool) if has_prev is None else torch.tensor(has_prev)
    inputs = PreviousInputs(codec, action, reward)
    out = inputs(rows, rewards, has, torch.float32)
    assert out.shape == (len(rows), inputs.width)
    return out


def test_golden_enc_01_prev_action_multidiscrete():
    case = _case("enc_01_prev_action_multidiscrete")
    actions = case["inputs"]["actions"]
    previous = [[0, 0], *actions[:-1]]  # the first row has none; what it holds must not matter
    out = encode(spaces.MultiDiscrete(case["inputs"]["nvec"]), previous, has_prev=[False, True, True])
    assert out.tolist() == case["expected"]["encoded"]
    previous[0] = [2, 1]
    out = encode(spaces.MultiDiscrete(case["inputs"]["nvec"]), previous, has_prev=[False, True, True])
    assert out.tolist() == case["expected"]["encoded"]


def test_golden_enc_02_prev_reward():
    case = _case("enc_02_prev_reward")
    rewards = [99.0, *case["inputs"]["rewards"][:-1]]
    out = encode(spaces.Discrete(2), [0] * 4, rewards, [False, True, True, True], action=False, reward=True)
    assert out.tolist() == case["expected"]["encoded"]


def test_the_founding_action_space_takes_18_inputs():
    assert PreviousInputs(ActionCodec(spaces.MultiDiscrete([2] * 9)), True, False).width == 18


def test_discrete_is_one_hot_and_zero_at_the_first_step():
    out = encode(spaces.Discrete(3, start=5), [[2], [0], [0]], has_prev=[True, True, False])
    assert out.tolist() == [[0, 0, 1], [1, 0, 0], [0, 0, 0]]


def test_multibinary_has_one_more_bit():
    out = encode(spaces.MultiBinary(2), [[0, 0], [1, 0], [1, 1]], has_prev=[True, True, False])
    assert out.tolist() == [[0, 0, 1], [1, 0, 1], [0, 0, 0]]


def test_box_enters_as_executed_with_one_more_bit():
    low, high = np.array([300, -np.inf], np.float32), np.array([500, 2], np.float32)
    rows = [[0.0, 0.0], [1.7, 5.0], [-3.0, -7.0], [np.nan, np.inf]]
    out = encode(spaces.Box(low, high), rows, has_prev=[True, True, True, False])
    # The first element is learned in [-1, 1]; the second has no lower bound and is not scaled, only clipped.
    assert out.tolist() == [[0, 0, 1], [1, 2, 1], [-1, -7, 1], [0, 0, 0]]


def test_action_and_reward_together():
    out = encode(spaces.Discrete(2), [[1], [1]], [-50.0, 3.0], [True, False], reward=True)
    assert out.tolist() == [[0, 1, -10], [0, 0, 0]]


def test_garbage_where_nothing_came_before_does_not_spread():
    out = encode(spaces.Discrete(2), [[-7]], [float("nan")], [False], reward=True)
    assert out.tolist() == [[0, 0, 0]]


def test_parts_are_concatenated_with_one_bit_in_all():
    keys = spaces.Tuple([spaces.Discrete(3), spaces.MultiBinary(2)])
    space = spaces.Dict({"aim": spaces.Box(-2, 2, (1,)), "keys": keys})
    out = encode(space, [[0.5, 2, 0, 1], [7.0, 0, 1, 1], [np.nan, 1, 1, 1]], has_prev=[True, True, False])
    assert out.tolist() == [[0.5, 0, 0, 1, 0, 1, 1], [1, 1, 0, 0, 1, 1, 1], [0] * 7]
    discrete = spaces.Tuple([spaces.Discrete(2), spaces.Discrete(2)])
    assert encode(discrete, [[1, 0], [0, 0]], has_prev=[True, False]).tolist() == [
        [0, 1, 1, 0],
        [0] * 4,
    ]  # no bit needed


def test_squashed_actions_enter_as_executed():
    codec = ActionCodec(spaces.Box(300, 500, (2,)), squash=True)
    rows = torch.tensor([[0.5, -20.0], [0.0, 1.0]])
    out = PreviousInputs(codec, True, False)(rows, torch.zeros(2), torch.tensor([True, False]), torch.float32)
    torch.testing.assert_close(out, torch.tensor([[float(np.tanh(0.5)), -1.0, 1.0], [0.0, 0.0, 0.0]]))
