"""What page servers refuse: who is told in the log, what the engine is told, and that nobody else suffers."""

import logging
import os
import re
import socket
import ssl

import pytest

from baton.protocol.codec import pack_int32
from baton.protocol.messages.commands import Revoke
from baton.protocol.messages.reports import StrangersRefused
from baton.protocol.rules.knock import NONCE_BYTES, knock
from baton.transfer.refusals import Refusals
from baton.transfer.tasks import Tasks
from baton.transfer.transports import page_server
from baton.transfer.transports.encryption import PageEncryption
from baton.transfer.transports.page_stream import MAGIC, REQUEST

from .pools import DEADLINE_S, TOKEN, Geometry, wait_until
from .test_encryption import OURS, STRANGE, Member

QUESTION = REQUEST.pack(MAGIC, TOKEN, 1, 0, 3, 0, 4, 0) + pack_int32([1])
GEOMETRY = Geometry()


def refused(source, strangers=0, grants=0):
    """The engine's sums, once there are so many."""
    sums = StrangersRefused(0, 0, 0)
    while sums.strangers < strangers or sums.grants < grants:
        one = source.reports.get(timeout=DEADLINE_S)
        sums = StrangersRefused(0, sums.strangers + one.strangers, sums.grants + one.grants)
    assert (sums.strangers, sums.grants) == (strangers, grants)


def knocked(place, server):
    """A connection of who knows how to knock; and what that was."""
    connection = socket.create_connection(place)
    connection.settimeout(DEADLINE_S)
    said = knock(OURS.first, bytes.fromhex(server), os.urandom(NONCE_BYTES))
    connection.sendall(said)
    return connection, said


def wrong_secret(source):
    """It does not know how to knock; and if it did, it would not get through the handshake."""
    with Member(GEOMETRY, STRANGE) as stranger:
        error = stranger.fetch(source.source, [1], [1]).error
    assert "refuses this instance's key: is its --cluster-secret another one?" in error


def not_its_secret(source):
    told_in_tls(source, PageEncryption(STRANGE)._reading)


def no_certificate(source):
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    told_in_tls(source, context)


def told_in_tls(source, context):
    plain, _ = knocked(source.place, source.server._encryption.fingerprint)
    with plain, context.wrap_socket(plain) as connection, pytest.raises(ssl.SSLError):
        assert not connection.recv(1), "it says nothing to a stranger"


def old_tls(source):
    context = PageEncryption(OURS)._reading
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    plain, _ = knocked(source.place, source.server._encryption.fingerprint)
    with plain, pytest.raises((ssl.SSLError, ConnectionError)):
        context.wrap_socket(plain)


def repeated(source):
    """What a member has begun with, once more."""
    first, said = knocked(source.place, source.server._encryption.fingerprint)
    wait_until(lambda: source.server._knocked)
    told(source.place, said)
    source.server._knocked.leave(next(iter(source.server._knocked)))  # (its silence is another test's)
    return first


def known_to_another_server(source):
    with Member(GEOMETRY, OURS) as other:
        connection, said = knocked(other.place, other.server._encryption.fingerprint)
        connection.close()
    told(source.place, said + bytes(300))


def in_clear(source):
    told(source.place, QUESTION)


def garbage(source):
    told(source.place, b"GET / HTTP/1.1\r\nHost: somewhere\r\n\r\n")


def a_few_bytes(source):
    """And leaves."""
    with socket.create_connection(source.place) as connection:
        connection.sendall(b"GET / HTTP/1.1\r\n\r\n")


def too_much(source):
    """The beginning of a handshake that never ends."""
    connection, _ = knocked(source.place, source.server._encryption.fingerprint)
    told_on(connection, b"\x16\x03\x01\x40\x00\x01\x00\x3f\xfc\x03\x03" + bytes(4000))


def silence(source):
    told(source.place, b"")


def silence_after_it_has_knocked(source):
    connection, _ = knocked(source.place, source.server._encryption.fingerprint)
    told_on(connection, b"")


def told(place, data):
    """What is sent is answered with the end of the connection, an alert before it at most."""
    connection = socket.create_connection(place)
    connection.settimeout(DEADLINE_S)
    told_on(connection, data)


def told_on(connection, data):
    with connection:
        try:
            connection.sendall(data)
            answer = b"".join(iter(lambda: connection.recv(4096), b""))
        except ConnectionError:
            return
        assert len(answer) < 16, answer


@pytest.mark.parametrize(
    "stranger",
    [
        wrong_secret,
        not_its_secret,
        no_certificate,
        old_tls,
        repeated,
        known_to_another_server,
        in_clear,
        garbage,
        a_few_bytes,
        too_much,
        silence,
        silence_after_it_has_knocked,
    ],
)
def test_strangers_are_logged_and_counted_and_members_served(stranger, caplog, monkeypatch):
    monkeypatch.setattr(page_server, "AUTH_S", 0.3 if "silence" in stranger.__name__ else 60.0)
    caplog.set_level(logging.WARNING)
    with Member(GEOMETRY, OURS, filled=True) as source, Member(GEOMETRY, OURS) as reader:
        assert reader.fetch(source.source, [1], [1]).error == ""
        stranger(source)
        refused(source, strangers=1)
        assert reader.fetch(source.source, [2], [2]).error == ""
    (line,) = [one.getMessage() for one in caplog.records if "pages:" in one.getMessage()]
    assert line.startswith("pages: a connection from 127.0.0.1 is refused: "), line


def test_a_page_grant_that_is_over_and_one_that_never_was(caplog):
    """A grant is shown once more after its end; and one that was made up."""
    caplog.set_level(logging.WARNING)
    with Member(GEOMETRY, OURS, filled=True) as source, Member(GEOMETRY, OURS) as reader:
        assert reader.fetch(source.source, [1], [1]).error == ""
        source.service.grant(Revoke([TOKEN]))
        assert "the grant is over" in reader.fetch(source.source, [1], [2]).error
        refused(source, grants=1)
        assert not reader.pool.array[2].any()
        made_up = reader.fetch(source.source, [1], [2], grant=bytes(16))
        assert "no such grant" in made_up.error
        refused(source, grants=1)
    lines = [one.getMessage() for one in caplog.records if "pages:" in one.getMessage()]
    assert len(lines) == 2
    assert all(line.startswith("pages: a question from 127.0.0.1 is refused: ") for line in lines)


def test_a_flood_is_one_report_a_second():
    """The engine is not flooded by what a page server refuses."""
    now, reports = [0.0], []
    tasks = Tasks(lambda: now[0])
    refusals = Refusals(3, tasks, reports.append)
    for second in range(3):
        for _ in range(200):
            refusals.stranger("10.0.0.9", "why")
            tasks.run_once(0.0)
        refusals.grant("10.0.0.9", "why")
        now[0] = second + 1.0
        tasks.run_once(0.0)
    tasks.run_once(0.0)
    now[0] = 4.0
    tasks.run_once(0.0)
    assert not tasks.alive, "nothing runs while nothing is refused"
    tasks.close()
    assert sum(one.strangers for one in reports) == 600
    assert sum(one.grants for one in reports) == 3
    assert len(reports) == 4, "the first at once"
    assert {one.rank for one in reports} == {3}


def test_the_log_names_no_token(caplog):
    caplog.set_level(logging.DEBUG)
    with Member(GEOMETRY, OURS, filled=True) as source, Member(GEOMETRY, OURS) as reader:
        assert reader.fetch(source.source, [1], [1]).error == ""
        assert reader.fetch(source.source, [99], [1], grant=TOKEN).error
        assert reader.fetch(source.source, [1], [1], grant=b"0123456789abcdef").error
    for record in caplog.records:
        assert not re.search(f"{TOKEN.hex()}|{TOKEN!r}|0123456789abcdef", record.getMessage())
