"""Checks paths in operators' requests: each must be below a directory that a flag of the server names."""

from __future__ import annotations

import os

from baton.gateway.errors import BadRequest, Forbidden

_MAX_PATH = 4096


def below(root: str | None, flag: str, field: str, value: str | None) -> str:
    """The real path of `value`, which may be relative to `root`, links resolved.  Looks at the file system.

    Raises `Forbidden` without a root, `BadRequest` for a path that is not below it.
    """
    if not value:
        raise BadRequest(f"{field}: it is missing; give a directory below the server's {flag}", param=field)
    if root is None:
        raise Forbidden(
            f"{field}: this server takes no directories from requests; start it with {flag} DIR, below which "
            "they lie",
            param=field,
            code="not_enabled",
        )
    if "\0" in value or len(value) > _MAX_PATH:
        raise BadRequest(
            f"{field}: {value[:200]!r} is no path of at most {_MAX_PATH} characters", param=field
        )
    path = os.path.realpath(os.path.join(root, value))
    if os.path.commonpath((root, path)) != root:
        raise BadRequest(f"{field}: {value[:200]!r} is not below the server's {flag}", param=field)
    return path
