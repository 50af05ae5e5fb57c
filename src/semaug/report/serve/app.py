"""The web application: one page, its training images from memory, and an answer to an image that is sent to it.

Nothing is read from or written to the disk for a request. The page may load nothing but its own styles, script and
data. A request must name the server as its user would: another web page that has its own name point at this address
(DNS rebinding), or sends to it from elsewhere, gets nothing.
"""

import ipaddress
import logging
import socket
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any
from urllib.parse import urlsplit

import anyio
import uvicorn
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route

from semaug.data.samples import FORMATS, image_in
from semaug.report.html import environment, policy_of, render_page
from semaug.report.serve.answers import REACH, STEP, Guide
from semaug.util.errors import SemaugError

MAX_BYTES = 25_000_000
MAX_PIXELS = 50_000_000  # decoded, that is 150 MB
SECONDS = 60  # that an upload may take
AT_ONCE = 16  # connections; each may hold an image of MAX_BYTES
FIXED_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-store",
}


def application(guide: Guide, title: str, host: str = "127.0.0.1") -> Starlette:
    """The application for a server that listens on `host`."""
    page = _page(guide, title)
    policy = f"{policy_of(page)}; frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
    one_at_a_time = anyio.CapacityLimiter(1)  # decoding and the network take memory and both cores

    async def show(request: Request) -> Response:
        return HTMLResponse(page, headers={"Content-Security-Policy": policy})

    async def training_image(request: Request) -> Response:
        try:
            content = guide.thumbnail(request.path_params["index"])
        except IndexError:
            return Response(status_code=404)
        return Response(content, media_type="image/jpeg", headers={"Cache-Control": "private, max-age=3600"})

    async def answer(request: Request) -> Response:
        try:
            with anyio.fail_after(SECONDS):
                content = await _received(request)
        except TimeoutError:
            return _refused(408, f"the image was not sent within {SECONDS} seconds")
        except ClientDisconnect:
            return _refused(400, "the image was not sent to its end")
        if content is None:
            return _refused(413, f"the file has more than {MAX_BYTES // 1_000_000} MB")
        try:
            found = await anyio.to_thread.run_sync(partial(_answered, guide, content), limiter=one_at_a_time)
        except SemaugError as error:
            return _refused(415, str(error))
        return JSONResponse(found)

    return Starlette(
        routes=[
            Route("/", show),
            Route("/training-image/{index:int}", training_image),
            Route("/answer", answer, methods=["POST"]),
        ],
        middleware=[Middleware(BaseHTTPMiddleware, dispatch=partial(_guarded, host))],
    )


def _page(guide: Guide, title: str) -> str:
    view = guide.view
    return render_page(
        environment("semaug.report.serve", "semaug.report.figures"),
        "serve.html",
        styles=("style.css", "serve.css"),
        script="serve.js",
        served=True,
        title=f"Try {title}",
        network=view.classifier.name,
        method=str(view.classifier.config.get("method", "not recorded")),
        classes=len(view.classes),
        images=len(guide.seen.names),
        strength=view.strength,
        notes=view.notes,
        formats=", ".join(FORMATS),
        megabytes=MAX_BYTES // 1_000_000,
        max_bytes=MAX_BYTES,
        reach=REACH,
        step=STEP,
    )


async def _received(request: Request) -> bytes | None:
    """The body of a request; None if it is too large, of which no more than the limit is read."""
    stated = request.headers.get("content-length", "0")
    if not stated.isdecimal() or int(stated) > MAX_BYTES:
        return None
    content = bytearray()
    async for part in request.stream():
        content += part
        if len(content) > MAX_BYTES:
            return None
    return bytes(content)


def _answered(guide: Guide, content: bytes) -> dict[str, Any]:
    return guide.answer(image_in(content, max_pixels=MAX_PIXELS))


def _refused(status: int, sentence: str) -> Response:
    return JSONResponse({"error": sentence}, status)


async def _guarded(host: str, request: Request, call_next: Callable[[Request], Awaitable[Response]]) -> Response:
    """Pass on what was sent to this server under its own name and from its own page; harden every response."""
    named = _name(f"//{request.headers.get('host', '')}")
    origin = request.headers.get("origin")
    if len(request.headers.getlist("host")) != 1 or not _is_ours(named, host):
        response = Response("this server is not known by that name\n", 421, media_type="text/plain")
    elif origin is not None and origin.partition("//")[2] != request.headers["host"]:
        response = Response("requests from other pages are refused\n", 403, media_type="text/plain")
    else:
        response = await call_next(request)
    for name, value in FIXED_HEADERS.items():
        response.headers.setdefault(name, value)
    return response


def _name(address: str) -> str | None:
    try:
        return urlsplit(address).hostname
    except ValueError:
        return None


def _is_ours(named: str | None, host: str) -> bool:
    """Whether a user would call the server so; rebinding needs a name, as an address in numbers cannot be rebound."""
    if named is None:
        return False
    if named in ("localhost", host):
        return True
    try:
        address = ipaddress.ip_address(named)
    except ValueError:
        return False
    return address.is_loopback or not is_loopback(host)


def is_loopback(host: str) -> bool:
    """Whether only programs of this machine can reach a server that listens there."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def listen(host: str, port: int) -> socket.socket:
    """A socket to serve on; port 0 takes a free one."""
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family)
    except (OSError, OverflowError) as error:
        raise SemaugError(
            f"cannot listen on {host}, port {port}: {getattr(error, 'strerror', None) or error}"
        ) from error


def address(listening: socket.socket) -> str:
    """Where the page is."""
    host, port = listening.getsockname()[:2]
    return f"http://[{host}]:{port}/" if ":" in host else f"http://{host}:{port}/"


def run(app: Starlette, listening: socket.socket) -> None:
    """Serve until a signal ends it."""
    config = uvicorn.Config(
        app,
        log_level="warning",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        lifespan="off",
        ws="none",
        limit_concurrency=AT_ONCE,
        timeout_graceful_shutdown=1,
    )
    server = uvicorn.Server(config)
    # requests that the end cuts off are no errors
    logging.getLogger("uvicorn.error").addFilter(lambda record: not server.should_exit)
    server.run(sockets=[listening])
