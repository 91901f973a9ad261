"""A headless Chromium for tests, driven through its DevTools protocol with the standard library only."""

from __future__ import annotations

import base64
import json
import os
import shutil
import socket
import struct
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update", "--disable-dev-shm-usage", "--hide-scrollbars",
    "--remote-debugging-port=0",
)  # fmt: skip


def find_browser() -> str | None:
    """The path of a browser that :func:`page` can drive, or None."""
    return next((found for name in NAMES if (found := shutil.which(name))), None)


class _WebSocket:
    """Just enough of RFC 6455: text messages both ways, client side, no extensions."""

    def __init__(self, url: str, timeout: float):
        place = urlparse(url)
        assert place.hostname is not None and place.port is not None
        self._socket = socket.create_connection((place.hostname, place.port), timeout)
        key = base64.b64encode(os.urandom(16)).decode()
        self._socket.sendall(
            f"GET {place.path} HTTP/1.1\r\nHost: {place.hostname}:{place.port}\r\nUpgrade: websocket\r\n"
            f"Connection: Upgrade\r\nSec-WebSocket-Key: {key}\r\nSec-WebSocket-Version: 13\r\n\r\n".encode()
        )
        self._buffer = b""
        while b"\r\n\r\n" not in self._buffer:
            self._fill()
        head, _, self._buffer = self._buffer.partition(b"\r\n\r\n")
        if b" 101 " not in head.split(b"\r\n")[0]:
            raise ConnectionError(head.decode(errors="replace"))

    def _fill(self) -> None:
        received = self._socket.recv(1 << 16)
        if not received:
            raise ConnectionError("the browser closed the connection")
        self._buffer += received

    def _take(self, count: int) -> bytes:
        while len(self._buffer) < count:
            self._fill()
        taken, self._buffer = self._buffer[:count], self._buffer[count:]
        return taken

    def send(self, text: str) -> None:
        payload, mask = text.encode(), os.urandom(4)
        length = len(payload)
        if length < 126:
            head = struct.pack("!BB", 0x81, 0x80 | length)
        elif length < 1 << 16:
            head = struct.pack("!BBH", 0x81, 0x80 | 126, length)
        else:
            head = struct.pack("!BBQ", 0x81, 0x80 | 127, length)
        self._socket.sendall(head + mask + bytes(byte ^ mask[at % 4] for at, byte in enumerate(payload)))

    def receive(self) -> str:
        message = b""
        while True:
            first, second = self._take(2)
            length = second & 0x7F
            if length == 126:
                (length,) = struct.unpack("!H", self._take(2))
            elif length == 127:
                (length,) = struct.unpack("!Q", self._take(8))
            payload = self._take(length)
            if first & 0x0F in (0, 1):
                message += payload
                if first & 0x80:
                    return message.decode()
            elif first & 0x0F == 8:
                raise ConnectionError("the browser closed the connection")

    def close(self) -> None:
        self._socket.close()


class Page:
    """One tab. ``problems`` are its console errors and uncaught exceptions, ``requests`` the addresses it asked for."""

    def __init__(self, socket: _WebSocket, session: str):
        self._socket, self._session, self._last = socket, session, 0
        self.problems: list[str] = []
        self.requests: list[str] = []
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable")

    def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Call a method of the protocol and return its result."""
        self._last += 1
        self._socket.send(
            json.dumps({"id": self._last, "method": method, "params": parameters, "sessionId": self._session})
        )
        while True:
            message = json.loads(self._socket.receive())
            if message.get("id") == self._last:
                if "error" in message:
                    raise RuntimeError(f"{method}: {message['error']}")
                return message["result"]
            self._note(message)

    def _note(self, message: dict[str, Any]) -> None:
        method, what = message.get("method"), message.get("params", {})
        if method == "Runtime.exceptionThrown":
            self.problems.append(json.dumps(what["exceptionDetails"].get("exception", what))[:500])
        elif method == "Runtime.consoleAPICalled" and what["type"] in ("error", "warning", "assert"):
            self.problems.append(json.dumps(what["args"])[:500])
        elif method == "Log.entryAdded" and what["entry"]["level"] in ("error", "warning"):
            self.problems.append(what["entry"]["text"])
        elif method == "Network.requestWillBeSent":
            self.requests.append(what["request"]["url"])

    def run(self, script: str) -> Any:
        """The value of a JavaScript expression (awaited if it is a promise)."""
        answer = self.send("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(json.dumps(answer["exceptionDetails"])[:800])
        return answer["result"].get("value")

    def size(self, width: int, height: int = 900) -> None:
        """Set the size of the window in CSS pixels."""
        self.send(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )

    def open(self, path: Path, timeout: float = 60) -> float:
        """Open a file and return the seconds until it is loaded and drawn."""
        start = time.monotonic()
        self.send("Page.navigate", url=path.resolve().as_uri())
        while self.run("document.readyState") != "complete":
            if time.monotonic() - start > timeout:
                raise TimeoutError(f"{path} did not load in {timeout} s")
            time.sleep(0.01)
        self.run("new Promise(done => requestAnimationFrame(() => setTimeout(done)))")
        return time.monotonic() - start

    def type(self, selector: str, text: str) -> None:
        """Put text into a field as a person would, and wait until the page has answered."""
        self.run(f"(() => {{ const f = document.querySelector({selector!r}); f.focus(); f.select(); }})()")
        if text:
            self.send("Input.insertText", text=text)
        else:
            for kind in ("keyDown", "keyUp"):
                self.send("Input.dispatchKeyEvent", type=kind, key="Delete", windowsVirtualKeyCode=46)
        self.run("new Promise(done => setTimeout(done, 250))")

    def screenshot(self, path: Path) -> None:
        """Write what the window shows as PNG."""
        path.write_bytes(base64.b64decode(self.send("Page.captureScreenshot", format="png")["data"]))


@contextmanager
def page(profile: Path, timeout: float = 60) -> Iterator[Page]:
    """A browser with one tab; ``profile`` is a new folder for its data. The browser has ended afterwards."""
    program = find_browser()
    assert program is not None
    process = subprocess.Popen(
        [program, *FLAGS, f"--user-data-dir={profile}", "about:blank"],
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    connection = None
    try:
        port_file, end = profile / "DevToolsActivePort", time.monotonic() + timeout
        while not port_file.is_file() or port_file.read_text().count("\n") < 1:
            if process.poll() is not None:
                raise RuntimeError(f"{program} ended with status {process.returncode}")
            if time.monotonic() > end:
                raise TimeoutError(f"{program} opened no port in {timeout} s")
            time.sleep(0.05)
        port, path = port_file.read_text().split("\n")[:2]
        connection = _WebSocket(f"ws://127.0.0.1:{port}{path}", timeout)
        yield Page(connection, _attach(connection))
    finally:
        if connection is not None:
            connection.close()
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _attach(connection: _WebSocket) -> str:
    """The session of a new tab."""

    def call(number: int, method: str, **parameters: Any) -> dict[str, Any]:
        connection.send(json.dumps({"id": number, "method": method, "params": parameters}))
        while True:
            message = json.loads(connection.receive())
            if message.get("id") == number:
                return message["result"]

    target = call(1, "Target.createTarget", url="about:blank")["targetId"]
    return call(2, "Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
