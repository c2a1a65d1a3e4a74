"""One address for all clients: who is sent where, at once, with clients leaving and workers failing."""

from __future__ import annotations

import threading

import pytest

from tetherl.server.front_door import FrontDoor


@pytest.fixture
def door():
    """Opens doors and closes them at the end: door(urls) -> FrontDoor, url."""
    doors = []

    def open_door(urls, *, host="127.0.0.1", port=0, token=None, **kw):
        made = FrontDoor(host, port, token, urls, **kw)
        doors.append(made)
        return made, made.start()

    yield open_door
    for made in doors:
        made.stop()


def through(join, door_url, *, arrive=True, **hello):
    """Asks the door and joins where it says."""
    asking = join(door_url, hello=False)
    answer = asking.hello(**hello)
    asking.closed()
    if answer["type"] != "redirect" or not arrive:
        return answer, None
    return answer, join(answer["url"], **hello)


def sessions(server):
    return int(server.take(0).info["clients"])


def test_five_clients_at_once_on_two_workers(serve, join, door):
    (one, url1), (two, url2) = serve(), serve(server={"worker": 2})
    _, url = door([url1, url2])
    start, joined, failures = threading.Barrier(5), [], []

    def come():
        try:
            start.wait(30)
            joined.append(through(join, url))
        except Exception as error:
            failures.append(error)

    comers = [threading.Thread(target=come) for _ in range(5)]
    for comer in comers:
        comer.start()
    for comer in comers:
        comer.join(60)
    assert not failures
    assert sorted([sessions(one), sessions(two)]) == [2, 3]
    assert sorted(c.welcome["worker"] for _, c in joined) in ([1, 1, 1, 2, 2], [1, 1, 2, 2, 2])


def test_clients_under_way_count_until_they_arrive_and_are_not_counted_twice(serve, join, door):
    (_, url1), (_, url2) = serve(), serve(server={"worker": 2})
    front, url = door([url1, url2])
    first, _ = through(join, url, arrive=False)
    second, _ = through(join, url, arrive=False)
    assert first["url"].startswith(url1) and second["url"].startswith(url2)
    join(first["url"])
    third, _ = through(join, url, arrive=False)
    assert third["url"].startswith(url1)
    assert front.counts == {url1: 2, url2: 1}


def test_direct_clients_and_leaving_ones_are_counted(serve, join, door, until):
    (one, url1), (_, url2) = serve(), serve(server={"worker": 2})
    _, url = door([url1, url2])
    direct = [join(url1), join(url1)]
    for _ in range(2):
        answer, _ = through(join, url)
        assert answer["url"].startswith(url2)
    for client in direct:
        client.kill()
    until(lambda: sessions(one) == 0, "direct clients gone")
    answer, _ = through(join, url)
    assert answer["url"].startswith(url1)


def test_an_unreachable_worker_is_skipped_until_it_is_back(serve, join, door, until):
    (one, url1), (_, url2) = serve(), serve(server={"worker": 2})
    _, url = door([url1, url2])
    one.stop()
    for _ in range(3):
        answer, _ = through(join, url)
        assert answer["url"].startswith(url2)
    port = int(url1.rsplit(":", 1)[1].strip("/"))
    serve(server={"worker_port": port})  # a new worker on the same port
    until(lambda: through(join, url)[0]["url"].startswith(url1), "the worker found again")


def test_no_worker_at_all_is_an_answer_to_try_again(serve, join, door):
    server, worker_url = serve()
    front, url = door([worker_url])
    server.stop()
    answer, _ = through(join, url)
    assert (answer["type"], answer["code"], answer["fatal"]) == ("error", "not_ready", False)
    _, other = serve(server={"worker": 2})
    front.set_workers([other])
    answer, _ = through(join, url)
    assert answer["url"].startswith(other)


def test_full_workers_are_left_out(serve, join, door):
    (_, url1), (_, url2) = serve(max_sessions=1), serve(max_sessions=1, server={"worker": 2})
    _, url = door([url1, url2])
    assert {through(join, url)[1].welcome["worker"] for _ in range(2)} == {1, 2}
    answer, _ = through(join, url)
    assert (answer["code"], answer["fatal"]) == ("server_full", False)


def test_evaluating_clients_go_to_evaluation_workers(serve, join, door):
    (_, url1), (_, url2) = serve(), serve(server={"training": False})
    _, url = door([url1], evaluation_urls=[url2])
    for _ in range(2):
        assert through(join, url, purpose="evaluate")[0]["url"].startswith(url2)
    assert through(join, url)[0]["url"].startswith(url1)
    _, only = door([url1])
    assert through(join, only, purpose="evaluate")[0]["url"].startswith(url1)


def test_the_token_is_checked_at_the_door_and_used_behind_it(serve, join, door):
    _, worker_url = serve(server={"token": "t"})
    _, url = door([worker_url], token="t")
    answer, _ = through(join, url)
    assert (answer["code"], answer["fatal"]) == ("bad_token", True)
    answer, client = through(join, url, token="t")
    assert client.welcome["worker"] == 1


def test_an_old_client_is_told_at_the_door(serve, join, door):
    _, worker_url = serve()
    _, url = door([worker_url])
    answer = join(url, hello=False).ask("hello", protocol=99)
    assert (answer["code"], answer["fatal"]) == ("bad_version", True)


def test_silence_at_the_door_is_ended(serve, join, door):
    _, worker_url = serve()
    _, url = door([worker_url], hello_timeout_s=0.3)
    client = join(url, hello=False)
    assert client.receive()["code"] == "not_greeted"
    assert client.closed()[0] == 1008


def test_workers_that_listen_everywhere_are_named_as_the_client_named_the_door(serve, join, door):
    _, worker_url = serve(address="0.0.0.0", allow_open=True)
    port = worker_url.rsplit(":", 1)[1].strip("/")
    _, door_url = door([worker_url], host="0.0.0.0", allow_open=True)
    for name in ("127.0.0.1", "localhost"):
        answer, client = through(join, door_url.replace("0.0.0.0", name))
        assert answer["url"].startswith(f"ws://{name}:{port}/?ticket=")
        assert client.welcome["worker"] == 1


def test_case_029_the_door_serves_no_files(door):
    import urllib.error
    import urllib.request

    _, url = door([])
    for path, status in (("", 426), ("pyproject.toml", 404), ("status", 404)):
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen("http" + url[2:] + path, timeout=30)
        assert refused.value.code == status
