"""Reports of the same rows, one after the other: looked up once, and never when that is no longer true."""

from baton.protocol.codec import pack_int32, unpack_int32, unpack_int64
from baton.protocol.messages.reports import Closed, CloseReason, StepReport
from baton.protocol.messages.requests import Cancel, Hello, Outputs
from baton.protocol.params.sampling import TokenLogprobs
from tests.engine.test_core import Script


class CountingSlots(list):
    """Counts how often somebody looks at one of them."""

    looks = 0

    def __getitem__(self, index):
        self.looks += 1
        return super().__getitem__(index)


def running(*gateways: bytes, **changes) -> tuple[Script, list[tuple[int, int]]]:
    """A request for each, all running: (slot, epoch)."""
    script = Script(**changes)
    for gateway in sorted({*gateways} - {b"g"}):
        script.tell(Hello(gateway.decode()), gateway)
    admits = [
        script.submit(number, (number, 2, 3), 14, gateway)[0] for number, gateway in enumerate(gateways)
    ]
    script.take()
    return script, [(admit.slot, admit.epoch) for admit in admits]


def got(script: Script) -> dict[bytes, list[tuple[int, int]]]:
    """By gateway, (id, token) of what was sent since the last time."""
    found: dict[bytes, list[tuple[int, int]]] = {}
    for gateway, message in script.outputs:
        if isinstance(message, Outputs):
            pairs = zip(unpack_int64(message.ids), unpack_int32(message.tokens), strict=True)
            found.setdefault(gateway, []).extend(pairs)
    script.outputs.clear()
    return found


def test_rows_are_looked_up_once_for_all_reports_that_have_the_same():
    script, (a, b, c) = running(b"g", b"g", b"g")
    slots = script.core.scheduler.slots = CountingSlots(script.core.scheduler.slots)
    for token in range(10):
        script.tokens((*a, token), (*b, 50 + token), (*c, 99))
    assert slots.looks == 3
    assert got(script) == {b"g": [pair for t in range(10) for pair in ((0, t), (1, 50 + t), (2, 99))]}
    slots.looks = 0
    script.tokens((*a, 1), (*c, 2))
    script.tokens((*a, 3), (*c, 4))
    assert slots.looks == 2
    assert got(script) == {b"g": [(0, 1), (2, 2), (0, 3), (2, 4)]}


def test_each_gateway_gets_its_own_rows_in_their_order():
    script, (a, b, c) = running(b"g", b"h", b"g")
    probability = TokenLogprobs(9, -0.5, 1)
    for token in (10, 20):
        script.tokens(
            (*a, token), (*b, token + 1), (*c, token + 2), logprobs=[(1, probability), (2, probability)]
        )
        messages = dict(script.outputs)
        assert got(script) == {b"g": [(0, token), (2, token + 2)], b"h": [(1, token + 1)]}
        assert messages[b"g"].logprobs == [(1, probability)]
        assert messages[b"h"].logprobs == [(0, probability)]


def test_logprobs_of_several_reports_of_a_turn_count_on():
    script, (a, b) = running(b"g", b"g")
    probability = TokenLogprobs(9, -0.5, 1)
    columns = [pack_int32(column) for column in zip(a, b, strict=True)]
    for step in (1, 2):
        report = StepReport(step, 0, *columns, pack_int32([step, step]), logprobs=[(1, probability)])
        script.core.on_report(0, report, 0.0)
    script.flush()
    (message,) = script.take()
    assert message.logprobs == [(1, probability), (3, probability)]


def test_a_cancelled_request_is_told_nothing_more_though_its_row_comes_again():
    script, (a, b) = running(b"g", b"h")
    script.tokens((*a, 1), (*b, 2))
    script.tell(Cancel(1), b"h")
    script.take()
    script.tokens((*a, 3), (*b, 4))
    assert got(script) == {b"g": [(0, 3)]}
    assert script.core.stats(0.0)["violations"] == 0


def test_the_rows_of_a_lost_gateway_go_nowhere():
    script, (a, b) = running(b"g", b"h")
    script.tokens((*a, 1), (*b, 2))
    script.core.gateway_lost(b"h")
    script.take()
    script.tokens((*a, 3), (*b, 4))
    assert got(script) == {b"g": [(0, 3)]}


def test_a_row_that_comes_again_after_its_closing_is_a_violation():
    script, (a, b) = running(b"g", b"g")
    script.tokens((*a, 1), (*b, 2), closings=[Closed(*b, CloseReason.STOP)])
    script.take()
    for _ in range(2):
        script.tokens((*a, 3), (*b, 4))
    assert got(script) == {b"g": [(0, 3), (0, 3)]}
    assert script.core.stats(0.0)["violations"] == 2


def test_an_epoch_that_begins_on_the_slot_of_another_is_not_taken_for_it():
    script, (a,) = running(b"g")
    script.tokens((*a, 1), closings=[Closed(*a, CloseReason.STOP)])
    (admit,) = script.submit(7)
    script.take()
    assert admit.slot == a[0]
    script.tokens((*a, 2))
    assert got(script) == {}
    script.tokens((admit.slot, admit.epoch, 3))
    assert got(script) == {b"g": [(7, 3)]}


def test_what_is_not_open_is_dropped_and_the_rest_keeps_its_logprobs():
    script, (a, b) = running(b"g", b"g")
    first, second = TokenLogprobs(1, -0.1, 1), TokenLogprobs(2, -0.2, 1)
    script.tokens((*a, 1), (3, 9, 5), (*b, 2), logprobs=[(0, first), (1, first), (2, second)])
    (message,) = script.take()
    assert list(unpack_int32(message.tokens)) == [1, 2]
    assert message.logprobs == [(0, first), (1, second)]


def test_rows_that_come_again_with_another_number_of_tokens_cannot_be_read():
    script, (a, b) = running(b"g", b"g")
    script.tokens((*a, 1), (*b, 2))
    columns = [pack_int32(column) for column in zip(a, b, strict=True)]
    script.report(StepReport(2, 0, *columns, tokens=pack_int32([1, 2, 3])))
    assert script.core.failure is not None
    assert "aligned arrays of 2, 2 and 3 entries" in script.core.failure


def test_an_instance_that_rests_keeps_no_request_alive():
    script, (a,) = running(b"g")
    script.tokens((*a, 1))
    script.tokens((*a, 2), closings=[Closed(*a, CloseReason.STOP)])
    assert script.core._machinery.steps._rows is None
