"""Call: one completion as a client sees it, streamed or not, on a thread of its own; it may be left at any time."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from dataclasses import dataclass, replace
from http.client import HTTPConnection, HTTPException
from typing import Any
from urllib.parse import urlsplit

PATIENCE_S = 150.0  # beyond the system's own deadline for a request: longer is a hang


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came. `status` 0: no answer. `code` of an error object, or of an error frame after the 200.

    `ended`: the answer is whole (a JSON body, or `[DONE]`); else the connection broke or was left.
    """

    status: int = 0
    text: str = ""
    finish: str | None = None
    code: str | None = None
    ended: bool = False
    refused: bool = False  # nobody listened
    over: bool = False  # nothing more will come
    retry_after: str | None = None
    trace: dict[str, Any] | None = None

    @property
    def right(self) -> bool:
        """It claims to be a good answer."""
        return self.ended and self.status == 200 and self.code is None


class Call:
    """Begins at once."""

    def __init__(self, url: str, body: dict[str, Any], route: str = "auto") -> None:
        address = urlsplit(url)
        self._connection = HTTPConnection(address.hostname or "", address.port or 80, timeout=PATIENCE_S)
        self._body = json.dumps(body).encode()
        self._headers = {"content-type": "application/json", "X-Crossfill-Route": route, "X-Crossfill-Trace": "1"}
        self._so_far = Outcome()
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    @property
    def so_far(self) -> Outcome:
        return self._so_far

    @property
    def running(self) -> bool:
        return self._thread.is_alive()

    def await_text(self, chars: int = 1) -> None:
        """Return once so much text has come; fails when the call ends before."""
        with self._changed:
            met = self._changed.wait_for(lambda: len(self._so_far.text) >= chars or self._so_far.over, PATIENCE_S)
        assert met, f"no text after {PATIENCE_S} s"
        assert len(self._so_far.text) >= chars, self._so_far

    def leave(self) -> None:
        """Close the connection: the client is gone."""
        sock = self._connection.sock
        if sock is not None:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def result(self) -> Outcome:
        self._thread.join(PATIENCE_S)
        assert not self.running, f"the call hangs: {self._so_far}"
        return self._so_far

    def _note(self, **fields: Any) -> None:
        with self._changed:
            self._so_far = replace(self._so_far, **fields)
            self._changed.notify_all()

    def _run(self) -> None:
        with contextlib.suppress(OSError, HTTPException, ValueError), contextlib.closing(self._connection):
            self._connect()
            self._connection.request("POST", "/v1/completions", self._body, self._headers)
            answer = self._connection.getresponse()
            self._note(status=answer.status, retry_after=answer.headers.get("retry-after"))
            if (answer.headers.get("content-type") or "").startswith("text/event-stream"):
                for line in answer:
                    self._frame(line.decode().strip())
            else:
                self._take(json.loads(answer.read()), ended=True)
        self._note(over=True)

    def _connect(self) -> None:
        try:
            self._connection.connect()
        except ConnectionRefusedError:
            self._note(refused=True)
            raise

    def _frame(self, line: str) -> None:
        if line == "data: [DONE]":
            self._note(ended=True)
        elif line.startswith("data: "):
            self._take(json.loads(line[6:]), ended=False)

    def _take(self, told: dict[str, Any], *, ended: bool) -> None:
        """An answer, a chunk of one, or an error object."""
        if error := told.get("error"):
            self._note(code=error["code"], ended=ended)
            return
        for choice in told["choices"]:
            text, finish = self._so_far.text + choice["text"], choice["finish_reason"] or self._so_far.finish
            self._note(text=text, finish=finish)
        self._note(ended=ended, trace=told.get("crossfill") or self._so_far.trace)
