"""Call: tool calls in the text of a model, told while they are being written.

Three ways of writing them: between `<tool_call>` tags (Hermes, Qwen), as bare JSON objects in front of everything
else (Llama, Mistral; also what a grammar forces), or the arguments alone where the tool is given. Arguments are
passed on as the model wrote them. Rule: text that turns out to be no call is content; nothing is lost.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Callable, Collection

from pipeline.api.delta import CallArguments, CallBegin, Content, Delta, overlap

_HEADER = re.compile(r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')


def new_id() -> str:
    return f"call_{uuid.uuid4().hex[:24]}"


class Extent:
    """Where a JSON object or array that starts at the first brace ends; strings may hold braces."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = False
        self._escaped = False

    def take(self, text: str) -> int | None:
        """Characters of `text` up to and with the last brace; None while the value goes on."""
        for at, character in enumerate(text):
            if self._in_string:
                self._in_string = self._escaped or character != '"'
                self._escaped = character == "\\" and not self._escaped
            elif character == '"':
                self._in_string = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
                if self._depth <= 0:
                    return at + 1
        return None


class CallText:
    """One `{"name": ..., "arguments": {...}}` of a tool in `names`. `begun`: deltas of it were told."""

    def __init__(self, index: int, names: Collection[str], make_id: Callable[[], str]) -> None:
        self._index = index
        self._names = names
        self._make_id = make_id
        self._raw = ""
        self._whole = Extent()
        self._arguments: Extent | None = None  # of the arguments, once their start is known; None after their end too
        self.begun = False

    @property
    def raw(self) -> str:
        return self._raw

    def feed(self, text: str) -> tuple[list[Delta], str | None]:
        """Deltas, and the text behind the object once it has ended."""
        end = self._whole.take(text)
        own = text if end is None else text[:end]
        self._raw += own
        told = self._tell(own)
        if end is None:
            return told, None
        return [*told, *self.end()], text[end:]

    def end(self) -> list[Delta]:
        """No more text: the call as a whole, where it could not be told piece by piece; none if it is no call."""
        if self.begun:
            return []
        try:
            found = json.loads(self._raw)
            name, arguments = found["name"], found.get("arguments", found.get("parameters", {}))
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            return []
        if name not in self._names:
            return []
        text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        return [self._begin(name), CallArguments(self._index, text)]

    def _begin(self, name: str) -> CallBegin:
        self.begun = True
        return CallBegin(self._index, self._make_id(), name)

    def _tell(self, fresh: str) -> list[Delta]:
        if self._arguments is not None:
            return self._pass_on(fresh)
        header = None if self.begun else _HEADER.match(self._raw)
        if header is None or (name := json.loads(header[1], strict=False)) not in self._names:
            return []
        self._arguments = Extent()
        return [self._begin(name), *self._pass_on(self._raw[header.end() :])]

    def _pass_on(self, fresh: str) -> list[Delta]:
        assert self._arguments is not None
        if (end := self._arguments.take(fresh)) is not None:
            fresh, self._arguments = fresh[:end], None
        return [CallArguments(self._index, fresh)] if fresh else []


class _Calls:
    """What the readers of several calls share. `parallel` False: what follows the first call is dropped."""

    def __init__(self, names: Collection[str], *, parallel: bool, make_id: Callable[[], str] = new_id) -> None:
        self._names = names
        self._parallel = parallel
        self._make_id = make_id
        self._count = 0
        self._call: CallText | None = None

    def _open(self) -> CallText:
        self._call = CallText(self._count, self._names, self._make_id)
        return self._call

    @property
    def _full(self) -> bool:
        return self._count > 0 and not self._parallel


class TaggedCalls(_Calls):
    """`<tool_call>{...}</tool_call>`, any number, with content around them; blank space beside a call is dropped."""

    _OPEN, _CLOSE = "<tool_call>", "</tool_call>"

    def __init__(self, names: Collection[str], *, parallel: bool, make_id: Callable[[], str] = new_id) -> None:
        super().__init__(names, parallel=parallel, make_id=make_id)
        self._held = ""  # outside a call: what may become the tag, and blank space in front of it
        self._tail = ""  # inside: what may become the closing tag
        self._inner = ""  # all that stood inside
        self._gap = ""  # blank space in front of the opening tag
        self._ended = False  # the object inside is complete
        self._after = False  # nothing but blank space since the last call

    def feed(self, text: str) -> list[Delta]:
        told: list[Delta] = []
        rest: str | None = text
        while rest is not None and not self._full:
            step, rest = self._inside(rest) if self._call else self._outside(rest)
            told += step
        return told

    def end(self) -> list[Delta]:
        if self._full:
            return []
        if self._call is None:
            return self._content(self._held)
        return [*self._read(self._tail), *self._shut("")]

    def _outside(self, text: str) -> tuple[list[Delta], str | None]:
        before, tag, after = (self._held + text).partition(self._OPEN)
        if not tag:
            free = before[: len(before) - overlap(before, self._OPEN)].rstrip()
            self._held = before[len(free) :]
            return self._content(free), None
        self._held = self._tail = self._inner = ""
        self._ended = False
        self._open()
        free = before.rstrip()
        self._gap = before[len(free) :]
        return self._content(free), after

    def _content(self, text: str) -> list[Delta]:
        if self._after:
            text = text.lstrip()
            self._after = not text
        return [Content(text)] if text else []

    def _inside(self, text: str) -> tuple[list[Delta], str | None]:
        before, tag, after = (self._tail + text).partition(self._CLOSE)
        if not tag:
            free = before[: len(before) - overlap(before, self._CLOSE)]
            self._tail = before[len(free) :]
            return self._read(free), None
        return [*self._read(before), *self._shut(self._CLOSE)], after

    def _read(self, text: str) -> list[Delta]:
        assert self._call is not None
        self._inner += text
        if self._ended:
            return []
        told, rest = self._call.feed(text)
        self._ended = rest is not None
        return told

    def _shut(self, close: str) -> list[Delta]:
        """The tag is closed, or the text is over: a call, or text that only looked like one."""
        call, self._call = self._call, None
        assert call is not None
        told = call.end()
        if call.begun:
            self._count += 1
            self._after = True
            return told
        return self._content(f"{self._gap}{self._OPEN}{self._inner}{close}")


class BareCalls(_Calls):
    """JSON objects, alone, in a list or one after another, in front of everything else; other text is content."""

    _BETWEEN = "[],; \t\r\n"

    def __init__(self, names: Collection[str], *, parallel: bool, make_id: Callable[[], str] = new_id) -> None:
        super().__init__(names, parallel=parallel, make_id=make_id)
        self._lead = ""  # what stood between
        self._plain = False

    def feed(self, text: str) -> list[Delta]:
        told: list[Delta] = []
        rest: str | None = text
        while rest and not self._full:
            step, rest = self._step(rest)
            told += step
        return told

    def end(self) -> list[Delta]:
        if self._call is None:
            return [Content(self._lead)] if self._lead and not self._count else []
        told = self._call.end()
        return told if self._call.begun else self._give_up(self._call.raw)[0]

    def _step(self, text: str) -> tuple[list[Delta], str | None]:
        if self._plain:
            return [Content(text)], None
        if self._call is None:
            start = text.lstrip(self._BETWEEN)
            self._lead += text[: len(text) - len(start)]
            if not start:
                return [], None
            if not start.startswith("{"):
                return self._give_up(start)
            text = start
            self._open()
        assert self._call is not None
        told, rest = self._call.feed(text)
        if rest is None:
            return told, None
        call, self._call = self._call, None
        if not call.begun:
            return self._give_up(call.raw + rest)
        self._count += 1
        self._lead = ""
        return told, rest

    def _give_up(self, text: str) -> tuple[list[Delta], None]:
        """No call: from here on all is content, with what stood in front of it unless a call did."""
        self._plain = True
        lead, self._lead = "" if self._count else self._lead, ""
        return [Content(lead + text)], None


class GivenCall:
    """The whole text is the arguments of the one tool that was to be called."""

    def __init__(self, name: str, make_id: Callable[[], str] = new_id) -> None:
        self._begin: CallBegin | None = CallBegin(0, make_id(), name)

    def feed(self, text: str) -> list[Delta]:
        if not text:
            return []
        told: list[Delta] = [self._begin] if self._begin else []
        self._begin = None
        return [*told, CallArguments(0, text)]

    def end(self) -> list[Delta]:
        return []
