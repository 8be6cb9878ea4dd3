"""What an engine notes of a request whose gateway wants to know its way, and tells with the end."""

from __future__ import annotations

from baton.protocol.codec import pack_int32
from baton.protocol.messages.commands import Admit
from baton.protocol.messages.handover import Handoff, Refused, Reserve, Reserved, Taken
from baton.protocol.messages.reports import CloseReason
from baton.protocol.notes import MEANING, Note, described
from tests.engine.peerscript import PeerScript


def told(engine: PeerScript, id: int) -> list[Note]:
    (found,) = [finished.notes for finished in engine.finished if finished.id == id]
    assert [note.at for note in found] == sorted(note.at for note in found)
    assert {note.what for note in found} <= set(MEANING)
    return found


def kinds(notes: list[Note]) -> list[str]:
    return [note.what for note in notes]


def admitted(engine: PeerScript) -> Admit:
    return next(command for command in engine.orders() if isinstance(command, Admit))


def test_p_tells_of_refusals_the_prefill_and_the_hand_over():
    p = PeerScript()
    p.submit(1, "d1", "d2", noted=True)
    p.hear("d1", Refused(1, 1, "never_fits", ""))
    p.wait(0.25)
    p.hear("d2", Reserved(1, 2, 0))
    admit = admitted(p)
    p.prefilled(admit, 4)
    p.wait(0.5)
    p.first_token(admit)
    reserves = [message for _, message in p.take() if isinstance(message, Reserve | Handoff)]
    assert [message.noted for message in reserves if isinstance(message, Reserve)] == [True, True]
    p.hear("d2", Taken(1, 2))
    notes = told(p, 1)
    expected = [
        "arrived",
        "asks",
        "no_room",
        "asks",
        "room",
        "admitted",
        "chunk",
        "prefilled",
        "handed",
        "taken",
    ]
    assert kinds(notes) == [*expected, "ended"]
    assert described(notes[2]) == {"attempt": 1, "why": "never_fits"}
    assert described(notes[6]) == {"tokens": 4, "computed_tokens": 4, "slot": admit.slot}
    assert described(notes[7]) == {"tokens": 6, "slot": admit.slot}
    counts = {"generated_tokens": 1, "preemptions": 0, "accepted_drafts": 0}
    assert described(notes[-1]) == {**counts, "reason": "handed_over"}
    assert notes[5].at - notes[0].at == 0.25
    assert notes[7].at - notes[6].at == 0.5


def test_d_tells_of_what_it_fetched_and_nothing_where_nobody_asked():
    for noted in (True, False):
        d = PeerScript()
        d.ask(noted=noted)
        d.take()
        d.hear("p", Handoff(1, 1, 0, pack_int32([4, 5, 6]), pack_int32([7]), [], 0, 0.5))
        (fetch,) = d.orders()
        d.fetched(fetch.id, num_bytes=300, seconds=0.002, transport="tcp")
        admit = admitted(d)
        d.close(admit, CloseReason.STOP)
        notes = told(d, d.finished[0].id)
        if not noted:
            assert notes == []
            continue
        assert kinds(notes) == ["reserved", "received", "fetched", "admitted", "ended"]
        assert described(notes[2]) == {"bytes": 300, "microseconds": 2000, "rank": 0, "transport": "tcp"}
        assert described(notes[3]) == {"slot": admit.slot, "computed_tokens": 10, "tokens": 11}


def test_a_request_that_stays_says_why():
    p = PeerScript()
    p.submit(1, "d", noted=True)
    p.hear("d", Refused(1, 1, "never_fits", ""))
    admit = admitted(p)
    p.first_token(admit, reason=CloseReason.STOP)
    notes = told(p, 1)
    assert kinds(notes) == ["arrived", "asks", "no_room", "stays", "admitted", "prefilled", "ended"]
    assert notes[3].text == "refused"
