"""GET /openapi.json and /docs: what is served.  The page is our own and needs nothing from elsewhere."""

from __future__ import annotations

from functools import cache
from importlib.resources import files

from fastapi import APIRouter, Request
from starlette.responses import Response

from baton.gateway.http.openapi import make_document
from baton.gateway.rendering.formats import encode

_PAGE_HEADERS = {
    # The page's own script and style, and the document of this server: nothing else is loaded.
    "content-security-policy": "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
}


def docs_routes() -> APIRouter:
    router = APIRouter()

    @router.get("/openapi.json")
    async def openapi() -> Response:
        return Response(_document(), media_type="application/json")

    @router.get("/docs")
    async def docs(request: Request) -> Response:
        return Response(_page(), headers=_PAGE_HEADERS, media_type="text/html")

    return router


@cache
def _document() -> bytes:
    """Made when it is first asked for: it takes some milliseconds."""
    return encode(make_document())


@cache
def _page() -> bytes:
    return files("baton.gateway").joinpath("pages/docs.html").read_bytes()
