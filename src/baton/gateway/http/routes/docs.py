"""GET /openapi.json and /docs: what is served.  The page is our own and needs nothing from elsewhere."""

from __future__ import annotations

from functools import cache
from importlib.resources import files

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from baton.gateway.http.openapi import make_document
from baton.gateway.rendering.formats import encode

_PAGE_HEADERS = {
    # The page's own script and style, and the document of this server: nothing else is loaded.
    "content-security-policy": "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
}


def docs_routes(root_path: str) -> list[Route]:
    async def openapi(_: Request) -> Response:
        return Response(_document(root_path), media_type="application/json")

    async def docs(_: Request) -> Response:
        return Response(_page(), headers=_PAGE_HEADERS, media_type="text/html")

    return [Route("/openapi.json", openapi), Route("/docs", docs)]


@cache
def _document(root_path: str) -> bytes:
    """Made when it is first asked for: it takes some milliseconds."""
    servers = {"servers": [{"url": root_path}]} if root_path else {}
    return encode(make_document() | servers)


@cache
def _page() -> bytes:
    return files("baton.gateway").joinpath("pages/docs.html").read_bytes()
