"""Action masks, and actions of several parts, through a server with a real policy."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gymnasium import spaces

from tetherl.client import PolicyClient
from tetherl.errors import RequestError
from tetherl.models.config import ModelConfig
from tetherl.models.policy import Policy
from tetherl.spaces import space_to_spec

OBS = spaces.Box(-1, 1, (3,), np.float32)


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def served(serve):
    def start(actions, **model):
        policy = Policy(OBS, actions, ModelConfig(fcnet_hiddens=[8], **model), seed=3)
        server, url = serve(
            policy,
            weights=False,
            observation_space=space_to_spec(OBS),
            action_space=space_to_spec(actions),
            server={"fragment_length": 8},
        )
        server.set_weights(policy.weights(), 1)
        return server, url, policy

    return start


@pytest.mark.parametrize("use_lstm", [False, True])
def test_masks_reach_the_policy_and_the_fragments(served, deadline, balanced, use_lstm):
    server, url, policy = served(spaces.MultiDiscrete([3, 4]), use_lstm=use_lstm)
    rng = np.random.default_rng(0)
    sent, got = [], []
    with PolicyClient(url) as client:
        for step in range(16):
            mask = rng.random(7) < 0.4
            mask[[rng.integers(3), 3 + rng.integers(4)]] = True
            mask = None if step == 5 else mask
            sent.append(np.ones(7, bool) if mask is None else mask)
            got.append(client.step(np.full(3, 0.1, np.float32), float(step > 0), action_mask=mask))
        client.step(np.zeros(3, np.float32), 1.0, terminated=True)
    assert all(mask[a] and mask[3 + b] for mask, (a, b) in zip(sent, got, strict=True))
    sample = server.take(deadline, 16)
    balanced(sample.counts, sample)
    np.testing.assert_array_equal(np.concatenate([f.mask for f in sample.fragments]), sent)
    for f in sample.fragments:
        dist, actions = torch.from_numpy(f.dist), torch.from_numpy(f.actions)
        np.testing.assert_allclose(policy.dist.log_prob(dist, actions, torch.from_numpy(f.mask)), f.logp, atol=1e-5)


def test_masked_and_unmasked_clients_share_a_forward_pass(served, deadline):
    server, url, _ = served(spaces.Discrete(4))
    with PolicyClient(url) as first, PolicyClient(url) as second:
        for step in range(8):
            assert first.step(np.zeros(3, np.float32), float(step > 0), action_mask=[0, 0, 1, 0]) == 2
            second.step(np.zeros(3, np.float32), float(step > 0))
        first.step(np.zeros(3, np.float32), 1.0, terminated=True)
        second.step(np.zeros(3, np.float32), 1.0, terminated=True)
    fragments = server.take(deadline, 16).fragments
    assert sorted(f.mask is None for f in fragments) == [False, True]


def test_a_mask_that_forbids_everything_is_refused_and_the_game_goes_on(served):
    _, url, _ = served(spaces.Discrete(4))
    with PolicyClient(url) as client:
        episode = client.start_episode("level 3")
        for mask, words in (([0] * 4, "level 3.*forbids every choice"), ([1] * 3, r"level 3.*\(3,\).*\(4,\)")):
            with pytest.raises(RequestError, match=words) as caught:
                client.get_action(episode, np.zeros(3, np.float32), action_mask=mask)
            assert caught.value.code == "bad_mask"
        assert client.get_action(episode, np.zeros(3, np.float32), action_mask=[0, 1, 0, 0]) == 1


def test_spaces_without_masks_say_so(served):
    _, url, _ = served(spaces.Box(-1, 1, (2,), np.float32))
    with PolicyClient(url) as client:
        with pytest.raises(RequestError, match="Box actions have none") as caught:
            client.step(np.zeros(3, np.float32), action_mask=[1, 1])
        assert caught.value.code == "bad_mask"


@pytest.mark.parametrize("distribution", ["gaussian", "tanh"])
def test_actions_of_parts_are_played_logged_and_stored(served, deadline, distribution):
    aim = spaces.Box(300, 500, (2,), np.float32)
    space = spaces.Dict({"aim": aim, "more": spaces.Tuple([spaces.Discrete(3, start=1), spaces.MultiBinary(2)])})
    server, url, policy = served(space, use_lstm=True, action_distribution=distribution)
    with PolicyClient(url) as client:
        episode = client.start_episode()
        actions = []
        for step in range(6):
            if step == 3:
                action = {"aim": np.array([350, 450], np.float32), "more": (2, np.array([1, 0]))}
                client.log_action(episode, np.zeros(3, np.float32), action)
            else:
                action = client.get_action(episode, np.zeros(3, np.float32))
                assert space.contains({**action, "more": (np.int64(action["more"][0]), action["more"][1])})
            actions.append(action)
            client.log_returns(episode, 1.0)
        with pytest.raises(RequestError, match="aim"):
            client.log_action(episode, np.zeros(3, np.float32), {"aim": [0, 0], "more": [1, [0, 0]]})
        client.end_episode(episode)
    (fragment,) = server.take(deadline, 6).fragments
    assert fragment.actions.dtype == np.float32 and fragment.mask is None
    assert fragment.by_policy.tolist() == [True] * 3 + [False] + [True] * 2
    for row, action in zip(fragment.actions, actions, strict=True):
        back = policy.actions.to_env(row)
        np.testing.assert_allclose(back["aim"], action["aim"], rtol=1e-5)
        assert back["more"][0] == action["more"][0]
        np.testing.assert_array_equal(back["more"][1], action["more"][1])
