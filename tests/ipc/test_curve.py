"""CURVE between members of a cluster: who is let in, what strangers get, what a wire shows."""

from __future__ import annotations

import socket as sockets
import threading
import time
from collections.abc import Callable, Iterator

import pytest
import zmq
from zmq.utils import z85
from zmq.utils.monitor import recv_monitor_message

from baton.ipc.sockets.curve import Doorkeeper, Encryption, Place, Unprotected, protect
from baton.ipc.sockets.half_open import MAX_HALF_OPEN, _borrowed, passed
from baton.ipc.sockets.zeromq import terminate
from baton.protocol.rules.cluster_secret import ClusterSecret, Secrets
from tests.conftest import GENEROUS_S

NEW, OLD, STRANGE = (ClusterSecret.make(bytes([number] * 32)) for number in range(3))
GENEROUS_MS = int(GENEROUS_S * 1000)


class Listener:
    """A ROUTER that echoes, and its doorkeeper, in a thread, as an engine's loop has them."""

    def __init__(self, *accepted: ClusterSecret) -> None:
        encryption = Encryption(Secrets(accepted))
        self.context = zmq.Context()
        self.door = Doorkeeper(self.context, encryption)
        self.door.half_open._clock = lambda: 0.0  # what is new stays so
        self.asks = True
        """The doorkeeper answers."""
        self.router = self.context.socket(zmq.ROUTER)
        self.router.setsockopt(zmq.HANDSHAKE_IVL, 0)  # who is silent stays
        self.door.guard(self.router)
        self.router.bind("tcp://127.0.0.1:0")
        address = self.router.getsockopt(zmq.LAST_ENDPOINT).rstrip(b"\0").decode()
        self.endpoint = self.door.announced(address)
        self.port = int(address.rpartition(":")[2])
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self.router, zmq.POLLIN)
        for fd in self.door.descriptors():
            poller.register(fd, zmq.POLLIN)
        while not self._stop.is_set():
            if self.asks:
                self.door.turn()
            else:
                self.door.half_open.turn()
            while self.router.getsockopt(zmq.EVENTS) & zmq.POLLIN:
                self.router.send_multipart(self.router.recv_multipart())
            if not self.door.busy() or not self.asks:
                poller.poll(10)

    def close(self) -> None:
        self._stop.set()
        self._thread.join()
        terminate(self.context, GENEROUS_S)


class Caller:
    def __init__(self, endpoint: str, encryption: Encryption | None) -> None:
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.RECONNECT_IVL, 600_000)
        self.monitor = self.socket.get_monitor_socket(
            zmq.EVENT_HANDSHAKE_SUCCEEDED
            | zmq.EVENT_HANDSHAKE_FAILED_AUTH
            | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
            | zmq.EVENT_DISCONNECTED
        )
        self.socket.connect(protect(self.socket, endpoint, encryption))
        self.socket.send(b"hello")

    def outcome(self) -> zmq.Event:
        assert self.monitor.poll(GENEROUS_MS)
        return recv_monitor_message(self.monitor)["event"]

    def close(self) -> None:
        self.socket.disable_monitor()
        self.monitor.close(0)
        terminate(self.context, GENEROUS_S)


@pytest.fixture
def listener() -> Iterator[Listener]:
    made = Listener(NEW, OLD)
    yield made
    made.close()


def call(endpoint: str, encryption: Encryption | None) -> tuple[zmq.Event, bytes]:
    """How the handshake ended, and what was answered."""
    caller = Caller(endpoint, encryption)
    try:
        outcome = caller.outcome()
        if outcome != zmq.EVENT_HANDSHAKE_SUCCEEDED:
            assert not caller.socket.poll(0)
            return outcome, b""
        assert caller.socket.poll(GENEROUS_MS)
        return outcome, caller.socket.recv()
    finally:
        caller.close()


def test_members_are_let_in_with_each_secret_that_is_accepted(listener: Listener):
    for accepted in ((NEW,), (OLD,), (NEW, OLD), (OLD, NEW)):
        assert call(listener.endpoint, Encryption(Secrets(accepted))) == (
            zmq.EVENT_HANDSHAKE_SUCCEEDED,
            b"hello",
        )
    assert listener.door.refused == 0


def test_a_stranger_is_told_nothing_but_no(listener: Listener, caplog: pytest.LogCaptureFixture):
    """With the public key of who listens, which is no secret."""
    assert call(listener.endpoint, Encryption(Secrets((STRANGE,)))) == (zmq.EVENT_HANDSHAKE_FAILED_AUTH, b"")
    assert listener.door.refused == 1
    assert "a connection from 127.0.0.1 is refused" in caplog.text
    assert call(listener.endpoint, Encryption(Secrets((NEW,))))[1] == b"hello"


def test_who_listens_is_the_one_that_was_named(listener: Listener):
    """A member that has taken the address of another one is not spoken to."""
    place = Place.parse(listener.endpoint)
    other = Encryption(Secrets((NEW,))).announced(place.address)
    assert call(other, Encryption(Secrets((NEW,))))[0] != zmq.EVENT_HANDSHAKE_SUCCEEDED


def test_a_plain_socket_is_not_heard(listener: Listener):
    address = Place.parse(listener.endpoint).address
    outcome, answer = call(address, None)
    assert (outcome == zmq.EVENT_HANDSHAKE_SUCCEEDED, answer) == (False, b"")


def test_no_side_speaks_in_clear_because_the_other_one_does():
    context = zmq.Context()
    encryption = Encryption(Secrets((NEW,)))
    with context.socket(zmq.DEALER) as socket:
        with pytest.raises(Unprotected, match="here there is no --cluster-secret"):
            protect(socket, encryption.announced("tcp://127.0.0.1:1"), None)
        with pytest.raises(Unprotected, match="is not encrypted, and here everything is"):
            protect(socket, "tcp://127.0.0.1:1", encryption)
        assert protect(socket, "ipc:///x", encryption) == "ipc:///x"
        assert protect(socket, "tcp://127.0.0.1:1", None) == "tcp://127.0.0.1:1"
    context.destroy(0)


def test_places():
    key = bytes(range(32))
    place = Place("tcp://[::1]:5", key)
    assert Place.parse(str(place)) == place
    assert Place.parse("ipc:///a/b") == Place("ipc:///a/b", b"")
    assert Place.parse("tcp://1.2.3.4:5?curve=12") == Place("tcp://1.2.3.4:5?curve=12", b"")
    encryption = Encryption(Secrets((NEW,)))
    assert len(Place.parse(encryption.announced("tcp://1.2.3.4:5")).key) == 32
    assert z85.decode(encryption._public) in encryption.allowed
    with pytest.raises(ValueError):
        Encryption(Secrets())


def test_garbage_and_silence_disturb_nobody(listener: Listener):
    """Half-open connections and random bytes, while a member connects."""
    strange: list[sockets.socket] = []
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00CURVE" + bytes(15) + b"\0" + bytes(31)
    for number, words in enumerate(
        (b"", b"GET / HTTP/1.1\r\n\r\n", bytes(500), greeting, b"\xff" * 70_000) * 8
    ):
        one = sockets.create_connection(("127.0.0.1", listener.port))
        strange.append(one)
        try:
            one.sendall(words)
        except OSError:
            assert number % 5 != 0, "who is silent is not sent away at once"
    assert call(listener.endpoint, Encryption(Secrets((NEW,))))[1] == b"hello"
    for one in strange:
        one.close()


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + GENEROUS_S
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def is_closed(connection: sockets.socket) -> bool:
    """By the other end; waits for that."""
    connection.settimeout(GENEROUS_S)
    try:
        while connection.recv(4096):
            pass
    except TimeoutError:
        return False
    except OSError:
        pass
    return True


def test_half_open_connections_are_limited_and_lock_no_member_out(listener: Listener):
    """The oldest strangers make room; a member that came before them all stays."""
    member = Caller(listener.endpoint, Encryption(Secrets((NEW,))))
    strange: list[sockets.socket] = []
    try:
        assert member.outcome() == zmq.EVENT_HANDSHAKE_SUCCEEDED
        assert member.socket.poll(GENEROUS_MS)
        address = ("127.0.0.1", listener.port)
        strange += [sockets.create_connection(address) for _ in range(MAX_HALF_OPEN + 30)]
        assert all(map(is_closed, strange[:30])), "they made room"
        assert listener.door.half_open.ended >= 30
        assert len(listener.door.half_open._new) <= MAX_HALF_OPEN
        assert call(listener.endpoint, Encryption(Secrets((NEW,))))[1] == b"hello"
        member.socket.recv()
        member.socket.send(b"still there")
        assert member.socket.poll(GENEROUS_MS)
        assert member.socket.recv() == b"still there"
        assert not member.monitor.poll(0)
    finally:
        member.close()
        for one in strange:
            one.close()


def test_the_kernel_tells_who_has_authenticated(listener: Listener):
    """Whom nobody has let in yet has been sent less than a member."""
    listener.asks = False
    caller = Caller(listener.endpoint, Encryption(Secrets((NEW,))))
    new = listener.door.half_open._new
    until(lambda: len(new) == 1)
    (descriptor,) = new

    def told() -> int:
        with _borrowed(descriptor) as connection:
            return passed(connection)[0]

    until(lambda: told() >= 234)
    assert told() == 234
    listener.asks = True
    assert caller.outcome() == zmq.EVENT_HANDSHAKE_SUCCEEDED
    until(lambda: told() > 270)
    caller.close()


def test_who_is_no_member_cannot_send_much(listener: Listener):
    """A frame of many megabytes in place of a hello."""
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00CURVE" + bytes(47)
    with sockets.create_connection(("127.0.0.1", listener.port)) as strange:
        strange.sendall(greeting + b"\x06" + (64 << 20).to_bytes(8, "big") + bytes(100_000))
        assert is_closed(strange)
    until(lambda: listener.door.half_open.ended == 1)
    assert call(listener.endpoint, Encryption(Secrets((NEW,))))[1] == b"hello"


def test_who_does_not_know_the_listeners_key_is_logged_and_counted(
    listener: Listener, caplog: pytest.LogCaptureFixture
):
    """The leader of an instance is found by a key of the secret: another secret shows here, not at ZAP."""
    place = Place.parse(listener.endpoint)
    for _ in range(3):
        wrong = z85.decode(zmq.curve_keypair()[0])
        before = listener.door.half_open.failed
        caller = Caller(str(Place(place.address, wrong)), Encryption(Secrets((NEW,))))
        until(lambda before=before: listener.door.half_open.failed > before)
        caller.close()
    counted: dict[str, int] = {}
    listener.door.count(counted.__setitem__)
    assert counted["handshake"] >= 3
    until(lambda: any("a connection from 127.0.0.1 is refused" in text for text in caplog.messages))
    assert call(listener.endpoint, Encryption(Secrets((NEW,))))[1] == b"hello"
