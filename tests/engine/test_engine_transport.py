from __future__ import annotations

import gc
import os
import resource
import socket
import threading

import numpy as np
import psutil
import pytest

from tetherl.engine.transport import SOCKET_LIMIT, Blob, Channel, Kind
from tetherl.errors import EngineError
from tetherl.testing.engines import assert_same, sample_arrays


@pytest.fixture
def channels():
    a, b = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    pair = Channel(a), Channel(b)
    yield pair
    for channel in pair:
        channel.close()


def test_small_values_are_bytes_and_large_ones_files():
    small, large = Blob.of(np.zeros(100)), Blob.of(np.zeros(SOCKET_LIMIT, np.uint8))
    assert small.fd is None and small.data
    assert large.fd is not None and not large.data
    many = Blob.of([np.zeros(100) for _ in range(1000)])  # each small: inside the pickle, but that is large
    assert many.fd is not None and len(many.load()) == 1000
    assert Blob.of(1, in_file=True).fd is not None


def test_a_blob_can_be_read_again_and_gives_new_memory():
    blob = Blob.of({"a": np.arange(100_000)})
    first, second = blob.load(), blob.load()
    first["a"][:] = -1
    assert_same(second, {"a": np.arange(100_000)}, "second")


def test_read_only_stays_read_only():
    array = np.arange(100_000)
    array.setflags(write=False)
    assert not Blob.of(array).load().flags.writeable
    assert Blob.of(array.copy()).load().flags.writeable


@pytest.mark.parametrize("in_file", [False, True])
def test_every_kind_of_array(in_file):
    for name, array in sample_arrays().items():
        assert_same(Blob.of(array, in_file=in_file).load(), np.array(array, order="K"), name)


def test_descriptors_are_closed_with_their_blobs():
    before = psutil.Process().num_fds()
    blobs = [Blob.of(np.zeros(100_000)) for _ in range(5)]
    assert psutil.Process().num_fds() == before + 5
    blobs[0].close()
    blobs[0].close()
    del blobs
    gc.collect()
    assert psutil.Process().num_fds() == before


def test_frames_carry_everything(channels):
    a, b = channels
    shared = [Blob.of(i, in_file=True) for i in range(3)]
    a.send(Kind.CALL, 2**40, Blob.of(("m", (np.zeros(100_000),))), shared)
    a.send(Kind.RESULT, 7, Blob.of("small"))
    a.send(Kind.READY, 0, Blob())
    first, second, third = b.receive(), b.receive(), b.receive()
    assert (first.kind, first.call) == (Kind.CALL, 2**40)
    assert [blob.load() for blob in first.shared] == [0, 1, 2]
    assert_same(first.take(), ("m", (np.zeros(100_000),)), "blob")
    assert (second.kind, second.call, second.take()) == (Kind.RESULT, 7, "small")
    assert (third.kind, third.shared) == (Kind.READY, [])
    assert not any(os.get_inheritable(blob.fd) for blob in first.shared)
    a.close()
    assert b.receive() is None


def test_frames_larger_than_the_sockets_buffer_and_in_many_pieces(channels):
    a, b = channels
    text = "x" * (SOCKET_LIMIT - 1000)

    def send(number):
        for i in range(20):
            a.send(Kind.CALL, number * 100 + i, Blob.of((number, i, text)), [Blob.of(number, in_file=True)])

    threads = [threading.Thread(target=send, args=(n,)) for n in range(3)]
    for thread in threads:
        thread.start()
    seen = []
    for _ in range(60):
        frame = b.receive()
        number, i, back = frame.take()
        assert back == text and frame.call == number * 100 + i and frame.shared[0].load() == number
        seen.append(frame.call)
    for thread in threads:
        thread.join(60)
    assert sorted(seen) == [n * 100 + i for n in range(3) for i in range(20)]


def test_the_other_end_breaks_off_inside_a_frame(channels):
    a, b = channels
    a.socket.sendall(b"\x03\x00")
    a.close()
    assert b.receive() is None


def test_too_many_open_files_is_said(channels):
    a, b = channels
    shared = [Blob.of(i, in_file=True) for i in range(20)]
    a.send(Kind.CALL, 1, Blob(), shared)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    open_files = {int(fd) for fd in os.listdir("/proc/self/fd")}
    free = [fd for fd in range(10_000) if fd not in open_files]
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (free[5], hard))
        with pytest.raises(EngineError, match="too many files open"):
            b.receive()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_too_many_shared_values_is_said(channels):
    shared = [Blob.of(0, in_file=True)] * 251
    with pytest.raises(EngineError, match="at most 249"):
        channels[0].send(Kind.CALL, 1, Blob(), shared)
