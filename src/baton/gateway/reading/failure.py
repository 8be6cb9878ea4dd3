"""Why a body is refused, on its way between processes."""

from __future__ import annotations

import msgspec

from baton.gateway.errors import BadRequest
from baton.gateway.text.chat_template import ChatTemplateError


class Failure(msgspec.Struct, array_like=True, frozen=True):
    """A `BadRequest`."""

    message: str
    param: str | None
    code: str | None

    @classmethod
    def of(cls, error: BadRequest | ChatTemplateError) -> Failure:
        if isinstance(error, ChatTemplateError):
            return cls(str(error), error.param, None)
        return cls(error.message, error.param, error.code)

    def error(self) -> BadRequest:
        return BadRequest(self.message, param=self.param, code=self.code)
