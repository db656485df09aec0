"""Browser: a headless Chromium driven over its debugging pipe, for tests of pages. No driver, no client library.

Chrome DevTools Protocol over file descriptors 3 (to the browser) and 4 (from it): JSON messages, each ended by a zero
byte, as `--remote-debugging-pipe` defines it.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from io import BufferedReader, FileIO
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium-headless-shell", "chromium", "google-chrome", "chrome")
PATIENCE_S = 60.0
# Puts the pipes where the browser looks for them, by way of numbers that neither has yet, and becomes the browser.
_LAUNCH = """\
import fcntl, os, sys
high = [fcntl.fcntl(int(number), fcntl.F_DUPFD, 10) for number in sys.argv[1:3]]
for at, number in enumerate(high, start=3):
    os.dup2(number, at)
os.execv(sys.argv[3], sys.argv[3:])
"""


class Browser:
    """One page. `evaluate` returns plain values; errors of the page are collected in `errors`."""

    def __init__(self, to: FileIO, back: BufferedReader) -> None:
        self._to = to
        self._back = back
        self._buffer = b""
        self._last = 0
        self._session = ""
        self.errors: list[str] = []
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self._call(f"{domain}.enable")

    def open(self, url: str, *, dark: bool = False, width: int = 1280, height: int = 900) -> None:
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self._call("Emulation.setEmulatedMedia", features=scheme)
        self._call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        for each in ("about:blank", url):  # else an address that differs in its fragment only is not loaded again
            self._call("Page.navigate", url=each)
        self.wait("document.readyState === 'complete'")

    def evaluate(self, script: str) -> Any:
        """The value of a JavaScript expression. Raises AssertionError for an exception in it."""
        answer = self._call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def wait(self, condition: str) -> Any:
        """Until `condition` is true in the page; returns its value."""
        deadline = time.monotonic() + PATIENCE_S
        while not (value := self.evaluate(condition)):
            assert time.monotonic() < deadline, f"never true: {condition}; the page says {self.text()!r}"
            time.sleep(0.05)
        return value

    def text(self, selector: str = "body") -> str:
        return str(self.evaluate(f"(document.querySelector({json.dumps(selector)}) || {{}}).innerText || ''"))

    def screenshot(self, file: Path) -> None:
        answer = self._call("Page.captureScreenshot", format="png", captureBeyondViewport=False)
        file.write_bytes(base64.b64decode(answer["data"]))

    def close(self) -> None:
        self._session = ""
        with contextlib.suppress(OSError, EOFError):
            self._call("Browser.close")

    def _call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._last += 1
        message = {"id": self._last, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        self._to.write(json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self._last:
                assert "error" not in answer, (method, answer["error"])
                return dict(answer["result"])
            self._note(answer)

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            part = self._back.read1(1 << 16)
            if not part:
                raise EOFError("the browser ended")
            self._buffer += part
        message, _, self._buffer = self._buffer.partition(b"\0")
        return dict(json.loads(message))

    def _note(self, event: dict[str, Any]) -> None:
        if event.get("method") == "Runtime.exceptionThrown":
            self.errors.append(str(event["params"]["exceptionDetails"]))
        elif event.get("method") == "Log.entryAdded" and event["params"]["entry"]["level"] == "error":
            self.errors.append(event["params"]["entry"]["text"])


@contextlib.contextmanager
def browser(profile: Path) -> Iterator[Browser]:
    """A browser with a fresh profile; skips the test where none is installed."""
    binary = next((found for name in NAMES if (found := shutil.which(name))), None)
    if binary is None:
        pytest.skip("no Chromium is installed")
    theirs_in, ours_out = os.pipe()
    ours_in, theirs_out = os.pipe()
    with (profile.with_suffix(".log")).open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-c", _LAUNCH, str(theirs_in), str(theirs_out), *_command(binary, profile)],
            pass_fds=(theirs_in, theirs_out),
            stdout=log,
            stderr=log,
        )
    os.close(theirs_in)
    os.close(theirs_out)
    try:
        with os.fdopen(ours_out, "wb", buffering=0) as to, os.fdopen(ours_in, "rb") as back:
            opened = Browser(to, back)
            yield opened
            opened.close()
    finally:
        process.terminate()
        process.wait(PATIENCE_S)


def _command(binary: str, profile: Path) -> list[str]:
    return [
        binary,
        "--headless",
        "--no-sandbox",  # tests run as root in containers
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--no-first-run",
        "--no-proxy-server",
        "--hide-scrollbars",
        "--remote-debugging-pipe",
        f"--user-data-dir={profile}",
    ]
