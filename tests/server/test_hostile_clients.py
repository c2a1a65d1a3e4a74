"""Bad input, lost and greedy clients: precise answers, bounded memory, balanced books."""

from __future__ import annotations

import socket
import threading

import msgspec
import numpy as np
import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import connect as ws_connect


def kinds(sample, kind):
    return [e for e in sample.events if e["kind"] == kind]


def test_a_wrong_token_is_refused(serve, join):
    _, url = serve(server={"token": "right"})
    for token in (None, "wrong"):
        client = join(url, hello=False)
        reply = client.hello(**({"token": token} if token else {}))
        assert (reply["code"], reply["fatal"]) == ("bad_token", True)
        assert client.closed()[0] == 1008
    assert join(url, token="right").welcome["session"]


@pytest.mark.parametrize(
    ("obs", "words"),
    [
        ([1, 2], r"\(2,\).*\(3,\)"),
        ([1, 2, float("nan")], "nan"),
        ([1, 2, 11], "11.*-10.0 to 10.0"),
        ("text", "text|str"),
        ({"dtype": "float32", "shape": [3], "data": b"123"}, "12 bytes"),
        ({"dtype": "complex64", "shape": [3], "data": b"1" * 24}, "complex64"),
        (None, "null"),
    ],
)
def test_a_bad_observation_is_named_and_the_session_goes_on(serve, join, obs, words):
    server, url = serve()
    client, other = join(url), join(url)
    client.start()
    other.start()
    client.act(0)
    reply = client.ask("act", episode="e", step=1, observation=obs)
    assert (reply["type"], reply["code"], reply["fatal"]) == ("error", "bad_observation", False)
    import re

    assert re.search(words, reply["message"]), reply["message"]
    assert client.act(1)["type"] == "action"  # the refused step can be sent again
    assert other.act(0)["type"] == "action"
    assert server.take(0).counts.open == 1


def test_case_028_garbage_is_refused(serve, join):
    server, url = serve()
    other = join(url)
    stranger = join(url, hello=False)
    import pickle

    stranger.ws.send(pickle.dumps({"reduce": print}))
    reply = stranger.receive()
    assert (reply["code"], reply["fatal"], reply["re"]) == ("bad_message", True, None)
    assert stranger.closed()[0] == 1008
    friend = join(url)
    nonsense = msgspec.msgpack.encode({"type": "nonsense"})
    for data in (b"\xc1\x00", b"", "no json", b"\x93\x01\x02\x03", nonsense):
        friend.ws.send(data)
        assert friend.receive()["code"] == "bad_message"
    friend.start()
    assert friend.act(0)["type"] == "action"
    other.start()
    assert other.act(0)["type"] == "action"
    assert server.take(0).counts.received == 0


def test_a_message_that_is_too_large(serve, join, until):
    server, url = serve(max_message_bytes=1024)
    client = join(url)
    client.ws.send(b"x" * 1100)
    reply = client.receive()
    assert reply["code"] == "too_large" and "1100" in reply["message"] and "1024" in reply["message"]
    client.start()
    assert client.act(0)["type"] == "action"
    try:
        client.ws.send(b"x" * (4 << 20))  # far above: not even read
    except ConnectionClosed as closed:
        assert closed.rcvd.code == 1009
    else:
        assert client.closed()[0] == 1009
    until(lambda: server.take(0).info["clients"] == 0, "the client gone")
    assert join(url).welcome["session"]


def test_a_client_that_dies_leaves_its_complete_steps(serve, join, deadline, until, balanced):
    server, url = serve(server={"batch_mode": "complete_episodes"})
    client, other = join(url, name="mayfly"), join(url)
    for name in ("a", "b"):
        client.start(name)
        for step in range(4):
            client.act(step, episode=name)
    assert server.take(0).info["open_bytes"] > 8 * 12
    client.kill()
    sample = server.take(deadline, 6)
    assert [len(f) for f in sample.fragments] == [3, 3]  # the last actions' results never came
    assert all(not f.terminated and f.final_obs is not None for f in sample.fragments)
    until(lambda: not server.desk.episodes, "episodes freed")
    balanced(sample.counts, sample)
    assert sample.counts.open == 0 and server.desk.open_bytes == 0
    rest = server.take(0)
    (left,) = kinds(sample, "client_left") + kinds(rest, "client_left")
    assert (left["client"], left["reason"], left["episodes_lost"]) == ("mayfly", "connection lost", 2)
    assert sample.info["episodes_aborted"] + rest.info["episodes_aborted"] == 2
    assert not sample.episodes
    other.start()
    assert other.act(0)["type"] == "action"


def test_case_020_clients_may_go_in_any_state(serve, join, until, deadline, balanced):
    server, url = serve(during_learning="hold")
    stages = [
        lambda c: None,
        lambda c: c.start(),
        lambda c: (c.start(), c.act(0)),
        lambda c: (c.start(), c.act(0), c.act(1)),
        lambda c: (c.start(), c.act(0), c.end(1, terminated=True)),
        lambda c: (c.start(), c.start("f"), c.act(0), c.act(0, episode="f")),
    ]
    clients = [join(url) for _ in stages]
    for client, stage in zip(clients, stages, strict=True):
        stage(client)
    held = join(url)
    held.start()
    held.act(0)
    server.set_phase("learning")
    held.send("act", episode="e", step=1, observation=[0, 0, 0], reward=1.0)
    held.send("act", episode="e", step=2, observation=[0, 0, 0], reward=1.0)  # pipelined behind a held one
    until(lambda: server.inference.waiting == 1, "a held request")
    for client in [*clients, held]:
        client.kill()
    until(lambda: not server.desk.episodes, "all gone")
    assert server.inference.waiting == 0
    sample = server.take(deadline, 3)
    assert (sample.counts.received, sample.counts.open) == (3, 0)
    balanced(sample.counts, sample)


def test_an_aborted_episode_withdraws_its_request(serve, join, until, deadline, balanced):
    server, url = serve(during_learning="hold")
    client = join(url)
    client.start()
    client.act(0)
    server.set_phase("learning")
    asked = client.send("act", episode="e", step=1, observation=[0, 0, 0], reward=1.0)
    aborted = client.send("abort_episode", episode="e", reason="the game crashed")
    replies = [client.receive(), client.receive()]
    assert [(r["type"], r["re"]) for r in replies] == [("error", asked), ("done", aborted)]
    until(lambda: server.inference.waiting == 0, "the request withdrawn")
    client.start()  # the name is free again
    sample = server.take(deadline, 1)
    assert sample.fragments[0].rewards.tolist() == [1.0] and not sample.episodes
    balanced(sample.counts, sample)


def test_case_058_an_endless_episode_is_cut(serve, join, deadline, fake_policy, balanced):
    policy = fake_policy(recurrent=True)
    server, url = serve(policy, max_episode_steps=4, server={"batch_mode": "complete_episodes"})
    client = join(url)
    client.start()
    for step in range(10):
        client.act(step, reward=1.0, obs=(step, 0, 0))
    sample = server.take(deadline, 8)
    assert [len(f) for f in sample.fragments] == [4, 4]
    assert all(f.truncated for f in sample.fragments)
    assert [f.final_obs[""][0] for f in sample.fragments] == [4, 8]
    assert [f.t0 for f in sample.fragments] == [0, 0]
    assert len({f.episode_id for f in sample.fragments}) == 2
    assert [call.state[0, 0] for call in policy.calls] == [0, 1, 2, 3, 0, 1, 2, 3, 0, 1]
    assert [e.length for e in sample.episodes] == [4, 4]
    warnings = kinds(sample, "warning")
    assert len(warnings) == 1 and "max_episode_steps" in warnings[0]["message"]
    balanced(sample.counts, sample)


def test_case_001_fragments_that_nobody_fetches_are_bounded(serve, join, balanced):
    server, url = serve(server={"fragment_length": 5, "outbox_bytes": 1000})
    client = join(url)
    client.start()
    for step in range(101):
        client.act(step)
    sample = server.take(1, 1)
    assert 0 < sample.info["outbox_bytes"] <= 1000
    assert sample.counts.received == 100
    assert sample.counts.dropped == {"overflow": 100 - sample.counts.emitted}
    assert sample.fragments[-1].t0 == 95  # the oldest went
    assert "dropped" in kinds(sample, "warning")[0]["message"]
    balanced(sample.counts, sample)


def test_open_episodes_are_bounded_in_bytes(serve, join, balanced):
    bound = 7000  # about ten rows with everything that belongs to them
    server, url = serve(server={"batch_mode": "complete_episodes", "open_bytes": bound})
    client = join(url)
    client.start()
    for step in range(41):
        client.act(step)
        assert server.desk.open_bytes <= bound
    sample = server.take(1, 1)
    assert sample.counts.received == 40 and sample.info["memory_cuts"] >= 3
    assert sum(len(f) for f in sample.fragments) >= 25
    assert len(kinds(sample, "warning")) == 1
    balanced(sample.counts, sample)


def test_episodes_that_only_wait_are_bounded_too(serve, join):
    server, url = serve(server={"open_bytes": 7000})
    client = join(url)
    refused = 0
    for number in range(40):
        reply = client.ask("start_episode", episode=str(number))
        if reply["type"] == "error":
            assert reply["code"] == "too_many_episodes" and "bytes" in reply["message"]
            refused += 1
        else:
            client.act(0, episode=str(number))
    assert 0 < refused < 40 and len(server.desk.episodes) == 40 - refused
    client.ask("end_episode", episode="0", step=1, terminated=True)
    client.ask("end_episode", episode="1", step=1, terminated=True)
    assert client.ask("start_episode", episode="again")["type"] == "done"


def test_sessions_are_limited(serve, join):
    _, url = serve(max_sessions=2)
    first, _ = join(url), join(url)
    reply = join(url, hello=False).hello()
    assert (reply["code"], reply["fatal"]) == ("server_full", True)
    first.send("bye")
    first.closed()
    assert join(url).welcome["session"]


def test_silent_connections_are_closed(serve, join, deadline):
    _, url = serve(hello_timeout_s=0.5)
    client = join(url, hello=False)
    reply = client.receive()
    assert (reply["code"], reply["re"], reply["fatal"]) == ("not_greeted", None, True)
    assert client.closed()[0] == 1008
    port = int(url.rsplit(":", 1)[1].strip("/"))
    with socket.create_connection(("127.0.0.1", port), timeout=deadline) as raw:  # not even HTTP
        assert raw.recv(1) == b""
    greeted = join(url)
    threading.Event().wait(1.0)
    greeted.start()


def test_a_client_that_does_not_read_is_dropped(serve, until):
    server, url = serve()
    connecting = ws_connect(url, compression=None, max_queue=1, ping_interval=None)
    client = connecting.__enter__()
    client.send(msgspec.msgpack.encode({"type": "hello", "id": 1, "protocol": 1, "name": "deaf"}))
    question = {"type": "abort_episode", "episode": "x" * 200}  # is answered at length, and no answer is read
    events, id = [], 1

    def gone():
        nonlocal id
        try:
            for _ in range(2000):
                id += 1
                client.send(msgspec.msgpack.encode(question | {"id": id}))
        except ConnectionClosed:
            pass
        events.extend(server.take(0).events)
        return any(e["kind"] == "client_left" for e in events)

    until(gone, "the client dropped")
    assert "did not read" in next(e for e in events if e["kind"] == "client_left")["reason"]
    client.socket.close()


def test_case_029_plain_http_gets_one_line(serve):
    import urllib.error
    import urllib.request

    _, url = serve(server={"token": "secret"})
    base = "http" + url[2:]
    for path, method, status in (
        ("", "GET", 426),
        ("etc/passwd", "GET", 404),
        ("../pyproject.toml", "GET", 404),
        ("", "POST", 405),
        ("", "DELETE", 405),
        ("status", "GET", 401),
    ):
        request = urllib.request.Request(base + path, method=method, data=b"x" if method == "POST" else None)
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(request, timeout=30)
        assert refused.value.code == status
        assert refused.value.read().count(b"\n") == 1


def test_pages_of_other_hosts_may_not_connect_without_a_token(serve, join):
    _, url = serve()
    for origin in ("https://evil.example", "null"):
        with pytest.raises(InvalidStatus) as refused:
            join(url, connect={"origin": origin})
        assert refused.value.response.status_code == 403
    assert join(url, connect={"origin": "http://localhost:8000"}).welcome
    assert join(url, connect={"origin": "http://127.0.0.1"}).welcome
    _, url = serve(server={"token": "t"})
    assert join(url, connect={"origin": "https://game.example"}, token="t").welcome


def test_case_006_many_short_episodes_leave_nothing_behind(serve, join, deadline, balanced):
    server, url = serve()
    client = join(url)
    samples = []
    for _ in range(500):
        client.send("start_episode", episode="x")
        client.send("act", episode="x", step=0, observation=[0, 0, 0])
        client.send("end_episode", episode="x", step=1, terminated=True)
        for _ in range(3):
            client.receive()
        samples.append(server.take(deadline, 1))
    assert not server.desk.episodes and server.desk.open_bytes == 0
    assert server.inference.waiting == 0
    balanced(samples[-1].counts, *samples)


def test_case_005_no_line_per_request(serve, join, caplog):
    caplog.set_level("INFO")
    _, url = serve()
    client = join(url)
    client.start()
    for step in range(300):
        client.act(step)
    assert len(caplog.records) < 20


def test_new_weights_while_clients_come_and_go(serve, join, deadline, balanced):
    server, url = serve(server={"fragment_length": 3})
    over = threading.Event()
    failures = []

    def play(number):
        try:
            for _ in range(5):
                client = join(url)
                client.start()
                for step in range(7):
                    client.act(step)
                client.kill() if number % 2 else client.end(7, terminated=True)
        except Exception as error:
            failures.append(error)

    players = [threading.Thread(target=play, args=(n,)) for n in range(4)]
    for player in players:
        player.start()
    samples, version = [], 1
    while any(p.is_alive() for p in players):
        version += 1
        server.set_weights({"a": np.array(version % 5)}, version)
        samples.append(server.take(0.02))
        balanced(samples[-1].counts, *samples)
    over.set()
    assert not failures
    server.set_phase("stopped")
    samples.append(server.take(1))
    assert samples[-1].counts.received >= 4 * 5 * 6
