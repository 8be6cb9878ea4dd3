"""A description that ends the helpers which compile it is refused, and known from then on."""

from __future__ import annotations

import asyncio
from typing import cast

import pytest

from baton.gateway.errors import BadRequest, InternalError
from baton.gateway.helpers.grammars import Grammars
from baton.gateway.helpers.pool import LOST, Helpers
from baton.gateway.reading.constraints.binding import Binding


class Dying:
    """Stands in for helpers whose library crashes."""

    def __init__(self, code: str) -> None:
        self.code, self.asked = code, 0

    async def answer(self, *_: object) -> bytes:
        self.asked += 1
        raise InternalError("it died, twice", code=self.code)


def test_it_costs_its_sender_a_helper_once() -> None:
    helpers = Dying(LOST)
    grammars = Grammars(cast(Helpers, helpers))
    for _ in range(3):
        with pytest.raises(BadRequest, match=r"^guided_json: compiling it ended the process") as caught:
            asyncio.run(grammars.of(Binding(b"x", "guided_json")))
        assert caught.value.code == "too_costly"
    assert helpers.asked == 1


def test_other_failures_are_not_the_descriptions_fault() -> None:
    helpers = Dying("helper_overdue")
    grammars = Grammars(cast(Helpers, helpers))
    for _ in range(2):
        with pytest.raises(InternalError):
            asyncio.run(grammars.of(Binding(b"x", "guided_json")))
    assert helpers.asked == 2
