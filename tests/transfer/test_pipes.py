"""Questions ahead: a slow link costs its delay once, not once a fetch."""

import contextlib
import socket
import threading

import numpy as np
import pytest

from baton.protocol.messages.handover import InstanceSource
from baton.transfer.base import TransferError
from baton.transfer.transports import pipes
from baton.transfer.transports.channel import Place
from baton.transfer.transports.page_stream import ANSWER, MAGIC, OK, REQUEST
from baton.transfer.transports.tcp import PIECE_BYTES
from baton.transfer.transports.window import LEAST, MOST, Window

from .pools import DEADLINE_S, Geometry, Pool, Reader, content, wait_until


class FarServer:
    """A page server on a thread, which answers only when it is told to, and counts what it was asked."""

    def __init__(self, geometry: Geometry) -> None:
        self._geometry = geometry
        self._pages = content(geometry)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.asked: list[list[int]] = []
        """Pages of each question, as they came."""
        self.connections: list[socket.socket] = []
        self.answering = threading.Event()
        self.sends_away = 0
        """So many connections are closed as soon as they are there."""
        threading.Thread(target=self._listen, daemon=True).start()

    @property
    def source(self) -> InstanceSource:
        pool = Pool(self._geometry)
        place = f"127.0.0.1:{self._listener.getsockname()[1]}"
        source = pool.view.source(0)
        pool.close()
        return InstanceSource("tile", 8, [type(source)(**{**_fields(source), "tcp": place})])

    def _listen(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self.connections.append(connection)
            if len(self.connections) <= self.sends_away:
                connection.close()
                continue
            threading.Thread(target=self._read, args=(connection,), daemon=True).start()

    def _read(self, connection: socket.socket) -> None:
        waiting: list[list[int]] = []
        lock = threading.Lock()
        threading.Thread(target=self._answer, args=(connection, waiting, lock), daemon=True).start()
        with contextlib.suppress(OSError):
            while header := connection.recv(REQUEST.size, socket.MSG_WAITALL):
                count = REQUEST.unpack(header)[2]
                ids = np.frombuffer(connection.recv(4 * count, socket.MSG_WAITALL), "<i4").tolist()
                with lock:
                    waiting.append(ids)
                self.asked.append(ids)

    def _answer(self, connection: socket.socket, waiting: list[list[int]], lock: threading.Lock) -> None:
        self.answering.wait(DEADLINE_S)
        pause = threading.Event()
        with contextlib.suppress(OSError):
            while connection.fileno() >= 0:
                with lock:
                    ids = waiting.pop(0) if waiting else None
                if ids is None:
                    pause.wait(0.005)
                    continue
                data = self._pages[ids].tobytes()
                connection.sendall(ANSWER.pack(MAGIC, OK, len(data)) + data)

    def close(self) -> None:
        self.answering.set()
        self._listener.close()
        for connection in self.connections:
            connection.close()


def _fields(struct):
    return {name: getattr(struct, name) for name in struct.__struct_fields__}


def test_every_fetch_is_asked_for_before_the_first_answer():
    """Forty small fetches, as those of hand-overs are.  With an answer awaited before the next question they
    would take forty delays of the network, two at a time twenty."""
    geometry = Geometry()
    server = FarServer(geometry)
    with contextlib.closing(server), Reader(geometry) as reader:
        for page in range(40):
            reader.begin(server.source, [page], [page])
        wait_until(lambda: len(server.asked) == 40)
        assert server.asked == [[page] for page in range(40)], "in the order of the fetches"
        assert len(server.connections) == 1
        assert reader.service._fetcher.under_way == 40, "nothing has been answered"
        server.answering.set()
        assert [reader.end().id for _ in range(40)] == list(range(1, 41))
        assert np.array_equal(reader.pool.array[:40], content(geometry)[:40])


def test_a_large_fetch_is_asked_for_in_pieces_and_no_further_than_the_window():
    geometry = Geometry(num_blocks=64, num_layers=4, tile_bytes=32768)  # a page is a megabyte
    server = FarServer(geometry)
    with contextlib.closing(server), Reader(geometry) as reader:
        reader.begin(server.source, list(range(64)), list(range(64)))
        ahead = LEAST // PIECE_BYTES
        wait_until(lambda: len(server.asked) == ahead)
        (transport,) = reader.service._transports
        (line,) = transport._pipes.values()
        assert line.asked == ahead
        assert [len(ids) for ids in server.asked] == [PIECE_BYTES >> 20] * ahead
        server.answering.set()
        assert reader.end().error == ""
        assert np.array_equal(reader.pool.array, content(geometry))


def test_a_dropped_fetch_costs_the_others_nothing():
    """What was asked for comes before theirs, and is thrown away."""
    geometry = Geometry()
    server = FarServer(geometry)
    with contextlib.closing(server), Reader(geometry) as reader:
        ids = [reader.begin(server.source, [page], [page]) for page in range(10)]
        wait_until(lambda: len(server.asked) == 10)
        reader.drop(*ids[::2])
        assert [reader.end().dropped for _ in range(5)] == [True] * 5
        server.answering.set()
        assert [reader.end().error for _ in range(5)] == [""] * 5
        expected = content(geometry)[:10].copy()
        expected[::2] = 0
        assert np.array_equal(reader.pool.array[:10], expected)
        assert len(server.connections) == 1
        assert len(server.asked) == 10, "nothing was asked for twice"


def test_when_nothing_is_wanted_any_more_the_connection_is_closed():
    geometry = Geometry()
    server = FarServer(geometry)
    with contextlib.closing(server), Reader(geometry) as reader:
        id_ = reader.begin(server.source, [1], [1])
        wait_until(lambda: server.asked)
        reader.drop(id_)
        assert reader.end().dropped
        wait_until(lambda: not any(map(len, reader.service._transports[0]._pipes.values())))
        server.answering.set()
        assert reader.fetch(server.source, [2], [2]).error == ""
        assert len(server.connections) == 2


def test_a_reader_that_is_sent_away_unheard_comes_again():
    """A server that is flooded may close the connection of a member."""
    geometry = Geometry()
    server = FarServer(geometry)
    server.sends_away = 5
    server.answering.set()
    with contextlib.closing(server), Reader(geometry) as reader:
        ids = [reader.begin(server.source, [page], [page]) for page in range(4)]
        ended = [reader.end() for _ in ids]
        assert [(one.id, one.error) for one in ended] == [(id_, "") for id_ in ids], "in their order"
        assert np.array_equal(reader.pool.array[:4], content(geometry)[:4])
        assert len(server.connections) == 6


def test_a_reader_that_is_always_sent_away_gives_up():
    geometry = Geometry()
    server = FarServer(geometry)
    server.sends_away = 1 << 30
    with contextlib.closing(server), Reader(geometry) as reader:
        (transport,) = reader.service._transports
        transport._silence_s = 0.3
        assert reader.fetch(server.source, [1], [1]).error
        assert len(server.connections) > 1
        server.sends_away = len(server.connections)
        server.answering.set()
        assert reader.fetch(server.source, [1], [1]).error == ""


@pytest.mark.parametrize(
    "name",
    [
        "",
        ":80",
        "10.0.0.1",
        "10.0.0.1:80:",
        "10.0.0.1:99999",
        "page.server:80",
        "10.0.0.1:80?tls=",
        f"10.0.0.1:80?tls={'g' * 64}",
        f"10.0.0.1:80?tls={'a' * 64}x",
    ],
)
def test_what_is_no_place_is_refused(name):
    with pytest.raises(TransferError, match="no address of a page server"):
        Place.parse(name)


def test_a_place():
    assert Place.parse("10.0.0.1:80") == Place("10.0.0.1", 80, "")
    assert Place.parse(f"[fe80::1%eth0]:8?tls={'ab' * 32}") == Place("fe80::1%eth0", 8, "ab" * 32)


def test_the_window_is_twice_bandwidth_times_delay():
    window, now = Window(), 0.0
    assert window.size == LEAST
    rate, delay, piece = 400e6, 0.1, 2 << 20
    free_at, asked, sizes = 0.0, [], []
    for _ in range(2000):
        while window.is_open:
            asked.append((window.ask(piece, now), now))
        question, at = asked.pop(0)
        begins = max(at + delay, free_at)
        window.begins(question, begins)
        now = free_at = begins + piece / rate
        window.ends(question, now)
        sizes.append(window.size)
    assert abs(sizes[-1] / (2 * rate * (delay + 0.0)) - 1) < 0.1
    assert sizes == sorted(sizes), "it only learns"
    assert window.size <= MOST


def test_a_far_and_wide_link_gets_more_connections(monkeypatch):
    """While all that there are are full, and slow."""
    monkeypatch.setattr(pipes, "MAX_PIPES", 3)
    monkeypatch.setattr(Window, "is_slow", property(lambda window: True))
    geometry = Geometry(num_blocks=64, num_layers=4, tile_bytes=32768)
    server = FarServer(geometry)
    with contextlib.closing(server), Reader(geometry) as reader:
        for start in range(0, 64, 8):
            pages = list(range(start, start + 8))
            reader.begin(server.source, pages, pages)
        wait_until(lambda: len(server.asked) == 3 * (LEAST // PIECE_BYTES))
        assert len(server.connections) == 3
        server.answering.set()
        assert [reader.end().error for _ in range(8)] == [""] * 8
        assert np.array_equal(reader.pool.array, content(geometry))
