"""Signed requests of members: what a gateway takes, once, and how an instance knows that it is one."""

from __future__ import annotations

import hashlib
import re
from itertools import pairwise

import pytest

from baton.protocol.rules import signing
from baton.protocol.rules.cluster_secret import ClusterSecret, Secrets
from baton.protocol.rules.signing import (
    SKEW_S,
    Question,
    Refusal,
    Signed,
    Verifier,
    check_answer,
    sign_answer,
    sign_request,
)

NEW, OLD, STRANGE = (ClusterSecret.make(bytes([number] * 32)) for number in range(3))
SERVER = "ab" * 16
NOW = 1_800_000_000.0
PATH = "/cluster/instances/far"


def ask(number: int = 0, *, secret: ClusterSecret = NEW, server: str = SERVER, now: float = NOW) -> Question:
    return sign_request(secret, server, now, number.to_bytes(16, "big"), "PUT", PATH, b"body")


def check(verifier: Verifier, question: Question, now: float = NOW) -> Signed | str:
    found = verifier.check(question.header, "PUT", PATH, now)
    return found if isinstance(found, Signed) else found.why


def test_a_member_is_heard_once():
    verifier = Verifier(Secrets((NEW,)), SERVER)
    question = ask()
    assert check(verifier, question) == Signed(NEW, question.nonce, hashlib.sha256(b"body").hexdigest())
    assert check(verifier, question) == "replayed"
    assert check(verifier, question, NOW + SKEW_S) == "replayed"
    assert check(verifier, question, NOW + SKEW_S + 1) == "time"
    assert isinstance(check(verifier, ask(1)), Signed)


def test_what_is_replayed_to_another_server_or_after_its_start_is_worth_nothing():
    assert check(Verifier(Secrets((NEW,)), "cd" * 16), ask()) == "server"
    assert check(Verifier(Secrets((NEW,)), SERVER), ask(server="")) == "server"


def test_strangers_are_not_heard():
    verifier = Verifier(Secrets((NEW,)), SERVER)
    assert verifier.check(ask(secret=STRANGE).header, "PUT", PATH, NOW) == Refusal("unknown")
    for wrong in ("", "Baton-Member", "Baton-Member server=, time=1.000, nonce=, body=, mac=", "x" * 9999):
        assert verifier.check(wrong, "PUT", PATH, NOW) == Refusal("unknown")


@pytest.mark.parametrize("part", ["server", "time", "nonce", "body", "mac"])
def test_no_part_can_be_changed(part: str):
    verifier = Verifier(Secrets((NEW,)), SERVER)

    def other(match: re.Match[str]) -> str:
        return match[1] + ("1" if match[2] != "1" else "2")

    header = re.sub(rf"({part}=)(.)", other, ask().header)
    assert header != ask().header
    assert verifier.check(header, "PUT", PATH, NOW) == Refusal("unknown")
    assert verifier.check(ask().header, "DELETE", PATH, NOW) == Refusal("unknown")
    assert verifier.check(ask().header, "PUT", PATH + "2", NOW) == Refusal("unknown")
    assert check(verifier, ask()) != "unknown"


def test_clocks_may_differ_a_little():
    verifier = Verifier(Secrets((NEW,)), SERVER)
    for number, skew in enumerate((-SKEW_S, -1.0, 1.0, SKEW_S)):
        assert isinstance(check(verifier, ask(number, now=NOW + skew)), Signed)
    refusal = verifier.check(ask(9, now=NOW + SKEW_S + 5).header, "PUT", PATH, NOW)
    assert isinstance(refusal, Refusal)
    assert (refusal.why, refusal.secret, refusal.away_s) == ("time", NEW, SKEW_S + 5)


def test_no_nonce_is_forgotten_while_it_would_be_taken(monkeypatch: pytest.MonkeyPatch):
    """Also one of a clock that is ahead; and the memory is bounded."""
    monkeypatch.setattr(signing, "MAX_NONCES", 3)
    verifier = Verifier(Secrets((NEW,)), SERVER)
    ahead = ask(0, now=NOW + SKEW_S)
    assert isinstance(check(verifier, ahead), Signed)
    for number in (1, 2):
        assert isinstance(check(verifier, ask(number)), Signed)
    assert check(verifier, ask(3)) == "busy"
    for later in (0.0, SKEW_S, 2 * SKEW_S):
        assert check(verifier, ahead, NOW + later) == "replayed"
    later = NOW + 2 * SKEW_S + 1
    assert check(verifier, ahead, later) == "time"
    assert isinstance(check(verifier, ask(3, now=later), later), Signed)
    assert len(verifier._nonces) == len(verifier._order) == 1


def test_strangers_do_not_fill_the_memory():
    verifier = Verifier(Secrets((NEW,)), SERVER)
    for number in range(100):
        assert check(verifier, ask(number, secret=STRANGE)) == "unknown"
        assert check(verifier, ask(number, server="")) == "server"
    assert not verifier._nonces


def test_a_secret_is_exchanged_without_a_moment_in_which_members_refuse_each_other():
    """Old; old and new; new and old; new: neighbours of this row work together in both directions."""
    row = [Secrets((OLD,)), Secrets((OLD, NEW)), Secrets((NEW, OLD)), Secrets((NEW,))]
    number = 0
    for one, other in [(a, b) for a, b in pairwise(row)] + [(a, a) for a in row]:
        for speaks, listens in ((one, other), (other, one)):
            number += 1
            found = check(Verifier(listens, SERVER), ask(number, secret=speaks.first))
            assert isinstance(found, Signed)
            assert found.secret == speaks.first, "the answer is signed with what the member knows"
    assert check(Verifier(row[0], SERVER), ask(secret=NEW)) == "unknown"


def test_an_answer_is_to_this_request_and_of_a_gateway():
    question = ask()
    header = sign_answer(NEW, SERVER, question.nonce, 200, b"yes")
    reply = check_answer(question, header, 200, b"yes")
    assert reply is not None
    assert reply.server == SERVER
    assert check_answer(question, header, 201, b"yes") is None
    assert check_answer(question, header, 200, b"no") is None
    assert check_answer(ask(1), header, 200, b"yes") is None
    assert (
        check_answer(question, sign_answer(STRANGE, SERVER, question.nonce, 200, b"yes"), 200, b"yes") is None
    )
    assert check_answer(question, header.replace("ab", "cd", 1), 200, b"yes") is None
    for wrong in ("", "x", header[:-1]):
        assert check_answer(question, wrong, 200, b"yes") is None
