"""Pages over TCP between members of a cluster: right, unreadable on the way, and for members alone."""

import contextlib
import queue
import select
import socket
import ssl
import threading
from types import SimpleNamespace
from typing import ClassVar

import msgspec
import numpy as np
import pytest

from baton.ipc.sockets import waiting
from baton.protocol.codec import pack_int32
from baton.protocol.messages.commands import Fetch, Grant
from baton.protocol.messages.handover import InstanceSource
from baton.protocol.rules.cluster_secret import NO_SECRETS, ClusterSecret, Secrets
from baton.transfer.base import TransferError
from baton.transfer.service import TransferService
from baton.transfer.tasks import READ
from baton.transfer.transports import page_server, sealing
from baton.transfer.transports.encryption import PageEncryption
from baton.transfer.transports.page_stream import ANSWER, MAGIC, REQUEST
from baton.transfer.transports.sealed import QUESTION_BYTES
from baton.transfer.transports.sealing import RECORD_BYTES, Seal

from .pools import DEADLINE_S, TOKEN, Geometry, Pool, content, wait_until

OURS, NEW, STRANGE = (Secrets((ClusterSecret.make(bytes([n]) * 32),)) for n in (1, 2, 3))
BIG = Geometry(num_blocks=16, num_layers=4, tile_bytes=32768)
"""A page is a megabyte: records of its own."""
SMALL = Geometry(num_blocks=64, tile_bytes=512)
"""A page is 12 KiB: many in a record."""


class Member:
    """A transfer service of one rank, with pages that it grants to all members that come later, or with
    zeros."""

    _sources: ClassVar[list] = []

    def __init__(self, geometry, secrets, *, filled=False, rank=0):
        self.pool = Pool(geometry, rank)
        self.reports = queue.Queue()
        config = geometry.config()
        self.service = TransferService(rank, self.pool.view, config, self.reports.put, secrets=secrets)
        if filled:
            self.pool.array[:] = content(geometry, rank)
        self.service.start()
        self._blocks = geometry.num_blocks
        for source in self._sources:
            source.grant(self)
        if filled:
            self._sources.append(self)

    def grant(self, reader, token=TOKEN):
        """All its pages."""
        keys = [reader.service.source.reader_key]
        self.service.grant(Grant(token, "reader", keys, pack_int32(range(self._blocks)), 3600.0))

    @property
    def source(self):
        return InstanceSource("tile", 8, [self.service.source])

    @property
    def server(self):
        return self.service._transports[0]._server

    @property
    def place(self):
        host, _, port = self.service.source.tcp.partition("?")[0].rpartition(":")
        return host, int(port)

    def fetch(self, source, pages, blocks, first_layer=0, num_layers=-1, grant=TOKEN):
        packed = pack_int32(pages), pack_int32(blocks)
        self.service.fetch(Fetch(1, source, *packed, first_layer, num_layers, grant))
        return self.reports.get(timeout=DEADLINE_S)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self in self._sources:
            self._sources.remove(self)
        self.service.close()
        self.pool.close()


class Tap:
    """Stands between a reader and a page server, keeps what passes, and may change a byte of the answers."""

    def __init__(self, place):
        self._place = place
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.questions, self.answers = bytearray(), bytearray()
        self.damage = -1
        """The byte of the answers that is changed."""
        threading.Thread(target=self._run, daemon=True).start()

    def of(self, source):
        (rank,) = source.ranks
        tail = rank.tcp.partition("?")[1:]
        name = f"127.0.0.1:{self._listener.getsockname()[1]}{''.join(tail)}"
        return msgspec.structs.replace(source, ranks=[msgspec.structs.replace(rank, tcp=name)])

    def _run(self):
        with contextlib.suppress(OSError):
            while True:
                here, _ = self._listener.accept()
                there = socket.create_connection(self._place)
                for one, other, kept in ((here, there, self.questions), (there, here, self.answers)):
                    threading.Thread(target=self._pass, args=(one, other, kept), daemon=True).start()

    def _pass(self, one, other, kept):
        with contextlib.suppress(OSError):
            while data := bytearray(one.recv(1 << 16)):
                at = self.damage - len(kept)
                if kept is self.answers and 0 <= at < len(data):
                    data[at] ^= 1
                kept += data
                other.sendall(data)
        for end in (one, other):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def close(self):
        self._listener.close()


@pytest.mark.parametrize("geometry", [BIG, SMALL, Geometry(num_blocks=16, tile_bytes=40_000, checksums=True)])
def test_pages_come_as_they_are(geometry):
    rng = np.random.default_rng(5)
    n = geometry.num_blocks
    with Member(geometry, OURS, filled=True) as source, Member(geometry, OURS) as reader:
        expected, pages = np.zeros_like(reader.pool.array), content(geometry)
        for count, first, layers in [(n, 0, -1), (n // 2, 1, -1), (3, 0, 2), (1, 2, 1), (0, 0, -1)]:
            from_, to = rng.permutation(n)[:count].tolist(), rng.permutation(n)[:count].tolist()
            found = reader.fetch(source.source, from_, to, first, layers)
            assert found.error == ""
            upto = geometry.num_layers if layers == -1 else first + layers
            expected[to, first:upto] = pages[from_, first:upto]
            assert np.array_equal(reader.pool.array, expected)


def test_neighbouring_pages_and_some_heads():
    """Runs that are longer than a record, and such as lie in other places here than there."""
    with Member(BIG, OURS, filled=True) as source, Member(BIG, OURS) as reader:
        assert reader.fetch(source.source, list(range(16)), list(range(15, -1, -1))).error == ""
        assert np.array_equal(reader.pool.array[::-1], content(BIG))
    halves = msgspec.structs.replace(SMALL, ranks=2)
    with Member(SMALL, OURS, filled=True) as source, Member(halves, OURS, rank=1) as reader:
        assert reader.fetch(source.source, [3, 9, 10], [1, 2, 0]).error == ""
        assert np.array_equal(reader.pool.array[[1, 2, 0]], content(halves, 1)[[3, 9, 10]])


def test_nothing_can_be_read_on_the_way():
    """Neither pages nor the grant; in clear both are found, so the search finds what is there."""
    pages = content(BIG)
    for secrets, found in ((OURS, False), (NO_SECRETS, True)):
        with Member(BIG, secrets, filled=True) as source, Member(BIG, secrets) as reader:
            tap = Tap(source.place)
            with contextlib.closing(tap):
                assert reader.fetch(tap.of(source.source), [4, 5], [6, 7]).error == ""
                assert np.array_equal(reader.pool.array[6:8], pages[4:6])
                assert (TOKEN in tap.questions) is found
                for page in (4, 5):
                    whole = pages[page].tobytes()
                    pieces = [whole[at : at + 16] for at in range(0, len(whole), 4096)]
                    assert all((piece in tap.answers) is found for piece in pieces)


def test_a_byte_that_is_changed_on_the_way_ends_the_fetch():
    with Member(BIG, OURS, filled=True) as source, Member(BIG, OURS) as reader:
        tap = Tap(source.place)
        with contextlib.closing(tap):
            tap.damage = 3 * RECORD_BYTES
            assert "changed on the way" in reader.fetch(tap.of(source.source), [4, 5], [6, 7]).error
        assert reader.fetch(source.source, [4], [6]).error == ""


def test_records_open_once_in_their_order_and_as_they_were(monkeypatch):
    monkeypatch.setattr(sealing, "_RECORDS_A_KEY", 3)
    one, other = Seal(bytes(32)), Seal(bytes(32))
    records = []
    for n in range(8):
        record = memoryview(bytearray(5 + sealing.HEAD_BYTES + sealing.TAG_BYTES))
        assert one.seal(memoryview(b"page%d" % n), record) == len(record)
        records.append(record[sealing.HEAD_BYTES :])
    for n, record in enumerate(records):
        found = memoryview(bytearray(5))
        other.open(record, found)
        assert bytes(found) == b"page%d" % n
    assert len({bytes(record) for record in records}) == 8
    for follows in (0, 2):  # the same again, and one with another left out before it
        late = Seal(bytes(32))
        late.open(records[0], memoryview(bytearray(5)))
        with pytest.raises(TransferError, match="changed on the way"):
            late.open(records[follows], memoryview(bytearray(5)))


@pytest.mark.parametrize(
    ("there", "here", "error"),
    [
        (OURS, STRANGE, "refuses this instance's key: is its --cluster-secret another one?"),
        (OURS, NO_SECRETS, "its page server is encrypted"),
        (NO_SECRETS, OURS, "its page server is not encrypted"),
        (OURS, Secrets(NEW.accepted + OURS.accepted), "refuses this instance's key"),
        (Secrets(NEW.accepted + OURS.accepted), OURS, ""),
        (Secrets(OURS.accepted + NEW.accepted), Secrets(NEW.accepted + OURS.accepted), ""),
    ],
)
def test_only_members_with_a_secret_that_the_server_accepts(there, here, error):
    """A server accepts both of two secrets, a reader shows its first one."""
    with Member(SMALL, there, filled=True) as source, Member(SMALL, here) as reader:
        found = reader.fetch(source.source, [1], [1])
        assert error in found.error if error else not found.error, found.error
        assert reader.pool.array.any() == (not error)
        with Member(SMALL, there) as friend:
            assert friend.fetch(source.source, [1], [1]).error == "", "others are served meanwhile"


def test_a_reader_that_skips_encryption_gets_nothing():
    with Member(SMALL, OURS, filled=True) as source, Member(SMALL, OURS) as reader:
        question = REQUEST.pack(MAGIC, TOKEN, 1, 0, 3, 0, 4, 0) + pack_int32([1])
        with socket.create_connection(source.place) as connection:
            connection.sendall(question)
            connection.settimeout(DEADLINE_S)
            with contextlib.suppress(ConnectionResetError):
                data = b"".join(iter(lambda: connection.recv(4096), b""))
                assert len(data) < ANSWER.size, "an alert at most"
        assert reader.fetch(source.source, [1], [1]).error == ""


def test_another_member_that_took_over_the_address_is_not_the_source():
    with Member(SMALL, OURS, filled=True) as old, Member(SMALL, OURS, filled=True) as new:
        (was,), (is_,) = old.source.ranks, new.source.ranks
        name = is_.tcp.partition("?")[0] + "?" + was.tcp.partition("?")[2]
        there = msgspec.structs.replace(old.source, ranks=[msgspec.structs.replace(was, tcp=name)])
        with Member(SMALL, OURS) as reader:
            assert "refuses this instance's key" in reader.fetch(there, [1], [1]).error
            new.server._encryption._knocks.why_not = lambda heard: ""  # it pretends
            assert "another process than the one that was named" in reader.fetch(there, [1], [1]).error
            assert not reader.pool.array.any()


def test_a_grant_is_asked_for_in_encrypted_connections_too():
    with Member(SMALL, OURS, filled=True) as source, Member(SMALL, OURS) as reader:
        assert "no such grant" in reader.fetch(source.source, [1], [1], grant=b"of other readers").error
        assert not reader.pool.array.any()
        assert reader.fetch(source.source, [1], [1]).error == ""


def test_a_grant_that_another_member_shows_is_refused():
    """Both are members, and the token is the right one: it was made for the other one."""
    token = b"of one request.."
    with (
        Member(SMALL, OURS, filled=True) as source,
        Member(SMALL, OURS) as reader,
        Member(SMALL, OURS) as thief,
    ):
        source.grant(reader, token)
        assert "the grant is another reader's" in thief.fetch(source.source, [1], [1], grant=token).error
        assert not thief.pool.array.any()
        assert reader.fetch(source.source, [1], [1], grant=token).error == ""
        assert thief.fetch(source.source, [1], [1]).error == "", "what it was given it may read"
        assert "the grant is another reader's" in thief.fetch(source.source, [2], [2], grant=token).error
        assert not thief.pool.array[2].any()


def server_of(keys, connection, budget):
    yield from keys.listen(connection, budget)
    return (yield from keys.accept(connection, budget))


class Unlimited:
    bytes_left = 1 << 20

    def seconds_left(self):
        return DEADLINE_S


def test_a_handshake_is_far_smaller_than_what_a_stranger_may_send():
    """A reader's part of it; and a server believes neither silence nor more than that."""
    keys = PageEncryption(Secrets(OURS.accepted + NEW.accepted))
    one, other = socket.socketpair()
    one.setblocking(False)
    other.setblocking(False)
    budget = SimpleNamespace(bytes_left=page_server.AUTH_BYTES, seconds_left=lambda: 0.0)
    ends = [server_of(keys, one, budget), keys.open(other, keys.fingerprint, Unlimited())]
    made = []
    with one, other:
        while ends:  # each takes what the other one has sent
            for end in list(ends):
                try:
                    end.send(None)
                except StopIteration as stop:
                    made.append(stop.value)
                    ends.remove(end)
    assert len(made) == 2
    assert budget.bytes_left > 100, "there is some room for other versions of OpenSSL"


def connected(reader, source):
    """As a member that has proved itself, and may now say what it likes."""
    connection = socket.create_connection(source.place)
    connection.setblocking(False)
    keys = reader.service._transports[0]._encryption
    step = keys.open(connection, source.server._encryption.fingerprint, Unlimited())
    try:
        wait = next(step)
        while True:
            reading = [wait.fd] if wait.events & READ else []
            assert any(select.select(reading, [] if reading else [wait.fd], [], DEADLINE_S))
            wait = step.send(True)
    except StopIteration as stop:
        return stop.value


@pytest.mark.parametrize("length", [0, QUESTION_BYTES + 1, 0xFFFFFFFF])
def test_a_member_that_sends_rubbish_lengths_is_closed_and_others_are_served(length):
    """Nothing is reserved for what it announces."""
    with Member(SMALL, OURS, filled=True) as source, Member(SMALL, OURS) as reader:
        channel = connected(reader, source)
        with channel.connection as connection:
            connection.settimeout(DEADLINE_S)
            with contextlib.suppress(ConnectionError):
                connection.sendall(length.to_bytes(4, "big") + bytes(100))
                assert connection.recv(1) == b""
        assert reader.fetch(source.source, [1], [1]).error == ""


def test_a_member_that_asks_for_rubbish_is_refused():
    with Member(SMALL, OURS, filled=True) as source, Member(SMALL, OURS) as reader:
        channel = connected(reader, source)
        with channel.connection as connection:
            connection.settimeout(DEADLINE_S)
            header = REQUEST.pack(MAGIC, TOKEN, 0xFFFFFFFF, 0, 3, 0, 4, 0)
            connection.sendall(channel.wrapped(header + bytes(4 * (1 << 16))))
            answer = bytearray()
            with contextlib.suppress(ConnectionError):
                while part := connection.recv(4096):
                    answer += part
            assert len(answer) < 200, "a sentence, and the end of the connection"
        assert reader.fetch(source.source, [1], [1]).error == ""


def test_two_connections_have_nothing_in_common():
    """AES-GCM is broken where a key is used twice with a number: each connection has keys of its own."""
    with Member(SMALL, OURS, filled=True) as source:
        answers = []
        for _ in range(2):
            with Member(SMALL, OURS) as reader:
                tap = Tap(source.place)
                with contextlib.closing(tap):
                    assert reader.fetch(tap.of(source.source), [4, 5], [6, 7]).error == ""
                    answers.append(bytes(tap.answers[-20_000:]))
        one, other = (np.frombuffer(answer, np.uint8) for answer in answers)
        assert len(one) == len(other) == 20_000
        pages = np.frombuffer(content(SMALL)[5].tobytes()[-10_000:], np.uint8)
        assert np.mean(one == other) < 0.05, "not the same twice"
        # (With one key stream for both the difference of what was sent would be that of the pages: none.)
        assert np.mean(one[-10_016:-16] ^ other[-10_016:-16] == 0) < 0.05
        assert np.mean(one[-10_016:-16] == pages) < 0.05


def test_strangers_are_sent_away_and_keep_no_reader_away(monkeypatch):
    """One that is silent, one that talks too much, and very many: as with servers that do not encrypt."""
    monkeypatch.setattr(page_server, "AUTH_S", 0.5)
    with Member(SMALL, OURS, filled=True) as source, Member(SMALL, OURS) as reader:
        strange = [socket.create_connection(source.place) for _ in range(3 * waiting.MOST)]
        with contextlib.suppress(OSError):
            strange[-1].sendall(bytes([22, 3, 1, 64, 0]) + bytes(4096))
        assert reader.fetch(source.source, [1], [1]).error == ""
        wait_until(lambda: not source.server._strangers)
        assert len(source.server._members) == 1
        for one in strange:
            one.close()
        assert reader.fetch(source.source, [2], [2]).error == ""


def test_a_certificate_of_no_member_is_refused_though_its_name_is_right():
    """Names prove nothing: the key does."""
    ours, strange = PageEncryption(OURS), PageEncryption(STRANGE)
    for context in (ours._serving, strange._serving):
        assert context.minimum_version is ssl.TLSVersion.TLSv1_3
        assert context.verify_mode is ssl.CERT_REQUIRED
    assert ours.fingerprint != PageEncryption(OURS).fingerprint, "each process draws its own"
