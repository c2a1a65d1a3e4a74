"""Playing against a policy server over real sockets: actions, batching, fragments, phases."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from gymnasium import spaces

from tetherl.errors import ServerError


def rows(*samples):
    return sum(len(f) for s in samples for f in s.fragments)


@pytest.mark.parametrize("as_json", [False, True])
def test_an_episode_becomes_a_fragment(serve, join, deadline, balanced, as_json):
    server, url = serve()
    client = join(url, as_json=as_json, name="doom")
    assert client.welcome["policy_version"] == 1 and client.welcome["phase"] == "collecting"
    assert client.start()["type"] == "done"
    for step in range(3):
        reply = client.act(step, reward=float(step), obs=(step, 0, 0))
        assert (reply["action"], reply["step"], reply["policy_version"]) == (1, step, 1)
    client.end(3, reward=9.0, truncated=True, observation=[3, 0, 0])
    sample = server.take(deadline, 3)
    (fragment,) = sample.fragments
    assert fragment.obs[""][:, 0].tolist() == [0, 1, 2]
    assert fragment.final_obs[""][0] == 3
    assert fragment.rewards.tolist() == [1, 2, 9]
    assert fragment.truncated and not fragment.terminated
    (episode,) = sample.episodes
    assert (episode.episode_return, episode.length, episode.client) == (12.0, 3, "doom")
    balanced(sample.counts, sample)


def test_requests_that_wait_share_one_forward_pass(serve, join, fake_policy, until, deadline):
    policy = fake_policy()
    server, url = serve(policy)
    clients = [join(url) for _ in range(3)]
    for client in clients:
        client.start()
    policy.gate = threading.Event()
    clients[0].send("act", episode="e", step=0, observation=[0, 0, 0])
    assert policy.entered.wait(deadline)  # the loop is inside act() now; these arrive meanwhile
    for client in clients[1:]:
        client.send("act", episode="e", step=0, observation=[0, 0, 0])
    gate, policy.gate = policy.gate, None
    threading.Event().wait(0.3)  # let them reach the sockets
    gate.set()
    for client in clients:
        assert client.receive()["type"] == "action"
    assert [call.n for call in policy.calls] == [1, 2]
    info = server.take(0).info
    assert (info["requests"], info["batches"], info["batch_mean"], info["clients"]) == (3, 2, 1.5, 3)


def test_actions_wait_for_the_first_weights(serve, join, deadline):
    server, url = serve(weights=False)
    client = join(url)
    client.start()
    client.send("act", episode="e", step=0, observation=[0, 0, 0])
    with pytest.raises(TimeoutError):
        client.receive(0.3)
    server.set_weights({"a": np.array(4)}, 1)
    assert client.receive()["action"] == 4


def test_hold_answers_with_the_new_weights_and_cut_fragments_join_the_batch(serve, join, deadline, balanced):
    server, url = serve(during_learning="hold")
    client = join(url)
    client.start()
    client.act(0)
    client.act(1, reward=1.0)
    client.act(2, reward=1.0)  # two rows are complete, one is open
    server.set_phase("learning", 5.0, cut=True)
    push = client.receive(phase=True)
    assert (push["phase"], push["resumes_in_s"]) == ("learning", 5.0)
    batch = server.take(deadline, 1)
    assert rows(batch) == 2
    client.send("act", episode="e", step=3, observation=[7, 7, 7], reward=1.0)
    with pytest.raises(TimeoutError):
        client.receive(0.3)
    server.set_weights({"a": np.array(2)}, 2)
    with pytest.raises(TimeoutError):
        client.receive(0.2)
    server.set_phase("collecting")
    reply = client.receive()
    assert (reply["action"], reply["policy_version"], reply["phase"]) == (2, 2, "collecting")
    assert [p["phase"] for p in client.phases] == ["learning", "collecting"]
    client.end(4, terminated=True)
    rest = server.take(deadline, 1)
    assert [f.versions.tolist() for f in rest.fragments] == [[1, 2]]
    assert rest.info["learning_requests"] == 0
    balanced(rest.counts, batch, rest)


def test_a_reward_that_waits_counts_when_fragments_are_cut(serve, join, deadline, until):
    server, url = serve(during_learning="hold")
    client = join(url)
    client.start()
    client.act(0)
    server.set_phase("learning")
    client.send("act", episode="e", step=1, observation=[7, 7, 7], reward=3.0)
    until(lambda: server.inference.waiting == 1, "the request")
    server.set_phase("learning", cut=True)
    (fragment,) = server.take(deadline, 1).fragments
    assert fragment.rewards.tolist() == [3.0] and fragment.final_obs[""][0] == 7


def test_keep_plays_on_and_stamps_the_rows(serve, join, deadline, balanced):
    server, url = serve(during_learning="keep")
    client = join(url)
    client.start()
    client.act(0)
    server.set_phase("learning", 2.5)
    reply = client.act(1)
    assert (reply["phase"], reply["policy_version"]) == ("learning", 1)
    assert 0 <= reply["resumes_in_s"] <= 2.5, "what is left of the expected time"
    assert client.phases[-1]["resumes_in_s"] == 2.5
    server.set_weights({"a": np.array(2)}, 2)
    server.set_phase("collecting")
    assert client.act(2)["policy_version"] == 2
    client.end(3, terminated=True)
    sample = server.take(deadline, 3)
    (fragment,) = sample.fragments
    assert fragment.learning.tolist() == [False, True, False]
    assert fragment.versions.tolist() == [1, 1, 2]
    assert sample.info["learning_requests"] == 1 and sample.counts.received_learning == 1
    balanced(sample.counts, sample)


def test_discard_drops_what_was_decided_while_learning(serve, join, deadline, balanced):
    server, url = serve(during_learning="discard")
    client = join(url)
    client.start()
    client.act(0)
    server.set_phase("learning")
    client.act(1)
    server.set_phase("collecting")
    client.act(2)
    client.end(3, terminated=True)
    first = server.take(deadline, 2)
    assert first.counts.dropped == {"discarded": 1} and rows(first) == 2
    balanced(first.counts, first)


def test_stopped_is_pushed_and_closes(serve, join):
    server, url = serve()
    clients = [join(url), join(url, as_json=True)]
    server.set_phase("stopped")
    for client in clients:
        assert client.closed() == (1001, "training has stopped")
        assert [p["phase"] for p in client.phases] == ["stopped"]
    late = join(url, hello=False)
    reply = late.hello()
    assert (reply["type"], reply["code"], reply["fatal"]) == ("error", "not_ready", True)


def test_the_recurrent_state_and_the_last_action_follow_the_episode(serve, join, fake_policy, deadline):
    policy = fake_policy(recurrent=True)
    server, url = serve(policy, server={"fragment_length": 2})
    client = join(url)
    for episode in ("a", "b"):
        client.start(episode)
    for step in range(3):
        client.act(step, reward=10.0 + step, episode="a")
    client.act(0, episode="b")
    client.end(3, episode="a", terminated=True)
    states = [call.state[0, 0] for call in policy.calls]
    assert states == [0, 1, 2, 0]
    assert [call.has_prev[0] for call in policy.calls] == [False, True, True, False]
    assert policy.calls[2].prev_action[0, 0] == 1 and policy.calls[2].prev_reward[0] == 12.0
    first, second = server.take(deadline, 3).fragments
    assert (len(first), len(second)) == (2, 1)
    assert second.state_in.tolist() == [2, 2] and second.prev_reward == 12.0 and second.t0 == 2


def test_logged_actions_are_context(serve, join, fake_policy, deadline, balanced):
    policy = fake_policy(recurrent=True)
    server, url = serve(policy)
    client = join(url)
    client.start()
    client.act(0)
    done = client.ask("log_action", episode="e", step=1, observation=[0, 0, 0], action=4, reward=1.0)
    assert done["type"] == "done"
    client.act(2, reward=1.0)
    client.end(3, terminated=True)
    sample = server.take(deadline, 3)
    (fragment,) = sample.fragments
    assert fragment.by_policy.tolist() == [True, False, True]
    assert fragment.actions[:, 0].tolist() == [1, 4, 1]
    assert policy.calls[2].prev_action[0, 0] == 4 and policy.calls[2].state[0, 0] == 2
    balanced(sample.counts, sample)


def test_case_010_logged_and_acted_episodes_do_not_disturb_each_other(serve, join, deadline, balanced):
    server, url = serve()
    client = join(url)
    client.start("act")
    for n in range(100):
        client.act(n, episode="act")
        client.start(f"log{n}")
        client.ask("log_action", episode=f"log{n}", step=0, observation=[0, 0, 0], action=0)
        client.end(1, episode=f"log{n}", terminated=True)
    client.end(100, episode="act", terminated=True)
    sample = server.take(deadline, 200)
    assert len(sample.episodes) == 101
    balanced(sample.counts, sample)


def test_evaluation_never_counts(serve, join, fake_policy, deadline):
    policy = fake_policy()
    server, url = serve(policy)
    trainer, judge = join(url), join(url, purpose="evaluate", name="judge")
    for client, reward, training in ((judge, 5.0, True), (trainer, 7.0, False)):
        client.start(training=training)
        client.act(0)
        client.end(1, reward=reward, terminated=True)
    sample = server.take(0)
    assert (sample.counts.received, sample.fragments, sample.episodes) == (0, [], [])
    played = [e for e in sample.events if e["kind"] == "evaluation_episode"]
    assert [(e["client"], e["episode_return"], e["length"]) for e in played] == [("judge", 5.0, 1)]
    assert [call.explore for call in policy.calls] == [False, True]


def test_case_106_an_evaluation_server_gives_episodes_only(serve, join, deadline):
    server, url = serve(server={"training": False, "explore": False})
    client = join(url)
    client.start()
    client.act(0)
    client.end(1, reward=4.0, terminated=True)
    sample = server.take(deadline)
    assert [e.episode_return for e in sample.episodes] == [4.0]
    assert sample.counts.received == 0 and not sample.fragments


def test_case_008_a_failing_policy_is_told_to_clients_and_to_the_owner(serve, join, fake_policy, deadline):
    policy = fake_policy()
    server, url = serve(policy)
    client = join(url)
    client.start()
    policy.error = RuntimeError("the network is on fire")
    reply = client.act(0)
    assert (reply["type"], reply["code"], reply["fatal"]) == ("error", "internal", False)
    assert "the network is on fire" in reply["message"]
    with pytest.raises(ServerError, match=r"(?s)Traceback.*the network is on fire"):
        server.take(deadline)
    client.start("another")
    assert client.act(0, episode="another")["code"] == "internal"


def test_taking_waits_for_enough_steps(serve, join, deadline):
    server, url = serve(server={"fragment_length": 2})
    client = join(url)
    client.start()
    taken = []
    taker = threading.Thread(target=lambda: taken.append(server.take(deadline, 4)))
    taker.start()
    for step in range(5):
        client.act(step)
    taker.join(deadline)
    assert rows(*taken) == 4
    assert rows(server.take(0.05, 4)) == 0


def test_a_stopped_server_says_so(serve):
    server, _ = serve()
    server.stop()
    server.stop()
    with pytest.raises(ServerError, match="not running"):
        server.take(1)


def test_pipelined_messages_keep_their_order(serve, join):
    _, url = serve()
    client = join(url)
    client.send("start_episode", episode="p")
    client.send("act", episode="p", step=0, observation=[0, 0, 0])
    client.send("act", episode="p", step=1, observation=[0, 0, 0])
    client.send("end_episode", episode="p", step=2, terminated=True)
    replies = [client.receive() for _ in range(4)]
    assert [r["re"] for r in replies] == [2, 3, 4, 5]
    assert [r["type"] for r in replies] == ["done", "action", "action", "done"]


def test_case_080_an_image_of_zeros_and_ones_is_remarked(serve, join, fake_policy):
    spec = {"type": "Box", "low": 0, "high": 255, "shape": [2, 2], "dtype": "uint8"}
    policy = fake_policy(spaces.Box(0, 255, (2, 2), np.uint8))
    server, url = serve(policy, observation_space=spec)
    client = join(url)
    client.start()
    client.act(0, obs=([0, 1], [1, 0]))
    client.act(1, obs=([0, 1], [1, 0]))
    warnings = [e for e in server.take(0).events if e["kind"] == "warning"]
    assert len(warnings) == 1 and "multiplied by 255" in warnings[0]["message"]


def test_a_waiting_take_can_be_released(serve, deadline):
    """Under hold clients wait for what a take still holds: an idle worker must not make that long."""
    server, _ = serve()
    done = []
    thread = threading.Thread(target=lambda: done.append(server.take(10 * deadline)))
    thread.start()
    while not done:
        server.release()
        thread.join(0.05)
        assert thread.is_alive() or done
    assert done[0].fragments == []


def test_an_episode_without_a_step_is_no_episode(serve, join, deadline):
    server, url = serve()
    client = join(url)
    client.start()
    client.end(0, terminated=True)
    assert server.take(0.2).episodes == []
