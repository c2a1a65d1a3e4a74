"""Recurrence: chunks, unequal lengths, leaks, resets."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tetherl.models import Policy
from tetherl.models.core import RecurrentCore, pack

KINDS = ["discrete", "multidiscrete", "one part", "nine keys", "multibinary", "box", "parts"]


def run(net: Policy, rows, lengths, state=None):
    with torch.no_grad():
        return net(*rows.tensors(), lengths, state)


@pytest.fixture(params=["lstm", "gru"])
def rnn(request) -> str:
    return request.param


@pytest.fixture(params=[True, False], ids=["shared", "separate"])
def net(kit, rnn, request) -> Policy:
    return kit.lively(
        kit.policy(
            actions=kit.ACTIONS["multidiscrete"],
            rnn=rnn,
            lstm_cell_size=16,
            lstm_use_prev_reward=True,
            vf_share_layers=request.param,
        )
    )


def close(a: torch.Tensor, b: torch.Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=0, atol=1e-5)


def test_one_pass_equals_chunks_with_handed_over_state(kit, net):
    rows = kit.rows(net, 40)
    whole = run(net, rows, [40])
    head = run(net, rows.at(slice(0, 32)), [32])
    tail = run(net, rows.at(slice(32, 40)), [8], head.state)
    close(torch.cat([head.dist, tail.dist]), whole.dist)
    close(torch.cat([head.values, tail.values]), whole.values)
    close(tail.state, whole.state)
    # The state matters: from zeros the second chunk gives something else.
    cold = run(net, rows.at(slice(32, 40)), [8])
    assert not torch.allclose(cold.dist, tail.dist, atol=1e-3)
    assert not torch.allclose(cold.values, tail.values, atol=1e-3)


def test_step_by_step_equals_one_pass(kit, net):
    """What an actor does, with its state handed back and forth as an array."""
    rows = kit.rows(net, 12)
    whole = run(net, rows, [12])
    state = np.zeros((1, net.state_size), np.float32)
    dist = []
    for t in range(12):
        acted = net.act(*rows.at(slice(t, t + 1)), state, explore=False, generator=torch.Generator())
        dist.append(acted.dist[0])
        state = acted.state
    close(torch.from_numpy(np.stack(dist)), whole.dist)
    close(torch.from_numpy(state), whole.state)


@pytest.mark.parametrize("lengths", [[2, 5], [5, 2], [1, 7, 3, 7], [4, 4, 4], [1, 1, 1], [9]])
def test_batched_equals_one_by_one(kit, net, lengths):
    parts = [kit.rows(net, n, seed=i, first=i % 2 == 0) for i, n in enumerate(lengths)]
    states = torch.randn(len(lengths), net.state_size, generator=torch.Generator().manual_seed(9))
    joined = parts[0]
    for part in parts[1:]:
        joined = joined.join(part)
    together = run(net, joined, lengths, states)
    alone = [run(net, p, [n], states[i : i + 1]) for i, (p, n) in enumerate(zip(parts, lengths, strict=True))]
    close(together.dist, torch.cat([a.dist for a in alone]))
    close(together.values, torch.cat([a.values for a in alone]))
    close(together.state, torch.cat([a.state for a in alone]))


def test_nothing_leaks_from_one_episode_to_another(kit, net):
    a, b, c = kit.rows(net, 6, seed=1), kit.rows(net, 4, seed=2), kit.rows(net, 9, seed=3)
    reference = run(net, a.join(b), [6, 4])
    other = run(net, kit.rows(net, 6, seed=4, first=False).join(b), [6, 4], torch.ones(2, net.state_size) * 0)
    assert torch.equal(reference.dist[6:], other.dist[6:])
    assert torch.equal(reference.values[6:], other.values[6:])
    assert torch.equal(reference.state[1], other.state[1])
    assert not torch.allclose(reference.dist[:6], other.dist[:6], atol=1e-3)
    more = run(net, c.join(b).join(a), [9, 4, 6])
    close(more.dist[9:13], reference.dist[6:])
    close(more.state[1], reference.state[1])


def test_no_gradient_leaks_between_chunks(kit, net):
    rows = kit.rows(net, 6, seed=1).join(kit.rows(net, 4, seed=2))
    obs, action, reward, has_prev = rows.tensors()
    obs[""].requires_grad_()
    out = net(obs, action, reward, has_prev, [6, 4], None)
    (out.dist[6:].square().sum() + out.values[6:].square().sum()).backward()
    assert not obs[""].grad[:6].any()
    assert (obs[""].grad[6:] != 0).any(1).all()


def test_first_step_is_the_same_whatever_came_before(kit, net):
    first = kit.rows(net, 1, seed=1)
    reference = run(net, first, [1])
    for seed in range(3):
        before = kit.rows(net, 5, seed=seed + 10)
        after = first.at(slice(0, 1))
        after.prev_action[:] = before.prev_action[-1]  # whatever a reused buffer may hold
        after.prev_reward[:] = before.prev_reward[-1]
        together = run(net, before.join(after), [5, 1])
        close(together.dist[5:], reference.dist)
        close(together.values[5:], reference.values)
        acted = net.act(*after, None, explore=False, generator=torch.Generator())
        close(torch.from_numpy(acted.dist), reference.dist)
    # With a predecessor the same row gives something else.
    after.has_prev[:] = True
    assert not torch.allclose(run(net, after, [1]).dist, reference.dist, atol=1e-4)


def test_order_of_chunks_leaves_the_summed_gradient(kit, net):
    parts = [kit.rows(net, n, seed=n) for n in (7, 2, 5)]

    def gradient(order: list[int]) -> torch.Tensor:
        joined = parts[order[0]]
        for i in order[1:]:
            joined = joined.join(parts[i])
        net.zero_grad()
        out = net(*joined.tensors(), [len(parts[i].has_prev) for i in order], None)
        (out.dist.square().sum() + out.values.square().sum()).backward()
        return torch.cat([p.grad.flatten() for p in net.parameters()])

    a, b = gradient([0, 1, 2]), gradient([2, 0, 1])
    assert (a - b).norm() <= 2e-6 * a.norm()


@pytest.mark.parametrize("explore", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_all_action_spaces_act_and_train_with_a_core(kit, rnn, kind, explore):
    net = kit.policy(actions=kit.ACTIONS[kind], rnn=rnn, lstm_cell_size=8)
    rows = kit.rows(net, 7)
    acted = net.act(*rows, None, explore=explore, generator=torch.Generator().manual_seed(0))
    out = net(*rows.tensors(), [3, 4], None)
    logp = net.dist.log_prob(out.dist, torch.from_numpy(acted.actions))
    (logp.sum() + out.values.sum()).backward()
    assert torch.isfinite(torch.cat([p.grad.flatten() for p in net.parameters()])).all()


@pytest.mark.parametrize(("model", "size"), [({"use_lstm": True}, 16), ({"rnn": "lstm"}, 16), ({"rnn": "gru"}, 8)])
def test_state_size_is_h_and_c_or_h_alone_for_every_core(kit, model, size):
    assert kit.policy(**model, lstm_cell_size=8).state_size == size
    assert kit.policy(**model, lstm_cell_size=8, vf_share_layers=False).state_size == 2 * size
    assert kit.policy().state_size == 0


def test_two_ways_to_ask_for_an_lstm_are_one_network(kit):
    a, b = kit.policy(use_lstm=True).weights(), kit.policy(rnn="lstm").weights()
    assert list(a) == list(b) and all(np.array_equal(a[k], b[k]) for k in a)


def test_the_core_stays_trainable_in_evaluation_mode(kit, net):
    """cuDNN computes gradients of a recurrent layer in training mode only; the policy is always in evaluation mode."""
    net.train()
    net.eval()
    assert not net.training and not net.trunk.encoder.training
    assert all(m.training for m in net.modules() if isinstance(m, torch.nn.RNNBase))


def test_state_of_the_value_core_is_carried_by_the_actor(kit, rnn):
    """A separate value function has its own memory; the state an actor stores must serve it at learning."""
    net = kit.lively(kit.policy(rnn=rnn, vf_share_layers=False))
    rows = kit.rows(net, 6)
    state = None
    for t in range(5):
        state = net.act(*rows.at(slice(t, t + 1)), state, explore=False, generator=torch.Generator()).state
    last = run(net, rows.at(slice(5, 6)), [1], torch.from_numpy(state))
    close(last.values, run(net, rows, [6]).values[5:])


@pytest.mark.parametrize("lengths", [None, [3], [2, 3], [4, 0]])
def test_wrong_lengths_are_named(kit, net, lengths):
    with pytest.raises(ValueError, match="4 rows in all; got"):
        run(net, kit.rows(net, 4), lengths)


def test_wrong_states_are_named(kit, net):
    with pytest.raises(ValueError, match=rf"must be \[2, {net.state_size}\]; got \[1, {net.state_size}\]"):
        run(net, kit.rows(net, 4), [2, 2], torch.zeros(1, net.state_size))


def test_packing_keeps_every_row_in_its_place():
    """Rows hold 1000·chunk + t; the packed form must be time-major, longest chunk first, without padding."""
    lengths = [2, 5, 3]
    x = torch.cat([1000 * b + torch.arange(n) for b, n in enumerate(lengths)]).float().unsqueeze(1)
    packed, back = pack(x, lengths)
    assert packed.data[:, 0].tolist() == [1000, 2000, 0, 1001, 2001, 1, 1002, 2002, 1003, 1004]
    assert packed.batch_sizes.tolist() == [3, 3, 2, 1, 1]
    assert torch.equal(packed.data[back], x)
    padded, sizes = torch.nn.utils.rnn.pad_packed_sequence(packed)
    assert sizes.tolist() == lengths
    assert padded[:5, 1, 0].tolist() == [1000, 1001, 1002, 1003, 1004]


def random_core(kind: str) -> RecurrentCore:
    core = RecurrentCore(kind, 3, 4, torch.Generator().manual_seed(0))
    with torch.no_grad():
        for i, parameter in enumerate(core.parameters()):
            parameter.normal_(generator=torch.Generator().manual_seed(i))
    return core


def test_gru_against_the_equations_of_the_cell():
    """Gates in torch's order (reset, update, new), written out; also on the way for single steps."""
    core = random_core("gru")
    x = torch.randn(5, 3, generator=torch.Generator().manual_seed(1))
    state = torch.randn(1, 4, generator=torch.Generator().manual_seed(2))
    w_ih, w_hh, b_ih, b_hh = (p.detach() for p in core.parameters())
    h = state[0]
    outputs = []
    for t in range(5):
        (r_i, z_i, n_i), (r_h, z_h, n_h) = (w_ih @ x[t] + b_ih).split(4), (w_hh @ h + b_hh).split(4)
        r, z = torch.sigmoid(r_i + r_h), torch.sigmoid(z_i + z_h)
        h = (1 - z) * torch.tanh(n_i + r * n_h) + z * h
        outputs.append(h)
    with torch.no_grad():
        out, new = core(x, [5], state)
        one, after = core(x[:1], [1], state)
    close(out, torch.stack(outputs))
    close(new[0], h)
    close(one, out[:1])
    assert torch.equal(one, after)


def test_core_against_the_equations_of_the_cell():
    """Gates in torch's order (input, forget, cell, output), written out; also on the way for single steps."""
    core = random_core("lstm")
    x = torch.randn(5, 3, generator=torch.Generator().manual_seed(1))
    state = torch.randn(1, 8, generator=torch.Generator().manual_seed(2))
    w_ih, w_hh, b_ih, b_hh = (p.detach() for p in core.parameters())
    h, c = state[0, :4], state[0, 4:]
    outputs = []
    for t in range(5):
        i, f, g, o = (w_ih @ x[t] + b_ih + w_hh @ h + b_hh).split(4)
        c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
        h = torch.sigmoid(o) * torch.tanh(c)
        outputs.append(h)
    with torch.no_grad():
        out, new = core(x, [5], state)
        one, _ = core(x[:1], [1], state)
    close(out, torch.stack(outputs))
    close(new[0], torch.cat([h, c]))
    close(one, out[:1])
