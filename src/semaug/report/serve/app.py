"""The web application: one page, its training images from memory, answers about uploaded images, and an API.

A request neither reads from nor writes to the disk. The page may load only its own styles, script and data. A request
must address the server by a name that its user would use, and come from its own page or from a program, which names no
origin. This protects against web pages that point their own name at this address (DNS rebinding) or send requests from
elsewhere.

Clients that send slowly are disconnected. Images are decoded one at a time, in a process that is ended if it takes too
long: a few kilobytes can take minutes. Uploads beyond `UPLOADS` wait, unread, for their turn.
"""

import asyncio
import errno
import ipaddress
import logging
import re
import signal
import socket
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from types import FrameType
from typing import Any

import anyio
import anyio.to_process
import h11
import numpy as np
import numpy.typing as npt
import uvicorn
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route
from uvicorn.protocols.http.h11_impl import H11Protocol

from semaug import __version__
from semaug.data.images import Preprocessing
from semaug.data.samples import FORMATS, image_in
from semaug.inference.classifier import Classifier
from semaug.report.html import environment, policy_of, render_page
from semaug.report.serve import api
from semaug.report.serve.answers import REACH, STEP, Guide
from semaug.util.errors import DataError, SemaugError, SettingError
from semaug.util.signals import SIGNALS

MAX_BYTES = 25_000_000
MAX_PIXELS = 50_000_000  # 150 MB when decoded
SECONDS = 60  # time limit of an upload, and of a client that does not read its answer
SILENCE_SECONDS = 5  # time limit of each part of an upload, and of the headers of a request
DECODING_SECONDS = 20
UPLOADS = 16  # at a time; each may hold an image of MAX_BYTES
CONNECTIONS = 400  # at a time; more are refused
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Cache-Control": "no-store",
}


def application(guide: Guide | Classifier, title: str, host: str = "127.0.0.1") -> Starlette:
    """Build the web application of a server that listens on `host`; `title` names the model.

    With a classifier instead of a guide there is the API and no page.
    """
    classifier = guide.view.classifier if isinstance(guide, Guide) else guide
    description = api.openapi(title, MAX_BYTES)
    uploads = anyio.CapacityLimiter(UPLOADS)
    one_at_a_time = anyio.CapacityLimiter(1)  # decoding and the network need memory and all cores
    decode = partial(_decode, classifier.preprocessing)

    async def classify(
        images: Sequence[bytes], function: Callable[[npt.NDArray[np.uint8]], Any]
    ) -> list[Any | DataError]:
        """The results of a function for each image, or an error; all images share the time for decoding."""
        results, left = list[Any](), float(DECODING_SECONDS)
        for content in images:
            async with one_at_a_time:
                try:
                    await anyio.to_process.run_sync(
                        _start, cancellable=True
                    )  # may take seconds, on a busy machine more
                    end = anyio.current_time() + left
                    try:
                        with anyio.fail_after(left):
                            pixels = await anyio.to_process.run_sync(decode, content, cancellable=True)
                    finally:
                        left = end - anyio.current_time()
                    results.append(await anyio.to_thread.run_sync(function, pixels, abandon_on_cancel=True))
                except TimeoutError:
                    results.append(DataError(f"the image cannot be decoded within {DECODING_SECONDS} seconds"))
                except anyio.BrokenWorkerProcess:
                    results.append(DataError("the image cannot be decoded: its decoder has crashed"))
                except DataError as error:
                    results.append(error)
        return results

    def upload(respond: Callable[[Request, bytes], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
        """An endpoint that reads a body within the limits and responds to it."""

        async def endpoint(request: Request) -> Response:
            try:
                async with uploads:
                    with anyio.fail_after(SECONDS):
                        content = await _body(request)
                    if content is None:
                        return _refusal(413, f"the file has more than {MAX_BYTES // 1_000_000} MB")
                    return await respond(request, content)
            except TimeoutError:
                return _refusal(408, "the upload is too slow")
            except ClientDisconnect:
                return _refusal(400, "the upload was interrupted")
            except SemaugError as error:
                return _refusal(415, str(error))

        return endpoint

    async def predict(request: Request, content: bytes) -> Response:
        top = request.query_params.get("top", str(api.TOP))
        if not re.fullmatch("[1-9][0-9]{0,5}", top):
            return _refusal(400, "top must be a whole number from 1")
        try:
            images = api.images_in(content, request.headers.get("content-type", ""))
        except DataError as error:
            return _refusal(400, str(error))
        answers = await classify([image for _, image in images], partial(api.ranked, classifier, int(top)))
        results = [
            {"file": name, "predictions": [], "error": str(answer)}
            if isinstance(answer, DataError)
            else {"file": name, "predictions": answer, "error": None}
            for (name, _), answer in zip(images, answers, strict=True)
        ]
        return JSONResponse({"results": results}, 200 if any(result["predictions"] for result in results) else 415)

    about = {"model": title, "network": classifier.name, "classes": len(classifier.classes), "version": __version__}

    async def health(request: Request) -> Response:
        return JSONResponse({"status": "ok", **about})

    async def describe(request: Request) -> Response:
        return JSONResponse(description)

    api_page = _showing("api.html", title=f"API of {title}", classifier=classifier, api=description)
    routes = [
        Route("/predict", upload(predict), methods=["POST"]),
        Route("/health", health),
        Route("/openapi.json", describe),
        Route("/api", api_page),
    ]
    if not isinstance(guide, Guide):
        routes += [Route("/", api_page)]
    else:

        async def training_image(request: Request) -> Response:
            index = request.path_params["index"]
            try:
                content = guide.thumbnail(int(index) if re.fullmatch("[0-9]{1,9}", index) else -1)
            except IndexError:
                return Response(status_code=404)
            return Response(content, media_type="image/jpeg", headers={"Cache-Control": "private, max-age=3600"})

        async def answer(request: Request, content: bytes) -> Response:
            [result] = await classify([content], guide.answer)
            if isinstance(result, DataError):
                raise result
            return JSONResponse(result)

        page = _showing(
            "serve.html",
            script="serve.js",
            served=True,
            title=f"Try {title}",
            classifier=classifier,
            guide=guide,
            formats=", ".join(FORMATS),
            max_bytes=MAX_BYTES,
            reach=REACH,
            step=STEP,
        )
        routes += [
            Route("/", page),
            Route("/training-image/{index}", training_image),
            Route("/answer", upload(answer), methods=["POST"]),
        ]
    return Starlette(routes=routes, middleware=[Middleware(BaseHTTPMiddleware, dispatch=partial(_guard, host))])


def _showing(template: str, **content: Any) -> Callable[[Request], Awaitable[Response]]:
    """An endpoint that shows a page with its policy."""
    made = environment("semaug.report.serve", "semaug.report.figures")
    page = render_page(made, template, styles=("style.css", "serve.css"), **content)
    policy = f"{policy_of(page)}; frame-ancestors 'none'; base-uri 'none'; form-action 'none'"

    async def show(request: Request) -> Response:
        return HTMLResponse(page, headers={"Content-Security-Policy": policy})

    return show


async def _body(request: Request) -> bytes | None:
    """The body of a request; None if it is too large. No more than the limit is read."""
    stated = request.headers.get("content-length", "0")
    if not re.fullmatch("[0-9]{1,9}", stated) or int(stated) > MAX_BYTES:
        return None
    content, parts = bytearray(), request.stream()
    while True:
        with anyio.fail_after(SILENCE_SECONDS):
            part = await anext(parts, None)
        if part is None:
            return bytes(content)
        content += part
        if len(content) > MAX_BYTES:
            return None


def _start() -> None:
    """Do nothing; the call makes a worker process import the modules for decoding."""


def _decode(preprocessing: Preprocessing, content: bytes) -> npt.NDArray[np.uint8]:
    """The pixels of an image, for a worker process."""
    return preprocessing.pixels(image_in(content, max_pixels=MAX_PIXELS))


def _refusal(status: int, sentence: str) -> Response:
    return JSONResponse({"error": sentence}, status)


async def _guard(host: str, request: Request, call_next: Callable[[Request], Awaitable[Response]]) -> Response:
    """Refuse requests to other names and from other pages, and add the protective headers to every response."""
    origins, own = request.headers.getlist("origin"), request.headers.get("host", "").lower()
    if len(request.headers.getlist("host")) != 1 or not _is_own(request.headers["host"], host):
        response = Response("this server is not known by that name\n", 421, media_type="text/plain")
    elif any(origin.lower() not in (f"http://{own}", f"https://{own}") for origin in origins):
        response = Response("requests from other pages are refused\n", 403, media_type="text/plain")
    elif "content-length" in request.headers and "transfer-encoding" in request.headers:
        # a proxy may take the other length for that of the body, and the rest for another request
        response = Response("a body has one length\n", 400, {"Connection": "close"}, media_type="text/plain")
    else:
        response = await call_next(request)
    for name, value in _HEADERS.items():
        response.headers.setdefault(name, value)
    return response


def _is_own(header: str, host: str) -> bool:
    """Whether a Host header has a name of this server or an IP address; DNS rebinding needs another name."""
    match = re.fullmatch(r"(?:\[([0-9a-f:.]+)\]|([a-z0-9._-]+))(?::[0-9]{1,5})?", header.lower())
    name = "" if match is None else match[1] or match[2]
    if match is not None and name in ("localhost", host.lower()):
        return True
    try:
        return ipaddress.ip_address(name).is_loopback or not is_loopback(host)
    except ValueError:
        return False


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a server that listens on `host`."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def listen(host: str, port: int) -> socket.socket:
    """Open a socket for the server; port 0 takes a free one. A SettingError says why an address cannot be used."""
    if not host:  # which Python takes for all addresses
        raise SettingError("`host` is empty; leave it out to serve this machine, or write 0.0.0.0 to serve all")
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except (OSError, OverflowError, UnicodeError) as error:
        reason = str(getattr(error, "strerror", None) or error).partition(" (while")[0]
        setting = "port" if getattr(error, "errno", None) in (errno.EADDRINUSE, errno.EACCES) else "host"
        raise SettingError(f"cannot listen on {host}, port {port}: {reason}; choose another `{setting}`") from error


def address(listening: socket.socket) -> str:
    """The address of the page on a socket."""
    host, port = listening.getsockname()[:2]
    return f"http://[{host}]:{port}/" if ":" in host else f"http://{host}:{port}/"


class _Protocol(H11Protocol):
    """HTTP for clients that send each request's headers within `SILENCE_SECONDS`; uvicorn has no such limit.

    Clients may close their sending side after a whole request, where uvicorn would close the connection. Those that do
    not read are disconnected too, where uvicorn would wait forever. Beyond `CONNECTIONS`, only the additional
    connections are refused; uvicorn would refuse every request until enough have closed.
    """

    _timer: asyncio.TimerHandle | None = None
    _unread: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.limit_concurrency = 0 if len(self.connections) > CONNECTIONS else None  # 0 refuses every request
        self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def eof_received(self) -> bool:  # type: ignore[override]
        """Keep the connection open for the response, if one is due."""
        is_due = self.cycle is not None and not self.cycle.more_body and not self.cycle.response_complete
        if is_due:
            self.cycle.keep_alive = False
        return is_due

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._watch()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._unread = self.loop.call_later(SECONDS, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._unread is not None:
            self._unread.cancel()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._set_timer(None)

    def _watch(self) -> None:
        # One time limit for the headers of a request, and one for the rest of its body after the answer.
        if self.conn.our_state is not h11.DONE and self.conn.their_state is not h11.IDLE:
            self._set_timer(None)
        elif self._timer is None:
            self._set_timer(self.loop.call_later(SILENCE_SECONDS, self._close))

    def _close(self) -> None:
        self.transport.close()
        self.loop.call_later(SECONDS, self.transport.abort)  # closing waits until all is read

    def _set_timer(self, timer: asyncio.TimerHandle | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = timer


class _Server(uvicorn.Server):
    """A server that stops on a signal, unless the signal was ignored when the process started; uvicorn would stop."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._ignored = [number for number in SIGNALS if signal.getsignal(number) is signal.SIG_IGN]

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if sig not in self._ignored:
            super().handle_exit(sig, frame)


def run(app: Starlette, listening: socket.socket) -> None:
    """Serve an application on a socket until a signal ends it."""
    _server(app).run(sockets=[listening])


def _server(app: Starlette) -> _Server:
    config = uvicorn.Config(
        app,
        log_level="error",  # each refused connection is a warning
        access_log=False,
        server_header=False,
        proxy_headers=False,
        lifespan="off",
        ws="none",
        http=_Protocol,
        timeout_graceful_shutdown=0,  # whoever ends the server does not wait for answers
    )
    server = _Server(config)
    # requests that are cut off when the server ends are not errors
    logging.getLogger("uvicorn.error").addFilter(lambda record: not server.should_exit)
    return server
