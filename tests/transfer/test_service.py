"""The thread's own life, and a page server among strangers."""

import contextlib
import queue
import socket
import struct
import threading
import time

import msgspec
import numpy as np
import pytest

from baton.transfer.service import TransferFailed, TransferService

from .pools import Geometry, Pool, Reader, Source, content, wait_until


def place_of(source):
    address, _, token = source.instance.ranks[0].tcp.rpartition("/")
    host, _, port = address.rpartition(":")
    return (host, int(port)), bytes.fromhex(token)


def request(token, pages=1, magic=b"BPG1", layers=(0, 3), heads=(0, 4), checked=0):
    return struct.pack("<4s16sIHHHHI", magic, token, pages, *layers, *heads, checked)


def answer_to(place, *parts):
    with socket.create_connection(place, timeout=10) as connection:
        for part in parts:
            connection.sendall(part)
        received = b""
        with contextlib.suppress(ConnectionResetError):
            while part := connection.recv(1 << 16):
                received += part
    return received


def test_the_page_server_answers_only_what_it_can():
    geometry = Geometry()
    with Source(geometry) as source:
        place, token = place_of(source)
        one = struct.pack("<i", 1)
        assert b"another process" in answer_to(place, request(bytes(16)), one)
        assert answer_to(place, request(token, magic=b"HTTP"), one) == b""
        assert b"at most 65536" in answer_to(place, request(token, pages=70_000), bytes(4 * 65536))
        assert b"layers or heads" in answer_to(place, request(token, layers=(1, 3)), one)
        assert b"layers or heads" in answer_to(place, request(token, heads=(4, 1)), one)
        assert b"layers or heads" in answer_to(place, request(token, layers=(0, 0)), one)
        for page in (64, -1):
            assert b"a page outside" in answer_to(place, request(token), struct.pack("<i", page))
        assert answer_to(place, b"GET / HTTP/1.1\r\nHost: pages\r\n\r\n" + bytes(40)) == b""
        with Reader(geometry) as reader:
            assert reader.fetch(source.instance, [5], [6]).error == ""


def test_silent_and_greedy_strangers_do_not_keep_others_away():
    geometry = Geometry(num_blocks=64, num_layers=4, tile_bytes=32768)
    with Source(geometry) as source:
        place, token = place_of(source)
        before = source.descriptors()
        strangers = [socket.create_connection(place, timeout=10) for _ in range(270)]
        wait_until(lambda: source.descriptors() >= before + 250)
        assert source.descriptors() <= before + 257  # bounded
        for stranger in strangers[:30]:
            stranger.sendall(request(token)[:7])
        for stranger in strangers[30:40]:  # asks for 64 MB and never reads
            ids = np.arange(64, dtype=np.int32).tobytes()
            stranger.sendall(request(token, pages=64, layers=(0, 4)) + ids)
        wait_until(lambda: source.descriptors() <= before + 256 - 35, 10.0)  # after 3 s of silence
        with Reader(geometry) as reader:
            assert reader.fetch(source.instance, [5], [6]).error == ""
        for stranger in strangers:
            stranger.close()
        wait_until(lambda: source.descriptors() == before)


def test_bytes_damaged_on_the_way_are_noticed():
    """Through a proxy that turns one bit far into the answer."""
    geometry = Geometry(num_blocks=64, num_layers=4, tile_bytes=32768, checksums=True)
    with (
        Source(geometry) as source,
        Reader(geometry) as reader,
        socket.create_server(("127.0.0.1", 0)) as proxy,
    ):
        place, token = place_of(source)
        threading.Thread(target=damage, args=(proxy, place, 3 << 20), daemon=True).start()
        through = f"127.0.0.1:{proxy.getsockname()[1]}/{token.hex()}"
        rank = msgspec.structs.replace(source.instance.ranks[0], tcp=through)
        there = msgspec.structs.replace(source.instance, ranks=[rank])
        found = reader.fetch(there, [9, 4, 7, 8], [1, 2, 3, 4])
        assert "checksum of page 7" in found.error or "checksum of page 8" in found.error
        assert reader.fetch(source.instance, [9, 4, 7, 8], [1, 2, 3, 4]).error == ""
        assert np.array_equal(reader.pool.array[[1, 2, 3, 4]], content(geometry)[[9, 4, 7, 8]])


def damage(proxy, place, at):
    client, _ = proxy.accept()
    with client, socket.create_connection(place) as server:
        client.settimeout(0.05)
        passed = 0
        while True:
            try:
                asked = client.recv(1 << 16)
                if not asked:
                    return
                server.sendall(asked)
            except TimeoutError:
                pass
            server.settimeout(0.2)
            try:
                while part := bytearray(server.recv(1 << 16)):
                    if passed <= at < passed + len(part):
                        part[at - passed] ^= 1
                    passed += len(part)
                    client.sendall(part)
            except TimeoutError:
                continue


def test_a_thread_that_fails_says_so():
    before = set(threading.enumerate())
    geometry = Geometry()
    pool, failed = Pool(geometry), threading.Event()

    def report(_fetched):
        raise RuntimeError("nobody listens")

    service = TransferService(0, pool.view, geometry.config(), report, on_failure=failed.set)
    service.check()
    service.start()
    with Source(geometry) as source:
        reader = Reader.__new__(Reader)
        reader.service, reader.ids = service, 0
        reader.begin(source.instance, [1], [1])
        assert failed.wait(10)
    with pytest.raises(TransferFailed, match="nobody listens"):
        service.check()
    service.close()
    assert set(threading.enumerate()) <= before
    pool.close()


def test_closing_stops_what_is_under_way():
    geometry = Geometry(num_blocks=64, num_layers=4, tile_bytes=32768)
    with Source(geometry) as source, Reader(geometry) as reader:
        source.stop()
        for _ in range(5):
            reader.begin(source.instance, [1], [1])
        time.sleep(0.1)
        began = time.monotonic()
        reader.service.close()
        reader.service.close()
        assert time.monotonic() - began < 1.0
        with pytest.raises(queue.Empty):
            reader.end(0.0)  # nobody is told: the worker is leaving
        source.wake()


def test_a_service_that_was_never_started_can_be_closed():
    pool = Pool(Geometry())
    service = TransferService(0, pool.view, Geometry().config(), print)
    assert service.source.tcp
    service.close()
    pool.close()


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "no such host"])
def test_an_address_that_readers_could_not_use_is_refused(host):
    before = set(threading.enumerate())
    pool = Pool(Geometry())
    config = msgspec.structs.replace(Geometry().config(), transfer_host=host)
    with pytest.raises(ValueError, match="transfer_host"):
        TransferService(0, pool.view, config, print)
    assert set(threading.enumerate()) <= before
    pool.close()


def test_nixl_without_the_extra_is_refused():
    pool = Pool(Geometry())
    config = msgspec.structs.replace(Geometry().config(), transfer="nixl", transfer_checksums=True)
    with pytest.raises(ValueError, match=r"nixl|NIXL"):
        TransferService(0, pool.view, config, print)
    pool.close()
