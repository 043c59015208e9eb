"""The page at `/`, its files, and the events that it shows.

Its files come with Quire, and load nothing from elsewhere. They have no figures: these come by `/v1/cache/live`, which
is the operator's. Without a browser `/` is JSON.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

from fastapi import APIRouter, Request
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response

from quire import __version__
from quire.serve.generation import Service
from quire.serve.keys import LIVE
from quire.serve.sse import EventStream

_FILES = Path(__file__).parent / "static"
_KINDS = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
_HEADERS = {
    "Content-Security-Policy": "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Cache-Control": "no-cache",
    "Referrer-Policy": "no-referrer",
    "Vary": "Accept",
    "X-Content-Type-Options": "nosniff",
}
_WEIGHT = re.compile(r"\bq=([01](\.\d*)?)")


@cache
def _files() -> dict[str, bytes]:
    """What is served, by its name; nothing else is, whatever is asked for."""
    return {path.name: path.read_bytes() for path in _FILES.iterdir() if path.suffix in _KINDS}


def _file(name: str) -> Response:
    if name not in _files():
        raise HTTPException(404)
    return Response(_files()[name], headers=_HEADERS, media_type=_KINDS[Path(name).suffix])


def prefers_page(accept: str) -> bool:
    """Whether a client that sends this header wants HTML rather than JSON. Only what it names counts."""
    weights = {"text/html": 0.0, "application/json": 0.0}
    for part in accept.lower().split(","):
        kind, _, rest = part.strip().partition(";")
        weight = _WEIGHT.search(rest)
        weights[kind.strip()] = float(weight[1]) if weight else 1.0
    return weights["text/html"] > weights["application/json"]


def page_router(service: Service) -> APIRouter:
    """The routes, for `service`."""
    router = APIRouter()
    facts = {"name": "quire", "version": __version__, "model": service.model_name, "documentation": "/openapi.json"}

    @router.get("/", response_model=None)
    async def root(request: Request) -> Response:
        """The server's name and version, and where its routes are described. For browsers: a page that shows what the
        cache does."""
        if prefers_page(request.headers.get("accept", "")):
            return _file("index.html")
        return JSONResponse(facts, headers={"Vary": "Accept"})

    @router.get("/static/{name}", response_model=None, include_in_schema=False)
    async def static(name: str) -> Response:
        return _file(name)

    @router.get(LIVE, response_model=None, include_in_schema=False)
    async def live() -> Response:
        """What the page shows, as events, until the client leaves: no document, as it has no end."""
        return EventStream(service.live.viewer(), on_close=lambda: None)

    return router
