"""Chromium, driven by its DevTools protocol over a pipe: real clicks, keys and files, and the errors of the page."""

import base64
import contextlib
import fcntl
import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from html import unescape
from pathlib import Path
from types import TracebackType
from typing import Any, Self

CHROMIUM = shutil.which("chromium")
POLICY = re.compile(r'<meta http-equiv="Content-Security-Policy"[^>]*>')


def browse(page: Path, profile: Path, *options: str) -> tuple[str, str]:
    """Open a page in headless Chromium; returns its standard output and what the page wrote to the console."""
    command = [
        str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
        "--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage",
        f"--user-data-dir={profile}", "--enable-logging=stderr", "--v=0", *options, page.as_uri(),
    ]  # fmt: skip
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    return result.stdout, "\n".join(line for line in result.stderr.splitlines() if "CONSOLE" in line)


def title_of(html: str) -> str:
    """The title of a page, in which probes leave what they measured."""
    match = re.search(r"<title>(.*?)</title>", html, re.DOTALL)
    assert match is not None
    return unescape(match[1])


class Browser:
    """One tab. ``complaints``: errors, warnings, violations of a policy; ``requests``: all requested addresses."""

    def __init__(self, profile: Path, width: int = 1200, height: int = 1400, dark: bool = False) -> None:
        self.complaints: list[str] = []
        self.requests: list[str] = []
        theirs_in, ours_out = os.pipe()
        ours_in, theirs_out = os.pipe()
        # duplicate to high numbers first: Chromium uses 3 and 4, which may be among the four
        source, sink = (fcntl.fcntl(end, fcntl.F_DUPFD, 50) for end in (theirs_in, theirs_out))

        def take_descriptors() -> None:
            os.dup2(source, 3)
            os.dup2(sink, 4)

        command = [
            str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-sync",
            "--disable-background-networking", "--disable-component-update", "--disable-dev-shm-usage",
            "--remote-debugging-pipe", f"--user-data-dir={profile}", f"--window-size={width},{height}",
            *(["--blink-settings=preferredColorScheme=0"] if dark else []), "about:blank",
        ]  # fmt: skip
        self.process = subprocess.Popen(
            command, preexec_fn=take_descriptors, pass_fds=(3, 4), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        for end in (theirs_in, theirs_out, source, sink):
            os.close(end)
        self.out, self.into = os.fdopen(ours_out, "wb"), os.fdopen(ours_in, "rb")
        self.messages = self._messages()
        self.count = 0
        self.session: str | None = None
        [tab] = [t for t in self.call("Target.getTargets")["targetInfos"] if t["type"] == "page"][:1]
        self.session = self.call("Target.attachToTarget", targetId=tab["targetId"], flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network", "DOM"):
            self.call(f"{domain}.enable")

    def _messages(self) -> Iterator[dict[str, Any]]:
        left = b""
        while part := os.read(self.into.fileno(), 1 << 16):
            *whole, left = (left + part).split(b"\0")
            yield from map(json.loads, whole)

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send a command and wait for its result; events that arrive meanwhile are recorded."""
        self.count += 1
        message = {"id": self.count, "method": method, "params": parameters}
        if self.session is not None:
            message["sessionId"] = self.session
        self.out.write(json.dumps(message).encode() + b"\0")
        self.out.flush()
        for answer in self.messages:
            if answer.get("id") == self.count:
                assert "error" not in answer, answer
                return dict(answer["result"])
            self._note(answer)
        raise AssertionError("Chromium has ended")

    def _note(self, event: dict[str, Any]) -> None:
        method, details = event.get("method"), event.get("params", {})
        if method == "Runtime.exceptionThrown":
            self.complaints.append(str(details["exceptionDetails"]))
        elif method == "Log.entryAdded" and details["entry"]["level"] in ("error", "warning"):
            self.complaints.append(f"{details['entry']['text']} {details['entry'].get('url', '')}")
        elif method == "Runtime.consoleAPICalled" and details["type"] in ("error", "warning", "assert"):
            self.complaints.append(str(details["args"]))
        elif method == "Network.requestWillBeSent":
            self.requests.append(details["request"]["url"])

    def open(self, address: str) -> None:
        self.call("Page.navigate", url=address)
        self.wait("document.readyState === 'complete' && location.href !== 'about:blank'")

    def value(self, expression: str) -> Any:
        """Evaluate an expression in the page."""
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def wait(self, expression: str, seconds: float = 60) -> None:
        end = time.monotonic() + seconds
        while not self.value(expression):
            assert time.monotonic() < end, f"{expression} did not become true; {self.complaints}"
            time.sleep(0.05)

    def choose(self, selector: str, file: Path) -> None:
        """Choose a file in an input, as the dialog does."""
        root = self.call("DOM.getDocument")["root"]["nodeId"]
        node = self.call("DOM.querySelector", nodeId=root, selector=selector)["nodeId"]
        self.call("DOM.setFileInputFiles", files=[str(file)], nodeId=node)

    def drop(self, selector: str, file: Path) -> None:
        """Drag a file from outside of the browser onto an element."""
        box = self.value(f"(({{x, y, width, height}}) => [x + width / 2, y + height / 2])"
                         f"(document.querySelector('{selector}').getBoundingClientRect())")  # fmt: skip
        data = {"items": [], "files": [str(file)], "dragOperationsMask": 1}
        for kind in ("dragEnter", "dragOver", "drop"):
            self.call("Input.dispatchDragEvent", type=kind, x=box[0], y=box[1], data=data)

    def press(self, key: str, times: int = 1) -> None:
        """Press a key on the focused element."""
        codes = {"ArrowRight": 39, "ArrowLeft": 37, "End": 35, "Home": 36}
        for _ in range(times):
            for kind in ("rawKeyDown", "keyUp"):
                self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=codes[key])

    def screenshot(self, file: Path) -> None:
        taken = self.call("Page.captureScreenshot", captureBeyondViewport=True)
        file.write_bytes(base64.b64decode(taken["data"]))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.suppress(OSError):
            self.out.close()
        self.process.terminate()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.into.close()
