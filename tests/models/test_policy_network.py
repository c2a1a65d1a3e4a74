"""The policy as a whole: size, seeds, acting against learning, weights, value normalisation."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import nn

from tetherl.errors import CheckpointError, ConfigError
from tetherl.models import Policy
from tetherl.models.config import ModelConfig

KINDS = ["discrete", "multidiscrete", "one part", "nine keys", "multibinary", "box", "parts"]
IMAGE_FILTERS = [[4, [3, 3], 2], [8, [3, 3], 2]]


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def run(net: Policy, rows, lengths=None, state=None):
    with torch.no_grad():
        return net(*rows.tensors(), lengths, state)


# ---- size and structure


@pytest.mark.parametrize(("post", "count"), [([512], 2_216_723), ([], 1_954_067)])
def test_founding_parameter_count(kit, post, count):
    space = spaces.Box(0, 255, (240, 320, 1), np.uint8)
    net = kit.policy(space, kit.ACTIONS["nine keys"], conv_filters=kit.FOUNDING, post_fcnet_hiddens=post, use_lstm=True)
    assert sum(p.numel() for p in net.parameters()) == count
    assert net.state_size == 256


def test_founding_convolutions_have_the_planned_sizes(kit):
    space = spaces.Box(0, 255, (240, 320, 1), np.uint8)
    net = kit.policy(space, kit.ACTIONS["nine keys"], conv_filters=kit.FOUNDING, use_lstm=True)
    shapes: list[tuple[int, ...]] = []
    for module in net.modules():
        if isinstance(module, nn.Conv2d):
            module.register_forward_hook(lambda _, __, out: shapes.append(tuple(out.shape[1:])))
    run(net, kit.rows(net, 2), [2])
    assert shapes == [(16, 80, 107), (32, 27, 36), (64, 9, 12), (128, 5, 6), (256, 3, 3), (512, 1, 1)]


def test_separate_value_network_by_default_for_vectors(kit):
    separate, shared = kit.policy(), kit.policy(vf_share_layers=True)
    assert sum(p.numel() for p in separate.trunk.parameters()) == 5 * 64 + 64 + 64 * 64 + 64
    assert separate.value_trunk is not None and shared.value_trunk is None
    rows = kit.rows(separate, 3)
    before = run(separate, rows)
    with torch.no_grad():
        for parameter in separate.value_trunk.parameters():
            parameter.add_(0.1)
    after = run(separate, rows)
    assert torch.equal(before.dist, after.dist)
    assert not torch.allclose(before.values, after.values)


def test_post_layers_are_built_for_vectors_too(kit):
    net = kit.policy(fcnet_hiddens=[8], post_fcnet_hiddens=[16], use_lstm=True, lstm_cell_size=4)
    assert [tuple(m.weight.shape) for m in net.trunk.post if isinstance(m, nn.Linear)] == [(16, 8)]


@pytest.mark.parametrize("lstm", [False, True])
def test_several_inputs_meet_before_the_head(kit, lstm):
    """The effect of one leaf on the outputs depends on the other leaf: the head alone could not do that."""
    space = spaces.Dict({"a": spaces.Box(-1, 1, (2,)), "b": spaces.Box(-1, 1, (2,))})
    net = kit.lively(kit.policy(space, use_lstm=lstm))

    def dist(a: float, b: float) -> torch.Tensor:
        rows = kit.rows(net, 1)
        rows.obs["a"][:], rows.obs["b"][:] = a, b
        return run(net, rows, [1]).dist

    mixed = dist(1, 1) - dist(1, -1) - dist(-1, 1) + dist(-1, -1)
    assert mixed.abs().max() > 1e-3


def test_previous_action_without_recurrence(kit):
    net = kit.lively(kit.policy(lstm_use_prev_action=True))
    assert net.uses_prev_action and not net.is_recurrent and net.state_size == 0
    rows = kit.rows(net, 2, first=False)
    rows.obs[""][1] = rows.obs[""][0]
    rows.prev_action[:] = [[0], [1]]
    dist = run(net, rows).dist
    assert not torch.allclose(dist[0], dist[1])
    plain = kit.lively(kit.policy())
    dist = run(plain, rows).dist
    torch.testing.assert_close(dist[0], dist[1])


def test_previous_reward_reaches_the_network(kit):
    net = kit.lively(kit.policy(use_lstm=True, lstm_use_prev_action=False, lstm_use_prev_reward=True))
    assert not net.uses_prev_action and net.uses_prev_reward
    rows = kit.rows(net, 1, first=False)
    before = run(net, rows, [1]).dist
    rows.prev_reward[:] += 1
    assert not torch.allclose(run(net, rows, [1]).dist, before)


def test_box_policy_has_one_log_std_for_all_states(kit):
    net = kit.policy(actions=kit.ACTIONS["box"], log_std_init=-0.7)
    out = run(net, kit.rows(net, 6))
    assert out.dist.shape == (6, 4)
    assert torch.equal(out.dist[:, 2:], torch.full((6, 2), -0.7))


def test_new_policy_is_nearly_uniform(kit):
    net = kit.policy(actions=kit.ACTIONS["nine keys"])
    entropy = net.dist.entropy(run(net, kit.rows(net, 20)).dist)
    torch.testing.assert_close(entropy, torch.full((20,), 9 * np.log(2.0)).float(), rtol=0, atol=1e-3)


def test_initial_weights_are_orthogonal_with_their_gains(kit):
    net = kit.policy(use_lstm=True, fcnet_hiddens=[32], lstm_cell_size=16)
    gains = {"encoder": 2**0.5, "rnn": 1.0, "policy_head": 0.01, "value_head": 1.0}
    for name, w in net.named_parameters():
        if w.dim() < 2:
            assert not w.any(), name
            continue
        gain = next(g for part, g in gains.items() if part in name)
        for gate in w.split(16) if "rnn" in name else [w]:  # each gate of the core has a matrix of its own
            rows, columns = gate.shape
            square = gate @ gate.T if rows <= columns else gate.T @ gate
            torch.testing.assert_close(square, gain**2 * torch.eye(len(square)), rtol=0, atol=1e-5)


# ---- seeds


@pytest.mark.parametrize("model", [{}, {"use_lstm": True}])
def test_seed_decides_the_weights(kit, model):
    a, b, c = (kit.policy(seed=s, **model).weights() for s in (3, 3, 4))
    assert all(np.array_equal(a[k], b[k]) for k in a)
    assert not np.array_equal(a["policy_head.weight"], c["policy_head.weight"])


def test_global_random_state_is_neither_used_nor_changed(kit):
    settings = {"obs": kit.IMAGE, "conv_filters": IMAGE_FILTERS, "use_lstm": True}
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = kit.policy(**settings)
    assert torch.equal(torch.get_rng_state(), before)
    first.act(*kit.rows(first, 2), None, explore=True, generator=generator())
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    second = kit.policy(**settings)
    assert np.array_equal(first.weights()["policy_head.weight"], second.weights()["policy_head.weight"])


# ---- acting


@pytest.mark.parametrize("explore", [True, False])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "model",
    [
        {},
        {"lstm_use_prev_action": True, "lstm_use_prev_reward": True},
        {"use_lstm": True, "lstm_use_prev_reward": True},
        {"use_lstm": True, "vf_share_layers": False},
    ],
    ids=["plain", "prev", "lstm", "lstm separate"],
)
def test_act_equals_forward(kit, model, kind, explore):
    net = kit.lively(kit.policy(actions=kit.ACTIONS[kind], **model))
    rows = kit.rows(net, 6)
    state = np.random.default_rng(5).normal(size=(6, net.state_size)).astype(np.float32)
    given = state if net.is_recurrent else None
    acted = net.act(*rows, given, explore=explore, generator=generator())
    out = run(net, rows, [1] * 6, torch.from_numpy(state))

    assert acted.actions.shape == (6, net.actions.width) and acted.actions.dtype == net.actions.dtype
    assert acted.logp.dtype == acted.dist.dtype == np.float32
    np.testing.assert_allclose(acted.dist, out.dist, atol=1e-5)
    logp = net.dist.log_prob(out.dist, torch.from_numpy(acted.actions))
    np.testing.assert_allclose(acted.logp, logp, atol=1e-5)
    if net.is_recurrent:
        assert acted.state.shape == (6, net.state_size) and acted.state.dtype == np.float32
        np.testing.assert_allclose(acted.state, out.state, atol=1e-5)
    else:
        assert acted.state is None and out.state is None
    if not explore:
        assert np.array_equal(acted.actions, net.dist.mode(out.dist).numpy())


@pytest.mark.parametrize("lstm", [False, True])
def test_act_equals_forward_with_images(kit, lstm):
    net = kit.lively(kit.policy(kit.IMAGE, conv_filters=IMAGE_FILTERS, use_lstm=lstm))
    rows = kit.rows(net, 4)
    acted = net.act(*rows, None, explore=True, generator=generator())
    np.testing.assert_allclose(acted.dist, run(net, rows, [1] * 4).dist, atol=1e-5)


def test_exploring_follows_the_generator_and_the_mode_does_not(kit):
    net = kit.policy(actions=kit.ACTIONS["nine keys"])
    rows = kit.rows(net, 32)

    def actions(explore: bool, seed: int) -> list:
        return net.act(*rows, None, explore=explore, generator=generator(seed)).actions.tolist()

    assert actions(True, 1) == actions(True, 1)
    assert actions(True, 1) != actions(True, 2)
    assert actions(False, 1) == actions(False, 2)


@pytest.mark.parametrize("kind", KINDS)
def test_sampled_actions_fit_their_space(kit, kind):
    net = kit.policy(actions=kit.ACTIONS[kind], use_lstm=True)
    acted = net.act(*kit.rows(net, 16), None, explore=True, generator=generator())
    for row in acted.actions:
        assert kit.ACTIONS[kind].contains(net.actions.to_env(row))


def test_act_takes_read_only_arrays_and_warns_of_nothing(kit, recwarn):
    net = kit.policy(use_lstm=True)
    rows = kit.rows(net, 2)
    for array in (*rows.obs.values(), *rows[1:]):
        array.flags.writeable = False
    net.act(*rows, None, explore=True, generator=generator())
    assert not recwarn.list


def test_act_computes_no_values(kit):
    net = kit.policy()
    called: list[nn.Module] = []
    for module in (net.value_head, net.value_trunk, net.trunk):
        module.register_forward_hook(lambda module, *_: called.append(module))
    net.act(*kit.rows(net, 2), None, explore=True, generator=generator())
    assert called == [net.trunk]


def test_act_leaves_no_gradients_and_its_results_are_plain_arrays(kit):
    net = kit.policy(use_lstm=True)
    acted = net.act(*kit.rows(net, 2), None, explore=True, generator=generator())
    acted.state[:] = 0
    acted.actions[:] = 0
    assert all(p.grad is None for p in net.parameters())


def test_training_forward_reaches_every_parameter(kit):
    for model in ({}, {"use_lstm": True}, {"use_lstm": True, "vf_share_layers": False}):
        net = kit.policy(actions=kit.ACTIONS["box"], **model)
        out = net(*kit.rows(net, 4).tensors(), [4], None)
        (out.dist.square().sum() + out.values.square().sum()).backward()
        assert all(p.grad is not None for p in net.parameters())


# ---- weights


@pytest.mark.parametrize("images", [False, True])
def test_weights_round_trip(kit, images):
    settings = {"obs": kit.IMAGE, "conv_filters": IMAGE_FILTERS, "use_lstm": True} if images else {}
    a, b = kit.policy(seed=1, **settings), kit.policy(seed=2, **settings)
    a.update_value_stats(torch.tensor([1.0, 2.0, 4.0]))
    weights = a.weights()
    assert all(w.flags.c_contiguous for w in weights.values())
    assert all(
        w.dtype == (np.float64 if k.startswith("value_") and w.ndim == 0 else np.float32) for k, w in weights.items()
    )
    b.load_weights(weights)
    again = b.weights()
    assert list(again) == list(weights)
    assert all(np.array_equal(weights[k], again[k]) for k in weights)
    rows = kit.rows(a, 3)
    assert torch.equal(run(a, rows, [3]).dist, run(b, rows, [3]).dist)


def test_weights_are_copies(kit):
    net = kit.policy()
    weights = net.weights()
    weights["policy_head.weight"][:] = 7
    assert not (net.policy_head.weight == 7).any()
    net.load_weights(weights)
    weights["policy_head.weight"][:] = 8
    assert (net.policy_head.weight == 7).all()


def test_loading_says_what_does_not_fit_first_and_changes_nothing(kit):
    net = kit.policy()
    before = net.weights()
    other = kit.policy(fcnet_hiddens=[32, 64], seed=1).weights()
    with pytest.raises(CheckpointError, match=r"dense\.0\.weight', has shape 64×5 .* the given weights have 32×5"):
        net.load_weights(other)
    missing = {k: v for k, v in before.items() if k != "value_head.bias"}
    with pytest.raises(CheckpointError, match=r"'value_head\.bias', shape 1, is missing"):
        net.load_weights(missing)
    with pytest.raises(CheckpointError, match=r"'core\.weight', shape 3×2, and this network has no such layer"):
        net.load_weights({**kit.policy(seed=5).weights(), "core.weight": np.zeros((3, 2), np.float32)})
    with pytest.raises(CheckpointError, match="must hold numbers"):
        net.load_weights({**before, "value_head.bias": np.array(["x"])})
    assert all(np.array_equal(before[k], v) for k, v in net.weights().items())


# ---- value normalisation


def test_values_are_in_reward_units_until_statistics_come(kit):
    net = kit.policy()
    values = torch.tensor([1.5, -2.0])
    assert torch.equal(net.denormalize(values), values) and torch.equal(net.normalize(values), values)
    net.update_value_stats(torch.empty(0))
    assert torch.equal(net.denormalize(values), values)


def test_moving_statistics_preserve_the_outputs(kit):
    net = kit.policy(vf_share_layers=True)
    rows = kit.rows(net, 8)
    rng = generator(3)
    net.update_value_stats(torch.randn(50, generator=rng))
    for scale, shift in ((30.0, 200.0), (0.1, -4.0), (1000.0, 5.0)):
        before = net.denormalize(run(net, rows).values)
        old = float(net.value_mean)
        net.update_value_stats(torch.randn(70, generator=rng) * scale + shift)
        assert float(net.value_mean) != old
        torch.testing.assert_close(net.denormalize(run(net, rows).values), before, rtol=1e-4, atol=1e-3)


def test_statistics_are_those_of_all_targets_together(kit):
    net = kit.policy()
    parts = [torch.randn(n, generator=generator(n)) * n + 3 for n in (5, 40, 17)]
    for part in parts:
        net.update_value_stats(part)
    everything = torch.cat(parts).double()
    assert float(net.value_count) == 62
    assert float(net.value_mean) == pytest.approx(float(everything.mean()), rel=1e-9)
    assert float(net.value_std) == pytest.approx(float(everything.std(unbiased=False)), rel=1e-9)
    merged = kit.policy()
    for part in parts:
        p = part.double()
        merged.merge_value_moments(len(p), float(p.mean()), float(((p - p.mean()) ** 2).sum()))
    assert float(merged.value_std) == pytest.approx(float(net.value_std), rel=1e-12)


def test_normalize_is_the_inverse_of_denormalize(kit):
    net = kit.policy()
    net.update_value_stats(torch.tensor([100.0, 300.0, 200.0]))
    values = torch.linspace(-500, 500, 11)
    torch.testing.assert_close(net.denormalize(net.normalize(values)), values)
    assert float(net.normalize(torch.tensor(200.0))) == pytest.approx(0.0)


def test_first_statistics_start_the_critic_at_their_mean(kit):
    """Also with targets that hardly vary: predictions are near them at once, with a moderate gain."""
    net = kit.policy()
    rows = kit.rows(net, 8)
    head = net.value_head.weight.detach().clone()
    net.update_value_stats(torch.full((10,), 500.0))
    assert torch.equal(net.value_head.weight, head)
    assert (net.denormalize(run(net, rows).values) - 500).abs().max() < 25
    assert float(net.value_std) > 0


def test_double_precision_runs_through(kit):
    net = kit.policy(kit.IMAGE, conv_filters=IMAGE_FILTERS, use_lstm=True, lstm_use_prev_reward=True).double()
    out = run(net, kit.rows(net, 3), [2, 1])
    assert out.dist.dtype == out.values.dtype == out.state.dtype == torch.float64


def test_configuration_is_checked_at_construction():
    with pytest.raises(ConfigError, match="conv_filters"):
        Policy(spaces.Box(0, 255, (240, 320, 1), np.uint8), spaces.Discrete(2), ModelConfig())
