"""Capture: one handoff as a `.handoff` file, to be looked at, verified and decoded again. `docs/handoff-file.md`.

The file is a stream: a head, the transfer as our own frames (OPEN, PAGE.., COMMIT, or ABORT where pages are missing),
a digest over all of it. Rules: (1) a page comes out only after its frame was verified against the prompt's own
token ids; (2) every size is checked before anything of that size is read; (3) whatever is wrong is a CaptureError that
says where. This module reads and writes bytes; it knows neither files nor engines.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from pydantic import BaseModel, ConfigDict, ValidationError

from pipeline import header as headers
from pipeline import prefix
from pipeline.codec import Buffer
from pipeline.contract import WIRE_VERSION, Contract
from pipeline.errors import CaptureError, FrameError
from pipeline.frame import Frame, FrameReader, FrameWriter, page_digest
from pipeline.handoff import Attempts
from pipeline.header import MAX_HEADER_BYTES, Header, Kind
from pipeline.page import Page, page_count
from pipeline.request import Request

FILE_VERSION = 1
SUFFIX = ".handoff"
MAGIC = b"CFHANDOF"
MAX_HEAD_BYTES = 64 << 20  # token ids of a million-token prompt take 8 MB
MAX_PAGE_BYTES = 256 << 20  # of one page of any model there is

_FIXED = struct.Struct("<8sHHI")  # magic, file version, flags (zero), bytes of the head
_LENGTH = struct.Struct("<I")  # before every frame header; 0: no more frames
_DIGEST_BYTES = 32  # SHA-256 over everything before it
_ATTEMPTS = Attempts(1, 1)  # nothing is fenced in a file; the real ones are in the trace


@dataclass(frozen=True, slots=True)
class Capture:
    """The head: everything about a handoff but its pages.

    `pages` counts those in the file, the leading ones of the prompt; fewer than it has when the handoff failed before
    they were there. `tokens` are what D emitted, one list a sample, `finishes` how each ended. A redacted capture has
    no token ids, no salt and no pages: `prompt_tokens` and `page_digests` (hex, as in a page frame) stand for them.
    """

    request: Request
    contract: Contract
    engine: str  # D's
    tokens: tuple[tuple[int, ...], ...]
    finishes: tuple[str | None, ...]
    prompt_tokens: int
    pages: int
    logprobs: tuple[tuple[float, ...], ...] = ()  # of `tokens`, where the request asked for them
    held_pages: int = 0  # leading pages that D held before the handoff
    first_tokens: tuple[int, ...] = ()  # P's
    error: str | None = None
    redacted: bool = False
    page_digests: tuple[str, ...] = ()
    trace: dict[str, Any] = field(default_factory=dict)  # as in the API: route, marks, counts
    versions: dict[str, str] = field(default_factory=dict)

    @property
    def whole(self) -> bool:
        """Every page that the prompt needs is in the file."""
        return not self.redacted and self.pages == page_count(self.request.transfer_tokens)

    def addresses(self) -> tuple[list[bytes], bytes]:
        """Chain key of every page that was to be transferred, and the digest of the prompt."""
        start = prefix.seed(self.contract.digest, self.request.salt)
        keys = prefix.chain(start, self.request.token_ids[: self.request.transfer_tokens])
        return keys, prefix.prompt_digest(start, self.request.token_ids)


class _Head(BaseModel):
    """JSON of the head; the dataclasses inside are checked under the same configuration."""

    model_config = ConfigDict(extra="forbid", strict=True)
    capture: Capture


class Source(Protocol):
    """What a capture is read from: a binary file or any other stream. Less than asked for means: the end."""

    def read(self, size: int, /) -> bytes: ...


def redact(capture: Capture, pages: Iterable[Page]) -> Capture:
    """Without what tells the text. KV tells it too (a first layer's values name the token), so the pages go with it."""
    keys, _ = capture.addresses()
    digests = tuple(page_digest(keys[page.index], page.tokens, _bytes(page)).hex() for page in pages)
    request = replace(capture.request, token_ids=(), salt="")
    silent = replace(capture, request=request, tokens=tuple(() for _ in capture.tokens), first_tokens=(), logprobs=())
    return replace(silent, redacted=True, pages=0, page_digests=digests)


def encode(capture: Capture, pages: Iterable[Page] = (), *, codec: str = "raw") -> Iterator[Buffer]:
    """The file in pieces; a piece may alias a page. `pages` are the leading ones, as many as `capture.pages`.

    Raises CaptureError when they are not, EngineError for a page that is not canonical.
    """
    digest = hashlib.sha256()
    for piece in _pieces(capture, pages, codec):
        digest.update(piece)
        yield piece
    yield digest.digest()


def _pieces(capture: Capture, pages: Iterable[Page], codec: str) -> Iterator[Buffer]:
    head = _Head(capture=capture).model_dump_json().encode()
    if len(head) > MAX_HEAD_BYTES:
        raise CaptureError(f"the head would have {len(head)} bytes, more than {MAX_HEAD_BYTES}")
    yield _FIXED.pack(MAGIC, FILE_VERSION, 0, len(head)) + head
    if not capture.redacted:
        for frame in _frames(capture, pages, codec):
            yield _LENGTH.pack(len(frame.header)) + frame.header
            if len(frame.payload):
                yield frame.payload
    yield _LENGTH.pack(0)


def _frames(capture: Capture, pages: Iterable[Page], codec: str) -> Iterator[Frame]:
    keys, prompt_digest = capture.addresses()
    shape = capture.contract.page_shape
    writer = FrameWriter(capture.request.handoff_id, _ATTEMPTS, shape, keys, prompt_digest, codec=codec)
    yield writer.open()
    count = 0
    for count, page in enumerate(pages, 1):
        if page.index != count - 1:
            raise CaptureError(f"page {page.index} came where page {count - 1} must be stored")
        yield writer.page(page)
    if count != capture.pages:
        raise CaptureError(f"{count} pages came where {capture.pages} were announced")
    yield writer.commit() if capture.whole else writer.abort("incomplete", capture.error or "pages are missing")


class Reader:
    """One capture, read from front to back, once. Construct it for the head, then go through `pages`.

    Raises CaptureError from the constructor and from `pages`, which also checks the digest at the end.
    """

    def __init__(self, source: Source) -> None:
        self._source = source
        self._digest = hashlib.sha256()
        self._count = 0  # frames accepted so far
        self._pages = 0
        self._ended = False
        self.capture = self._head()

    def pages(self) -> Iterator[Page]:
        """Every page, verified, in order; then the end of the file is verified too."""
        if not self.capture.redacted:
            yield from self._transfer()
        elif self._length():
            raise CaptureError("a redacted capture holds no frames, this one does")
        self._end()

    def verify(self) -> Capture:
        """Read to the end, keeping nothing."""
        for _ in self.pages():
            pass
        return self.capture

    def _head(self) -> Capture:
        raw = self._source.read(_FIXED.size)
        if not raw.startswith(MAGIC[: len(raw)]) or not raw:
            raise CaptureError("this is no .handoff file: it does not begin as one")
        self._digest.update(_all(raw, _FIXED.size, "the first bytes"))
        _, version, flags, size = _FIXED.unpack(raw)
        if version > FILE_VERSION:
            raise CaptureError(f"a newer Crossfill wrote this (file version {version}, {FILE_VERSION} here): update it")
        if version < 1 or flags:
            raise CaptureError(f"the first bytes are damaged: file version {version}, flags {flags}")
        if size > MAX_HEAD_BYTES:
            raise CaptureError(f"the head claims {size} bytes: more than {MAX_HEAD_BYTES} are never written")
        return _parse(self._take(size, "the head"))

    def _transfer(self) -> Iterator[Page]:
        capture = self.capture
        keys, prompt_digest = capture.addresses()
        reader = FrameReader(
            capture.request.handoff_id,
            _ATTEMPTS,
            capture.contract.page_shape,
            keys,
            prompt_digest,
            first_page=0,
            transfer_tokens=capture.request.transfer_tokens,
        )
        while size := self._length():
            try:
                page = self._frame(reader, size)
            except FrameError as error:
                raise CaptureError(f"frame {self._count} ({self._place(capture)}): {error}") from error
            self._count += 1
            if page is not None:
                yield page
        if not self._ended or self._pages != capture.pages:
            raise CaptureError(f"the transfer ends early: {self._pages} of {capture.pages} pages are in it")

    def _frame(self, reader: FrameReader, size: int) -> Page | None:
        if size > MAX_HEADER_BYTES:
            raise FrameError(f"a header of {size} bytes: {MAX_HEADER_BYTES} is the most")
        header = reader.header(self._take(size, f"header of frame {self._count}"))
        if header.kind is Kind.PAGE:
            payload = self._take(header.payload_bytes, f"page {header.index}")
            page = reader.page(header, payload)
            self._pages += 1
            return page
        self._close(reader, header)
        return None

    def _close(self, reader: FrameReader, header: Header) -> None:
        """OPEN, COMMIT or ABORT."""
        if header.kind is Kind.OPEN:
            reader.open(header)
            return
        if header.kind is Kind.COMMIT:
            reader.commit(header)
        else:
            reader.abort(header)
        self._ended = True

    def _place(self, capture: Capture) -> str:
        at = self._count - 1
        return "OPEN" if at < 0 else f"page {at}" if at < capture.pages else "the end of the transfer"

    def _length(self) -> int:
        (size,) = _LENGTH.unpack(self._take(_LENGTH.size, f"frame {self._count}"))
        return int(size)

    def _take(self, size: int, what: str) -> bytes:
        data = _all(self._source.read(size) if size else b"", size, what)
        self._digest.update(data)
        return data

    def _end(self) -> None:
        stored = _all(self._source.read(_DIGEST_BYTES), _DIGEST_BYTES, "the digest at the end")
        if stored != self._digest.digest():
            raise CaptureError("the digest at the end is not that of the file: something in it was changed")
        if self._source.read(1):
            raise CaptureError("something follows the digest that ends the file")


def _all(data: bytes, size: int, what: str) -> bytes:
    if len(data) != size:
        raise CaptureError(f"the file is truncated: {what} should have {size} bytes and has {len(data)}")
    return data


def _parse(raw: bytes) -> Capture:
    """The head, with every number in it that sizes or addresses anything checked."""
    try:
        capture = _Head.model_validate_json(raw).capture
    except (ValidationError, RecursionError) as error:
        raise CaptureError(f"the head is not that of a capture: {_first(error)}") from None
    _require_shape(capture.contract)
    _require_prompt(capture)
    return capture


def _first(error: Exception) -> str:
    if not isinstance(error, ValidationError):
        return type(error).__name__
    item = error.errors(include_url=False)[0]
    return f"{'.'.join(map(str, item['loc']))}: {item['msg']}"


def _require_shape(contract: Contract) -> None:
    if contract.wire_version != WIRE_VERSION:
        raise CaptureError(f"its frames are of wire version {contract.wire_version}, {WIRE_VERSION} here")
    sizes = (contract.layers, contract.kv_heads, contract.head_dim)
    if min(sizes) < 1 or contract.page_shape.page_bytes > MAX_PAGE_BYTES:
        raise CaptureError(f"the contract's {sizes} layers, KV heads and head dimensions are no model's")


def _require_prompt(capture: Capture) -> None:
    request = capture.request
    try:
        headers.require_handoff_id(request.handoff_id)
    except FrameError as error:
        raise CaptureError(str(error)) from None
    if capture.redacted:
        if request.token_ids or capture.pages:
            raise CaptureError("a redacted capture holds no token ids and no pages, this one does")
        return
    vocabulary = capture.contract.vocab_size
    if not request.token_ids or not all(0 <= token < min(vocabulary, 1 << 32) for token in request.token_ids):
        raise CaptureError(f"the prompt is empty or holds token ids outside the vocabulary of {vocabulary}")
    if len(request.token_ids) != capture.prompt_tokens:
        raise CaptureError(f"{len(request.token_ids)} token ids where {capture.prompt_tokens} are announced")
    if not 0 <= capture.pages <= page_count(request.transfer_tokens):
        raise CaptureError(f"{capture.pages} pages are announced, the prompt has {page_count(request.transfer_tokens)}")


def _bytes(page: Page) -> memoryview:
    return memoryview(page.data.tobytes())
