"""Whatever arrives is a message or a `MalformedMessage`, never another exception."""

from __future__ import annotations

import random

import pytest

from baton.protocol.codec import Codec, MalformedMessage
from baton.protocol.messages.commands import COMMANDS, Abort, CommandBatch, Control
from baton.protocol.messages.reports import REPORTS, Closed, CloseReason, StepReport
from baton.protocol.messages.requests import FROM_ENGINE, TO_ENGINE, Finished, Hello, Outputs, Submit
from baton.protocol.params.sampling import LogitBias, Sampling, Stopping, TokenLogprobs

MESSAGES = [
    (
        TO_ENGINE,
        Submit(
            1, "name", b"\1\0\0\0", Sampling(1, logit_bias=LogitBias.of({1: 2.0})), Stopping(3), 0, "salt"
        ),
    ),
    (TO_ENGINE, Hello("gateway")),
    (
        REPORTS,
        StepReport(
            1, 2, closings=[Closed(1, 2, CloseReason.STOP, "x")], logprobs=[(0, TokenLogprobs(1, -1.0, 1))]
        ),
    ),
    (COMMANDS, CommandBatch(1, [Abort(1, 2), Control("pause")])),
    (FROM_ENGINE, Outputs(finished=[Finished(1, "stop", message="text")])),
]


def try_to_decode(codec: Codec, data: bytes) -> bool:
    """Whether it is malformed; any other exception is the test's failure."""
    try:
        codec.decode(data)
    except MalformedMessage:
        return True
    return False


@pytest.mark.parametrize("seed", range(5))
def test_a_changed_message_is_one_or_is_malformed(seed):
    rng = random.Random(seed)
    malformed = 0
    for _ in range(2000):
        codec, message = rng.choice(MESSAGES)
        data = bytearray(codec.encode(message))
        for _ in range(rng.randint(1, 4)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        malformed += try_to_decode(codec, bytes(data[: rng.randint(1, len(data))]))
    assert malformed > 1000


def test_a_string_that_is_no_utf8_is_malformed():
    data = TO_ENGINE.encode(Hello("abcd")).replace(b"abcd", b"\xc3\x28\xff\xff")
    with pytest.raises(MalformedMessage, match="utf-8"):
        TO_ENGINE.decode(data)


@pytest.mark.parametrize("codec", [TO_ENGINE, FROM_ENGINE, REPORTS, COMMANDS])
def test_nesting_without_end_is_malformed(codec):
    for head in (b"", b"\x92\xa5hello\xa1x", b"\x93\xa5hello\xa1x"):
        assert try_to_decode(codec, head + b"\x91" * 200_000)
