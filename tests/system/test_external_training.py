"""External clients train a policy: phases, fates of late steps, books, failures."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time

import numpy as np
import psutil
import pytest

from tetherl.algorithm import Algorithm, Callbacks
from tetherl.client import PolicyClient
from tetherl.config import RunConfig
from tetherl.errors import ActorDiedError, ClientError, RefusedError, RequestError


def slow_down(algorithm: Algorithm, seconds: float) -> None:
    """Make each learning phase take `seconds` longer."""
    update = algorithm.learner.update

    def slow(*args, **kwargs):
        time.sleep(seconds)
        return update(*args, **kwargs)

    algorithm.learner.update = slow


def check_books(algorithm: Algorithm) -> dict:
    books = algorithm.queue.snapshot()
    assert books["balanced"], books
    assert books["received"] == books["trained"] + sum(books["dropped"].values()) + books["pending"]
    assert algorithm.queue.peak_bytes <= algorithm.queue.max_bytes
    return books


def finish(algorithm: Algorithm, clients) -> list[dict]:
    """Say goodbye to the clients and return what they report."""
    algorithm.announce("stopped")
    documents = clients.results()
    assert [d["exit_code"] for d in documents] == [0] * len(documents), documents
    return documents


def test_five_clients_play_on_while_learning_takes_ten_seconds(tmp_path, clients, kit):
    """Case C002: every step that arrives meanwhile ends up in exactly one of trained, dropped, pending."""
    config = kit.external(tmp_path, rollouts={"workers": 2, "fragment_length": 32}, stop={"iterations": 2})
    with Algorithm(RunConfig.from_dict(config)) as algorithm:
        slow_down(algorithm, 10.0)
        clients.start(algorithm.url, 5)
        algorithm.run()
        played = finish(algorithm, clients)
        books = check_books(algorithm)
        assert books["received_learning"] > 0
        assert algorithm.tracker.peak_clients == {1: 3, 2: 2} or algorithm.tracker.peak_clients == {1: 2, 2: 3}
    for client in played:
        assert "learning" in client["phases"] and client["actions_while_learning"] > 0
    # What the clients sent and what the server counted: at most the last, unfinished step of each is missing.
    sent = sum(c["steps"] for c in played)
    assert sent - 5 <= books["received"] <= sent
    assert all(c["longest_wait_s"] < 9.0 for c in played), "nobody waited for the learner"
    lags = [line.get("lag/max") for line in algorithm.run_dir.metrics.read()]
    assert lags[0] == 0 and lags[1] >= 1, "the second batch holds steps from before the update"


def test_hold_trains_every_step_with_lag_zero(tmp_path, clients, kit):
    config = kit.external(tmp_path, external={"during_learning": "hold"}, stop={"iterations": 4})
    with Algorithm(RunConfig.from_dict(config)) as algorithm:
        slow_down(algorithm, 1.0)
        clients.start(algorithm.url, 2)
        algorithm.run()
        played = finish(algorithm, clients)
        books = check_books(algorithm)
    metrics = algorithm.run_dir.metrics.read()
    assert [line["lag/max"] for line in metrics] == [0.0] * 4
    assert set(books["dropped"]) <= {"stale"}, "a step whose result came after the cut is context only"
    assert books["dropped"].get("stale", 0) <= 2 * 4
    assert all("learning" in c["phases"] for c in played)
    assert max(c["longest_wait_s"] for c in played) >= 0.9, "the game waited for the learner"


def test_hold_with_complete_episodes_trains_whole_episodes(tmp_path, clients, kit):
    config = kit.external(
        tmp_path,
        external={"during_learning": "hold"},
        rollouts={"workers": 1, "batch_mode": "complete_episodes"},
        stop={"iterations": 3},
    )
    with Algorithm(RunConfig.from_dict(config)) as algorithm:
        clients.start(algorithm.url, 2)
        algorithm.run()
        finish(algorithm, clients)
        check_books(algorithm)
    assert all(line["lag/max"] == 0 for line in algorithm.run_dir.metrics.read())


def test_discard_drops_what_was_decided_while_learning(tmp_path, clients, kit):
    config = kit.external(tmp_path, external={"during_learning": "discard"}, stop={"iterations": 3})
    with Algorithm(RunConfig.from_dict(config)) as algorithm:
        slow_down(algorithm, 2.0)
        clients.start(algorithm.url, 2)
        algorithm.run()
        finish(algorithm, clients)
        books = check_books(algorithm)
    assert books["dropped"]["discarded"] == books["received_learning"] > 0


def test_phase_is_known_without_any_call_and_env_config_arrives(tmp_path, clients, kit):
    config = kit.external(
        tmp_path, external={"env_config": {"level": 7, "map": "e1m1"}}, stop={"iterations": 2}, rollouts={"workers": 1}
    )
    seen: list[tuple[str, float | None]] = []
    with Algorithm(RunConfig.from_dict(config)) as algorithm:
        slow_down(algorithm, 1.5)
        # The watcher makes no call: what it is told arrives by itself.
        own: list[PolicyClient] = []
        watcher = PolicyClient(
            algorithm.url, on_phase=lambda phase: seen.append((phase, own[0].resumes_in_s if own else None))
        )
        own.append(watcher)
        with watcher, PolicyClient(algorithm.url) as player:
            assert watcher.env_config == {"level": 7, "map": "e1m1"}
            assert watcher.phase == "collecting"
            thread = threading.Thread(target=algorithm.run)
            thread.start()
            start = time.monotonic()
            player.step([0.0, 0.0, 0.0, 0.0])
            while thread.is_alive() and time.monotonic() - start < kit.deadline_s:
                player.step([0.0, 0.0, 0.0, 0.0], 1.0)
            thread.join(kit.deadline_s)
            kit.wait_for("the last phase", lambda: len(seen) >= 5)
            assert watcher.policy_version == 2
    phases = [phase for phase, _ in seen]
    assert phases[-4:] == ["learning", "collecting", "learning", "collecting"] or "stopped" in phases
    expected = [resumes_in_s for phase, resumes_in_s in seen if phase == "learning"]
    assert expected[0] is None, "nothing has been timed yet"
    assert expected[1] is not None and 0 < expected[1] < 60


def test_a_bad_client_does_not_disturb_the_others(tmp_path, clients, kit):
    config = kit.external(tmp_path, stop={"iterations": 6})
    with Algorithm(RunConfig.from_dict(config)) as algorithm:
        clients.start(algorithm.url, 2)
        stop = threading.Event()

        def misbehave() -> None:
            while not stop.is_set():
                with PolicyClient(algorithm.url) as bad:
                    episode = bad.start_episode()
                    for observation in ([float("nan")] * 4, [0.0] * 3, ["a"] * 4, None):
                        with pytest.raises(RequestError):
                            bad.get_action(episode, observation)

        thread = threading.Thread(target=misbehave)
        thread.start()
        algorithm.run()
        stop.set()
        thread.join(kit.deadline_s)
        finish(algorithm, clients)
        check_books(algorithm)


def test_a_killed_client_costs_only_its_unfinished_step(tmp_path, clients, kit):
    config = kit.external(tmp_path, stop={"iterations": 8})

    class Killer(Callbacks):
        def on_iteration(self, algorithm, metrics):
            if algorithm.iteration in (2, 4):
                clients.processes[algorithm.iteration // 2 - 1].send_signal(signal.SIGKILL)

    with Algorithm(RunConfig.from_dict(config), Killer()) as algorithm:
        clients.start(algorithm.url, 3)
        algorithm.run()
        algorithm.announce("stopped")
        assert sorted(d["exit_code"] for d in clients.results()) == [-9, -9, 0]
        check_books(algorithm)
    kinds = [event["kind"] for event in algorithm.run_dir.events.read()]
    assert kinds.count("client_joined") == 3 and kinds.count("client_left") >= 2


def test_a_killed_rollout_worker_is_noticed_and_named(tmp_path, clients, kit):
    config = kit.external(tmp_path, rollouts={"workers": 2, "fragment_length": 32}, stop={"iterations": 1000})

    class Killer(Callbacks):
        def on_iteration(self, algorithm, metrics):
            if algorithm.iteration == 2:
                pid = next(p for role, i, p in algorithm.team.pids() if (role, i) == ("rollout", 2))
                os.kill(pid, signal.SIGKILL)

    with Algorithm(RunConfig.from_dict(config), Killer()) as algorithm:
        clients.start(algorithm.url, 2)
        with pytest.raises(ActorDiedError, match="rollout worker 2"):
            algorithm.run()


def test_unreachable_port_and_failing_start_leave_nothing(tmp_path, kit):
    import socket

    from tetherl.errors import TetherlError

    before = {p.pid for p in psutil.Process().children()}
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        config = kit.external(tmp_path, external={"worker_port": port}, stop={"iterations": 1})
        with pytest.raises(TetherlError, match=str(port)), Algorithm(RunConfig.from_dict(config)):
            pass
    left = {p.pid for p in psutil.Process().children()} - before
    assert not left


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_any_number_of_rollout_workers_serves(tmp_path, clients, kit, workers):
    """Case C015; with none the algorithm process hosts the server itself, possible under hold only."""
    config = kit.external(
        tmp_path,
        external={"during_learning": "hold"},
        rollouts={"workers": workers, "fragment_length": 32},
        stop={"iterations": 3},
    )
    with Algorithm(RunConfig.from_dict(config)) as algorithm:
        clients.start(algorithm.url, 3)
        algorithm.run()
        finish(algorithm, clients)
        check_books(algorithm)
        assert sum(algorithm.tracker.peak_clients.values()) == 3
        assert len(algorithm.tracker.peak_clients) == max(1, workers)
    assert [line["lag/max"] for line in algorithm.run_dir.metrics.read()] == [0.0] * 3


def test_a_token_is_asked_for_by_the_door_and_by_the_workers(tmp_path, clients, kit):
    (tmp_path / "token").write_text("open sesame\n")
    config = kit.external(tmp_path, external={"token_file": str(tmp_path / "token")}, stop={"iterations": 2})
    with Algorithm(RunConfig.from_dict(config)) as algorithm:
        for url in [algorithm.url, *algorithm.team.worker_urls]:
            with pytest.raises(RefusedError, match="token"):
                PolicyClient(url, token="open barley")
        clients.start(algorithm.url, 1, TETHERL_TOKEN="open sesame")
        algorithm.run()
        finish(algorithm, clients)
    written = (algorithm.run_dir.path / "config.yaml").read_text() + (
        algorithm.run_dir.path / "events.jsonl"
    ).read_text()
    assert "sesame" not in written


def test_an_lstm_with_image_and_many_keys_trains_through_clients(tmp_path, kit):
    """The founding case in small: image, MultiDiscrete keys, LSTM with previous action (case C059)."""
    config = kit.external(
        tmp_path,
        external={
            "observation_space": {"type": "Box", "low": 0, "high": 255, "shape": [24, 32, 1], "dtype": "uint8"},
            "action_space": {"type": "MultiDiscrete", "nvec": [2] * 9},
        },
        model={
            "conv_filters": [[8, [4, 4], 4], [16, [6, 8], 1]],
            "post_fcnet_hiddens": [32],
            "use_lstm": True,
            "lstm_cell_size": 16,
            "max_seq_len": 8,
        },
        algorithm={"train_batch_size": 128, "minibatch_size": 64, "normalize_values": None},
        rollouts={"workers": 2, "fragment_length": 32},
        stop={"iterations": 3},
    )
    rng = np.random.default_rng(0)
    with Algorithm(RunConfig.from_dict(config)) as algorithm:

        def play() -> None:
            with PolicyClient(algorithm.url) as client, contextlib.suppress(ClientError):
                while client.phase != "stopped":
                    action = client.step(rng.integers(0, 256, (24, 32, 1), np.uint8))
                    for turn in range(20):
                        assert action.shape == (9,) and set(action) <= {0, 1}
                        frame = rng.integers(0, 256, (24, 32, 1), np.uint8)
                        action = client.step(frame, float(action.mean()), truncated=turn == 19)

        threads = [threading.Thread(target=play) for _ in range(2)]
        for thread in threads:
            thread.start()
        algorithm.run()
        algorithm.announce("stopped")
        for thread in threads:
            thread.join(kit.deadline_s)
            assert not thread.is_alive()
        check_books(algorithm)
    metrics = algorithm.run_dir.metrics.read()
    assert metrics[0]["learner/ratio_max_first"] <= 1e-4, "fresh data: every ratio is 1"
    assert all(np.isfinite([m["learner/policy_loss"], m["learner/vf_loss"], m["learner/kl"]]).all() for m in metrics)
