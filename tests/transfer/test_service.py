"""The thread's own life, and a page server among strangers."""

import contextlib
import queue
import socket
import struct
import threading
import time
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest

from baton.ipc.sockets import waiting
from baton.protocol.codec import pack_int32
from baton.protocol.messages.commands import Extend, Grant, Revoke
from baton.protocol.messages.handover import InstanceSource
from baton.transfer.grants import EARLY, FOREIGN, OVER, GrantBook
from baton.transfer.service import TransferFailed, TransferService
from baton.transfer.transports import page_server
from tests.conftest import GENEROUS_S

from .pools import TOKEN, Geometry, Pool, Reader, Source, content, wait_until


def place_of(source):
    host, _, port = source.instance.ranks[0].tcp.rpartition(":")
    return host, int(port)


def request(token=TOKEN, pages=1, magic=b"BPG2", layers=(0, 3), heads=(0, 4), checked=0):
    return struct.pack("<4s16sIHHHHI", magic, token, pages, *layers, *heads, checked)


def answer_to(place, *parts):
    with socket.create_connection(place, timeout=60) as connection:
        with contextlib.suppress(OSError):  # (it may have closed the connection before it has read all)
            for part in parts:
                connection.sendall(part)
            connection.shutdown(socket.SHUT_WR)
        received = b""
        with contextlib.suppress(ConnectionResetError):
            while part := connection.recv(1 << 16):
                received += part
    return received


def test_the_page_server_answers_only_what_it_can():
    geometry = Geometry()
    with Source(geometry) as source:
        place = place_of(source)
        one = struct.pack("<i", 1)
        assert b"no such grant" in answer_to(place, request(bytes(16)), one)
        assert answer_to(place, request(magic=b"HTTP"), one) == b""
        assert b"at most 65536" in answer_to(place, request(pages=70_000), bytes(4 * 65536))
        wrong = [request(layers=(1, 3)), request(heads=(4, 1)), request(layers=(0, 0))]
        assert (
            answer_to(place, *(part for bad in wrong for part in (bad, one))).count(b"layers or heads") == 3
        )
        for page in (64, -1):
            assert b"a page outside" in answer_to(place, request(), struct.pack("<i", page))
        assert answer_to(place, b"GET / HTTP/1.1\r\nHost: pages\r\n\r\n" + bytes(40)) == b""
        with Reader(geometry) as reader:
            assert reader.fetch(source.instance, [5], [6]).error == ""


def test_a_grant_names_pages_and_ends():
    """Nothing else opens anything: not the pages of another request, and not afterwards."""
    geometry = Geometry()
    token = b"of one request.."
    pool = Pool(geometry)
    pool.array[:] = content(geometry)
    service = TransferService(0, pool.view, geometry.config(), print)
    service.start()
    source = InstanceSource("tile", 8, [service.source])
    with Reader(geometry) as reader:

        def error(*pages):
            return reader.fetch(source, list(pages), list(range(len(pages))), grant=token).error

        service.grant(Grant(token, "d", [b""], pack_int32([3, 4]), 60.0))
        assert error(3, 4) == ""
        assert "page 5 is not among those of the grant" in error(3, 5)
        service.grant(Grant(token, "d", [b""], pack_int32([5]), 60.0))
        assert error(3, 5) == "", "more pages of the request"
        service.grant(Extend([token, b"unknown"], 60.0))
        service.grant(Revoke([token]))
        assert "the grant is over" in error(3)
    service.close()
    pool.close()


def test_a_grant_that_nobody_extends_ends_by_itself():
    book = GrantBook()
    book.apply(Grant(b"t", "d", [b""], pack_int32([1]), 2.0), 10.0)
    assert book.why_not(b"t", b"", 11.9, [1]) == ""
    book.apply(Extend([b"t"], 2.0), 11.9)
    assert book.why_not(b"t", b"", 13.8, [1]) == ""
    assert book.why_not(b"t", b"", 13.9, [1]) == OVER
    assert len(book) == 0
    assert book.why_not(b"never", b"", 0.0) == EARLY


def test_a_grant_is_for_readers_that_prove_one_of_its_keys():
    """What the token's bearer has proved counts; and what names nobody is nobody's."""
    book = GrantBook()
    book.apply(Grant(b"t", "d", [b"rank 0", b"rank 1"], pack_int32([1]), 2.0), 10.0)
    assert [book.why_not(b"t", key, 11.0, [1]) for key in (b"rank 0", b"rank 1")] == ["", ""]
    assert [book.why_not(b"t", key, 11.0, [1]) for key in (b"rank 2", b"")] == [FOREIGN, FOREIGN]
    book.apply(Grant(b"of nobody", "d", [], pack_int32([1]), 2.0), 10.0)
    assert book.why_not(b"of nobody", b"", 11.0, [1]) == FOREIGN


def test_a_grant_may_come_a_moment_after_its_first_use():
    geometry = Geometry(grant=bytes(16))
    pool = Pool(geometry)
    service = TransferService(0, pool.view, geometry.config(), print)
    service.start()
    with Reader(geometry) as reader:
        reader.begin(InstanceSource("tile", 8, [service.source]), [1], [1])
        wait_until(lambda: service._transports[0]._server._strangers)
        service.grant(Grant(TOKEN, "d", [b""], pack_int32([1]), 60.0))
        assert reader.end().error == ""
    service.close()
    pool.close()


def test_strangers_keep_nobody_away(monkeypatch):
    """A stranger has a time and some bytes; a flood of them takes places from each other only."""
    monkeypatch.setattr(page_server, "AUTH_S", 1e6)  # they are never away by themselves
    geometry = Geometry(num_blocks=64, num_layers=4, tile_bytes=32768)
    pool = Pool(geometry)
    service = TransferService(0, pool.view, geometry.config(), print)
    service.start()
    service.grant(Grant(TOKEN, "d", [b""], pack_int32(range(64)), 3600.0))
    host, _, port = service.source.tcp.rpartition(":")
    server, place = service._transports[0]._server, (host, int(port))
    try:
        with Reader(geometry) as reader, contextlib.ExitStack() as stack:
            source = InstanceSource("tile", 8, [service.source])
            assert reader.fetch(source, [5], [6]).error == ""
            assert (len(server._members), len(server._strangers)) == (1, 0)
            for number in range(400):
                stranger = stack.enter_context(socket.create_connection(place, timeout=60))
                if number % 3 == 0:
                    stranger.sendall(request()[:7])
            wait_until(lambda: len(server._strangers) == waiting.MOST)
            assert len(server._members) == 1, "the member keeps its connection"
            reader.service._transports[0].close()  # and one that comes now is served as well
            reader.service._transports[0]._memory = reader.pool.view.memory
            assert reader.fetch(source, [6], [7]).error == ""
    finally:
        service.close()
        pool.close()


def test_a_stranger_has_two_seconds_and_a_kilobyte(monkeypatch):
    monkeypatch.setattr(page_server, "_EARLY_S", 0.0)
    now = [0.0]
    monkeypatch.setattr(page_server, "time", SimpleNamespace(monotonic=lambda: now[0]))
    visit = page_server._Visit(None)
    assert visit.seconds_left() == page_server.AUTH_S == 2.0
    now[0] = 1.5
    assert visit.seconds_left() == 0.5
    now[0] = 3.0
    assert visit.seconds_left() == 0.0
    geometry = Geometry()
    with Source(geometry) as source:
        answer = answer_to(place_of(source), *[request(bytes(16)), struct.pack("<i", 1)] * 100)
        refused = answer.count(b"BPG2")
        assert 1 <= refused <= 1024 // (len(request()) + 4), "then it is closed"
        assert answer_to(place_of(source), request(bytes(16), pages=300), bytes(1200)) == b""


def test_bytes_damaged_on_the_way_are_noticed():
    """Through a proxy that turns one bit far into the answer."""
    geometry = Geometry(num_blocks=64, num_layers=4, tile_bytes=32768, checksums=True)
    with (
        Source(geometry) as source,
        Reader(geometry) as reader,
        socket.create_server(("127.0.0.1", 0)) as proxy,
    ):
        place = place_of(source)
        threading.Thread(target=damage, args=(proxy, place, 3 << 20), daemon=True).start()
        through = f"127.0.0.1:{proxy.getsockname()[1]}"
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
        assert failed.wait(60)
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
        assert time.monotonic() - began < GENEROUS_S
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
