"""Who may begin a handshake with a page server."""

from baton.protocol.rules.cluster_secret import ClusterSecret, Secrets
from baton.protocol.rules.knock import _MAX_NONCES, KNOCK_BYTES, Knocks, knock

OLD, NEW, STRANGE = (ClusterSecret.make(bytes([n]) * 32) for n in range(3))
HERE, THERE = bytes(32), bytes([7] * 32)


def nonce(number: int) -> bytes:
    return number.to_bytes(16, "big")


def test_a_knock_opens_once_and_only_where_it_is_for():
    knocks = Knocks(Secrets((NEW, OLD)), HERE)
    for number, secret in enumerate((NEW, OLD)):
        made = knock(secret, HERE, nonce(number))
        assert len(made) == KNOCK_BYTES
        assert knocks.why_not(made) == ""
        assert "repeats" in knocks.why_not(made)
    for wrong in (
        knock(STRANGE, HERE, nonce(3)),
        knock(NEW, THERE, nonce(4)),
        bytes([1]) + knock(NEW, HERE, nonce(5))[1:],
        knock(NEW, HERE, nonce(6))[:-1],
        b"",
        b"GET / HTTP/1.1\r\nHost: somewhere\r\n"[:KNOCK_BYTES],
    ):
        assert "no key of this cluster" in knocks.why_not(wrong)


def test_what_is_remembered_is_bounded_and_who_has_no_secret_cannot_fill_it():
    knocks = Knocks(Secrets((NEW,)), HERE)
    first = knock(NEW, HERE, nonce(0))
    assert knocks.why_not(first) == ""
    for number in range(1, 3 * _MAX_NONCES):
        knocks.why_not(knock(STRANGE, HERE, nonce(number)))
    assert "repeats" in knocks.why_not(first)
    for number in range(1, _MAX_NONCES + 5):
        knocks.why_not(knock(NEW, HERE, nonce(number)))
    assert len(knocks._heard) == _MAX_NONCES
