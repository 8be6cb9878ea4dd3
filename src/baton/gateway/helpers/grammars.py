"""Grammars of answers: made and tried in a helper, within its limits, and kept by what was asked for."""

from __future__ import annotations

import hashlib
from collections import OrderedDict

from baton.gateway.errors import BadRequest, InternalError
from baton.gateway.helpers.pool import LOST, Helpers
from baton.gateway.reading.constraints.binding import Binding
from baton.gateway.reading.reader import decode_grammar

_KEPT_BYTES = 16 << 20


class Grammars:
    """Belongs to one event loop.  What was refused is kept as well, so that it costs its sender a helper
    once."""

    def __init__(self, helpers: Helpers) -> None:
        self._helpers = helpers
        self._kept: OrderedDict[bytes, str | BadRequest] = OrderedDict()
        self._size = 0
        self.num_checked = 0
        """Descriptions that were not known."""

    async def of(self, binding: Binding) -> str:
        """ "": the answers are free.  Raises `BadRequest`, or what `Helpers.answer` does."""
        if binding.failure is not None:
            raise binding.failure.error()
        if not binding.asked:
            return ""
        key = hashlib.sha256(binding.asked).digest()
        found = self._kept.get(key)
        if found is None:
            self.num_checked += 1
            try:
                found = decode_grammar(await self._helpers.answer("structure", binding.asked))
            except BadRequest as error:
                found = error
            except InternalError as error:
                if error.code != LOST:
                    raise
                found = BadRequest(
                    f"{binding.field}: compiling it ended the process that did; give a simpler one",
                    param=binding.field,
                    code="too_costly",
                )
            self._keep(key, found)
        else:
            self._kept.move_to_end(key)
        if isinstance(found, BadRequest):
            raise BadRequest(found.message, param=found.param, code=found.code)
        return found

    def _keep(self, key: bytes, found: str | BadRequest) -> None:
        if key not in self._kept:
            self._size += _size_of(found)
        self._kept[key] = found
        while self._size > _KEPT_BYTES:
            _, old = self._kept.popitem(last=False)
            self._size -= _size_of(old)


def _size_of(found: str | BadRequest) -> int:
    return 200 + (len(found) if isinstance(found, str) else len(found.message))
