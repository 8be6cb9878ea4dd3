"""Paths by which people ask for a route, besides its own.

They are read before anything looks at a path: what protects a route, counts it and names it in metrics sees
the route's own path.
"""

from __future__ import annotations

WITHOUT_V1 = ("chat/completions", "completions", "embeddings", "models", "responses", "messages")
"""Of clients whose base URL lacks `/v1`: these, and what is below them."""
_TWICE = "/v1/v1/"
"""Of clients that add `/v1` to a base URL that has it."""


def own_path(path: str, root_path: str = "") -> str:
    """The path under which a route is declared.  `root_path`: what a proxy may have left before it."""
    path = _tidied(path)
    if root_path and f"{path}/".startswith(f"{root_path}/"):
        path = _tidied(path.removeprefix(root_path))
    if path.startswith(_TWICE):
        return path[3:]
    return f"/v1{path}" if f"{path[1:]}/".startswith(_SHORT) else path


def _tidied(path: str) -> str:
    """With one slash before it and none behind: clients add a path to a base URL that ends with a slash."""
    path = path.rstrip("/") if path.endswith("/") else path
    return f"/{path.lstrip('/')}" if not path or path.startswith("//") else path


_SHORT = tuple(f"{one}/" for one in WITHOUT_V1)
