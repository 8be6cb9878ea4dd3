"""`/`: a page for people who open the server's address, and a 200 for probes and clients that try it."""

from __future__ import annotations

from functools import cache
from html import escape
from importlib.resources import files

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from baton.version import __version__

_HEADERS = {
    "content-security-policy": "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'",
    "vary": "accept",
}
_TEXT = f"Baton {__version__} is running; GET /docs has its routes, GET /ready says whether it can serve\n"


def front_routes(root_path: str) -> list[Route]:
    async def front(request: Request) -> Response:
        """Says nothing of the models or of clients: everybody may read it."""
        if "text/html" in request.headers.get("accept", ""):
            return Response(_page(root_path), headers=_HEADERS, media_type="text/html")
        return Response(_TEXT, headers={"vary": "accept"}, media_type="text/plain")

    return [Route("/", front)]


@cache
def _page(root_path: str) -> bytes:
    page = files("baton.gateway").joinpath("pages/front.html").read_text(encoding="utf-8")
    return page.replace("{version}", __version__).replace("{root}", escape(root_path)).encode()
