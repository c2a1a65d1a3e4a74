"""N learners make the update that one makes: the equality test, with threads and with real processes."""

from __future__ import annotations

import contextlib
import pickle
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from gymnasium import spaces

from tetherl.algorithms.parallel import ProcessRendezvous, ThreadRendezvous, check_agreement, checksum
from tetherl.errors import TrainingError

KEYS = spaces.MultiDiscrete([2, 3])
LSTM = {"use_lstm": True, "lstm_cell_size": 8}
SETTINGS = {
    "use_kl_loss": True,
    "entropy_coeff": 0.01,
    "normalize_values": True,
    "clip_param": 0.02,
    "grad_clip": 0.1,
    "lr": 3e-3,
    "max_lag": 4,
}


def seven_chunks(kit, policy, seed=0):
    """Fragments of one chunk each, 3 to 32 rows long, from two policy versions; one row is not the policy's."""
    fragments = []
    for i, length in enumerate((3, 32, 17, 8, 25, 11, 30)):
        some = kit.fragments(policy, steps=length, envs=1, seed=seed + i, length=40, fragment_length=length)
        fragments.append(some[0])
    fragments[1].versions[:] = -2
    fragments[2].by_policy[5] = False
    return fragments


def learn(kit, size, *, updates=1, dtype=torch.float64, model=LSTM, seeds=None, epochs=2, minibatch=40, **settings):
    """-> (state of each learner after the updates, metrics of each)."""
    meeting = ThreadRendezvous(size)

    def one(rank):
        torch.set_num_threads(1)
        reduction = meeting.join(rank) if size > 1 else None
        policy = kit.policy(actions=KEYS, seed=seeds[rank] if seeds else 0, **model)
        # Experience is that of the network in float32, whatever it learns in.
        fragments = [seven_chunks(kit, kit.policy(actions=KEYS, **model), seed=10 * u) for u in range(updates)]
        learner = kit.learner(
            policy.to(dtype),
            max_seq_len=32,
            seed=rank,
            reduction=reduction,
            epochs=epochs,
            minibatch_size=minibatch,
            **(SETTINGS | settings),
        )
        try:
            metrics = [learner.update(f, version=0, steps_trained=0).metrics for f in fragments]
        except BaseException:
            meeting.abort()
            raise
        return learner.state(), metrics

    with ThreadPoolExecutor(size) as pool:
        return list(zip(*pool.map(one, range(size)), strict=True))


def distance(a, b) -> float:
    (arrays, _), (others, _) = a, b
    assert arrays.keys() == others.keys()
    return max(float(np.abs(arrays[k] - others[k]).max()) for k in arrays if k.startswith("policy/"))


def close(a: dict, b: dict, tolerance: float) -> None:
    assert a.keys() == b.keys()
    for key in a:
        assert a[key] == pytest.approx(b[key], rel=tolerance, abs=tolerance), key


# 7 chunks in minibatches of 40 rows: 4 a pass, so 12 steps in 3 epochs.
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"model": {}},
        {"advantage_norm": "minibatch"},
        {"reward_scaling": True},
        {"model": LSTM | {"normalize_observations": True}},
        {"loss": "decoupled", "burn_in": 3, "state_refresh": "per_epoch", "recompute_advantages": "per_epoch"},
        {"vf_clip": "clipped_value", "vf_clip_param": 0.2, "kl_measure": "all"},
    ],
    ids=str,
)
def test_n_learners_make_the_update_of_one(kit, size, settings):
    (alone,), (metrics,) = learn(kit, 1, epochs=3, **settings)
    states, numbers = learn(kit, size, epochs=3, **settings)
    assert metrics[0]["learner/steps"] >= 10
    for state, own in zip(states, numbers, strict=True):
        assert distance(alone, state) <= 1e-10
        assert state[1]["kl_coeff"] == alone[1]["kl_coeff"] != 0.2
        assert state[1] == alone[1]
        close(own[0], metrics[0], 1e-6)
        assert distance(states[0], state) == 0.0


def test_in_float32_they_stay_close(kit):
    one = {"dtype": torch.float32, "epochs": 1, "minibatch": 1000}
    ten = {"dtype": torch.float32, "epochs": 3}
    for settings, limit in ((one, 1e-5), (ten, 1e-3)):
        (alone,), (metrics,) = learn(kit, 1, **settings)
        assert metrics[0]["learner/steps"] == 1 if limit == 1e-5 else metrics[0]["learner/steps"] >= 10
        for size in (2, 3):
            states, _ = learn(kit, size, **settings)
            assert distance(alone, states[-1]) <= limit
            assert states[-1][1]["kl_coeff"] == alone[1]["kl_coeff"]


def test_the_comparison_can_fail(kit):
    (alone,), _ = learn(kit, 1)
    (other,), _ = learn(kit, 1, minibatch=41)
    assert distance(alone, other) > 1e-6


def test_more_learners_than_chunks_in_a_minibatch_do_not_hang(kit):
    (alone,), _ = learn(kit, 1, minibatch=10)  # every chunk but two is a minibatch of its own
    states, _ = learn(kit, 3, minibatch=10)
    assert distance(alone, states[2]) <= 1e-10


def test_several_updates_and_early_stops(kit):
    (alone,), (metrics,) = learn(kit, 1, updates=4, target_kl=1e-4, epochs=8)
    assert metrics[-1]["learner/epochs"] < 8
    states, numbers = learn(kit, 3, updates=4, target_kl=1e-4, epochs=8)
    assert distance(alone, states[1]) <= 1e-10
    close(numbers[2][-1], metrics[-1], 1e-6)


def test_weights_optimizer_and_random_state_are_those_of_the_first_learner(kit):
    states, _ = learn(kit, 3, seeds=[0, 7, 8])
    (alone,), _ = learn(kit, 1)
    assert all(distance(alone, state) <= 1e-10 for state in states)


def test_a_bad_number_at_one_learner_skips_the_step_of_all(kit):
    meeting = ThreadRendezvous(2)

    def one(rank):
        policy = kit.policy(actions=KEYS, **LSTM)
        fragments = seven_chunks(kit, policy)
        for f in fragments[:2]:
            f.rewards[:] = 1e25  # finite, but its square is not
        learner = kit.learner(policy, max_seq_len=32, reduction=meeting.join(rank), minibatch_size=40, epochs=1)
        return learner.update(fragments, version=0, steps_trained=0).metrics, policy.weights()

    with ThreadPoolExecutor(2) as pool:
        (a, weights), (b, others) = pool.map(one, range(2))
    assert a == b and a["learner/skipped_steps"] > 0
    assert all(np.array_equal(weights[k], others[k]) and np.isfinite(weights[k]).all() for k in weights)


# ---------------------------------------------------------------------------------- agreement


def test_learners_that_have_come_apart_are_told(kit):
    meeting = ThreadRendezvous(2)

    def one(rank):
        reduction = meeting.join(rank)
        learner = kit.learner(kit.policy(), reduction=reduction)
        if rank == 1:
            with torch.no_grad():
                learner.policy.value_head.bias.add_(1e-6)
        with pytest.raises(TrainingError, match="checksum of the weights"):
            learner.update(kit.fragments(kit.policy()), version=0, steps_trained=0)
        same = kit.learner(kit.policy(), reduction=reduction)
        same.update(kit.fragments(kit.policy()), version=0, steps_trained=0)
        with pytest.raises(TrainingError, match=r"lr is \[1.0, 2.0\]"):
            check_agreement(reduction, {"kl_coeff": 0.5, "lr": 1.0 + rank}, torch.device("cpu"))

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(one, range(2)))


def test_a_checksum_sees_the_last_bit(kit):
    policy = kit.policy()
    before = checksum(policy)
    assert checksum(kit.policy()) == before
    with torch.no_grad():
        policy.value_head.bias.add_(1e-7)
    assert checksum(policy) != before


def test_whoever_waits_for_a_learner_that_has_left_gets_an_error():
    meeting = ThreadRendezvous(2)
    waiting = meeting.join(0)
    threading.Timer(0.1, meeting.join(1).close).start()
    with pytest.raises(TrainingError, match="learner 1 of 2: another learner has left"):
        waiting.sum(torch.zeros(3))


def test_sums_and_maxima():
    meeting = ThreadRendezvous(3)

    def one(rank):
        reduction = meeting.join(rank)
        sums, maxima = torch.tensor([1.0, rank]), torch.tensor([-1.0, rank])
        reduction.sum(sums)
        reduction.max(maxima)
        return sums.tolist(), maxima.tolist(), reduction.broadcast(f"from {rank}")

    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(one, range(3))) == [([3.0, 3.0], [-1.0, 2.0], "from 0")] * 3


# ---------------------------------------------------------------------------------- processes

PROCESS = """
import importlib.util, os, pickle, sys
spec = importlib.util.spec_from_file_location("conftest", sys.argv[1]); kit = importlib.util.module_from_spec(spec)
sys.modules["conftest"] = kit; spec.loader.exec_module(kit)
import torch
from gymnasium import spaces
from tetherl.algorithms.parallel import ProcessRendezvous
torch.set_num_threads(1)
rank, size, path, out = int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], sys.argv[5]
settings, model, fragments = pickle.load(open(sys.argv[6], "rb"))
reduction = ProcessRendezvous(path, size).join(rank) if size > 1 else None
policy = kit.make_policy(actions=spaces.MultiDiscrete([2, 3]), seed=rank, **model).double()
learner = kit.make_learner(policy, max_seq_len=32, seed=rank, reduction=reduction, **settings)
metrics = learner.update(fragments, version=0, steps_trained=0).metrics
assert reduction is None or reduction.broadcast(rank) == 0
pickle.dump((learner.state(), metrics), open(out, "wb"))
if reduction is not None:
    reduction.close(); reduction.close()
os._exit(0)  # what is tested is done; threads of the transport may not be gone yet, and end the interpreter by SIGABRT
"""


@pytest.mark.parametrize("size", [2, 3])
def test_processes_make_the_update_of_one(kit, tmp_path, size):
    fragments = seven_chunks(kit, kit.policy(actions=KEYS, **LSTM))
    settings = SETTINGS | {"epochs": 3, "minibatch_size": 40}
    (tmp_path / "in").write_bytes(pickle.dumps((settings, LSTM, fragments)))
    conftest = str(Path(__file__).parent / "conftest.py")

    def run(size):
        processes, outs = [], []
        for rank in range(size):
            outs.append(tmp_path / f"out{size}{rank}")
            arguments = [conftest, str(rank), str(size), str(tmp_path / f"meet{size}"), str(outs[-1])]
            processes.append(subprocess.Popen([sys.executable, "-c", PROCESS, *arguments, str(tmp_path / "in")]))
        deadline = time.monotonic() + 240
        try:
            for process in processes:
                assert process.wait(max(1, deadline - time.monotonic())) == 0
        finally:
            for process in processes:
                with contextlib.suppress(OSError):
                    process.kill()
                process.wait()
        return [pickle.loads(out.read_bytes()) for out in outs]

    (alone, metrics), *_ = run(1)
    assert metrics["learner/steps"] >= 10
    for state, numbers in run(size):
        assert distance(alone, state) <= 1e-10
        assert state[1] == alone[1]
        close(numbers, metrics, 1e-6)


def test_a_rendezvous_can_be_sent_to_a_process(tmp_path):
    meeting = ProcessRendezvous(str(tmp_path / "x"), 2)
    assert pickle.loads(pickle.dumps(meeting)) == meeting
