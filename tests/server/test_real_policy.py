"""The server with a real recurrent policy: what is stored is what the policy computed."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gymnasium import spaces

from tetherl.models.config import ModelConfig
from tetherl.models.policy import Policy
from tetherl.spaces import space_to_spec


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def tensors(fragment):
    """Inputs of `Policy.forward` for one fragment as one chunk."""
    before = fragment.prev_action is not None
    width = fragment.actions.shape[1]
    first = fragment.prev_action if before else np.zeros(width, fragment.actions.dtype)
    prev_action = np.concatenate([first[None], fragment.actions[:-1]])
    prev_reward = np.concatenate([[fragment.prev_reward if before else 0.0], fragment.rewards[:-1]])
    has_prev = np.array([before] + [True] * (len(fragment) - 1))
    return (
        {name: torch.from_numpy(a) for name, a in fragment.obs.items()},
        torch.from_numpy(prev_action),
        torch.from_numpy(prev_reward.astype(np.float32)),
        torch.from_numpy(has_prev),
        [len(fragment)],
        torch.from_numpy(fragment.state_in.copy())[None],
    )


def test_ratios_are_one_through_the_server(serve, join, deadline, balanced):
    observation_space = spaces.Box(-1, 1, (3,), np.float32)
    action_space = spaces.MultiDiscrete([2, 3])
    model = ModelConfig(
        fcnet_hiddens=[8],
        use_lstm=True,
        lstm_cell_size=6,
        lstm_use_prev_action=True,
        lstm_use_prev_reward=True,
    )
    policy, same = (Policy(observation_space, action_space, model, seed=3) for _ in range(2))
    server, url = serve(
        policy,
        weights=False,
        observation_space=space_to_spec(observation_space),
        action_space=space_to_spec(action_space),
        server={"fragment_length": 4},
    )
    server.set_weights(same.weights(), 7)
    clients = [join(url) for _ in range(3)]
    rng = np.random.default_rng(0)
    for client in clients:
        client.start()
    for step in range(11):
        asked = [
            client.send(
                "act",
                episode="e",
                step=step,
                observation=rng.uniform(-1, 1, 3).tolist(),
                reward=float(rng.normal()) if step else 0.0,
            )
            for client in clients
        ]
        for client, id in zip(clients, asked, strict=True):
            reply = client.receive()
            assert reply["re"] == id and reply["type"] == "action", reply
    for client in clients:
        client.end(11, truncated=True, observation=[0, 0, 0])
    sample = server.take(deadline, 33)
    balanced(sample.counts, sample)
    assert sorted(len(f) for f in sample.fragments) == [3, 3, 3, 4, 4, 4, 4, 4, 4]
    for fragment in sample.fragments:
        with torch.no_grad():
            out = same(*tensors(fragment))
            logp = same.dist.log_prob(out.dist, torch.from_numpy(fragment.actions))
        np.testing.assert_allclose(out.dist.numpy(), fragment.dist, atol=1e-5)
        np.testing.assert_allclose(logp.numpy(), fragment.logp, atol=1e-5)
        assert set(fragment.versions) == {7}
