"""Frame: one unit of the wire format, sans-I/O. `docs/wire-format.md` is the same thing for other implementers.

A transfer is OPEN, PAGE (in order), then COMMIT or ABORT. A frame is a small header, which travels in an ordered
stream, and for a page a payload, which travels beside it. Rules: (1) every size is checked before anything of that
size is allocated; (2) a reader's state moves only when a frame was accepted whole, so a payload may be fetched again;
(3) the payload digest covers the chain key, so a page of another prompt, or of another place in this one, is refused
although its own digest is right. Digests are xxh3: they find faults, they do not stop a forger with write access.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import numpy as np
import xxhash

from pipeline import codec as codecs
from pipeline import logprob
from pipeline.codec import Buffer
from pipeline.errors import EngineError, FrameError, PeerError
from pipeline.handoff import Attempts
from pipeline.header import MAX_BODY_BYTES, Header, Kind, decode, encode, require, require_identity, wrong
from pipeline.logprob import TokenLogprob
from pipeline.page import PAGE_TOKENS, Page, PageShape, is_finite, page_count, page_tokens, view
from pipeline.request import MAX_LOGPROBS

__all__ = ["AbortedError", "Commit", "Frame", "FrameReader", "FrameWriter", "Header", "Kind"]

LOSSLESS = codecs.understood("raw")
MAX_FIRST_TOKENS = 64
MAX_MESSAGE_CHARS = 500


class Frame(NamedTuple):
    """What goes out: `payload` is empty for all but PAGE and may alias the page's array."""

    header: bytes
    payload: Buffer


class Commit(NamedTuple):
    """The transfer is whole: how many pages it had, and P's first tokens for engines that need them.

    `first_logprobs` are theirs where the request asks for logprobs; all have the same number of alternatives.
    """

    pages: int
    first_tokens: tuple[int, ...] = ()
    first_logprobs: tuple[TokenLogprob, ...] = ()


class AbortedError(PeerError):
    """P ended the transfer on purpose: `peer_code` is the code of its error, `peer_message` the text."""

    code = "peer_aborted"

    def __init__(self, peer_code: str, peer_message: str) -> None:
        super().__init__(f"the prefill side ended the transfer: {peer_code}: {peer_message}")
        self.peer_code = peer_code
        self.peer_message = peer_message


def page_digest(key: bytes, tokens: int, data: Buffer) -> bytes:
    """xxh3_128 over chain key, token count (u16) and the unpacked page: 16 bytes, big-endian as xxHash prints."""
    digest = xxhash.xxh3_128(key + struct.pack("<H", tokens))
    digest.update(data)
    return digest.digest()


def transfer_digest(prompt_digest: bytes, digests: Sequence[bytes]) -> bytes:
    """What COMMIT carries: xxh3_128 over the prompt digest and the digests of all pages sent, in order."""
    return xxhash.xxh3_128(prompt_digest + b"".join(digests)).digest()


class FrameWriter:
    """P's half: turns one transfer into frames, in order. `page_keys` is the prefix chain of the whole prompt.

    Raises FrameError for an id or attempts that no frame can carry, ConfigError for an unknown codec.
    """

    def __init__(
        self,
        handoff_id: str,
        attempts: Attempts,
        shape: PageShape,
        page_keys: Sequence[bytes],
        prompt_digest: bytes,
        *,
        codec: str = "raw",
    ) -> None:
        require_identity(handoff_id, attempts)
        self.handoff_id = handoff_id
        self.attempts = attempts
        self.shape = shape
        self._keys = page_keys
        self._prompt_digest = prompt_digest
        self.choice = codecs.Choice(codec)
        self._digests: list[bytes] = []
        self._next_index: int | None = None
        self.sequence = 0  # of the next frame

    def open(self) -> Frame:
        return Frame(self._seal(Kind.OPEN, key=self._prompt_digest), b"")

    def page(self, page: Page) -> Frame:
        """Frame one page; the payload may alias its array, which must not change until it was sent.

        Raises EngineError when the engine's page is not canonical: shape, dtype, order, padding, NaN or Inf.
        """
        _require_canonical(page, self.shape)
        expected = page.index if self._next_index is None else self._next_index
        if page.index != expected or page.index >= len(self._keys):
            raise EngineError(f"page {page.index} of {len(self._keys)} is out of order: {expected} comes next")
        key = self._keys[page.index]
        raw = page.data.reshape(-1).view(np.uint8).data
        chosen, payload = self.choice.pack(raw, self.shape.head_dim)
        # of what the reader gets: a lossy codec changes the page here, once, and not on the way
        arrives = chosen.decode(payload, len(raw), self.shape.head_dim) if chosen.lossy else raw
        digest = page_digest(key, page.tokens, arrives)
        header = self._seal(
            Kind.PAGE,
            codec_id=chosen.id,
            index=page.index,
            tokens=page.tokens,
            raw_bytes=len(raw),
            payload_bytes=len(payload),
            key=key,
            digest=digest,
        )
        self._digests.append(digest)
        self._next_index = page.index + 1
        return Frame(header, payload)

    def commit(self, first_tokens: Sequence[int] = (), first_logprobs: Sequence[TokenLogprob] = ()) -> Frame:
        """End of the transfer. Raises FrameError above 64 first tokens, and where logprobs do not go with them."""
        require(len(first_tokens) <= MAX_FIRST_TOKENS, "number of first tokens", MAX_FIRST_TOKENS, len(first_tokens))
        entries = _entries(first_tokens, first_logprobs)
        header = self._seal(
            Kind.COMMIT,
            index=len(self._digests),
            tokens=entries,
            key=self._prompt_digest,
            digest=transfer_digest(self._prompt_digest, self._digests),
            body=struct.pack(f"<{len(first_tokens)}I", *first_tokens) + logprob.pack(first_logprobs),
        )
        return Frame(header, b"")

    def abort(self, code: str, message: str) -> Frame:
        """P gives up. `message` is cut to 500 characters."""
        body = json.dumps({"code": code[:64], "message": message[:MAX_MESSAGE_CHARS]}, ensure_ascii=False)
        return Frame(self._seal(Kind.ABORT, body=_cut(body.encode(errors="replace"), code)), b"")

    def _seal(self, kind: Kind, codec_id: int = 0, **fields: Any) -> bytes:
        header = Header(kind, codec_id, self.handoff_id, self.attempts, self.sequence, **fields)
        self.sequence += 1
        return encode(header)


class FrameReader:
    """D's half: accepts exactly one transfer of pages `first_page`.. of a prompt, and nothing else.

    `transfer_tokens` tokens of KV are wanted in all, the first `first_page` pages of them are already held; they may be
    packed by `codecs`.
    Per frame: `header(data)`, then by its kind `open`, `page`, `commit` or `abort`. Everything wrong is a FrameError.
    """

    def __init__(
        self,
        handoff_id: str,
        attempts: Attempts,
        shape: PageShape,
        page_keys: Sequence[bytes],
        prompt_digest: bytes,
        *,
        first_page: int,
        transfer_tokens: int,
        codecs: Collection[str] = LOSSLESS,
    ) -> None:
        require_identity(handoff_id, attempts)
        self.handoff_id = handoff_id
        self.attempts = attempts
        self.shape = shape
        self._page_bytes = shape.page_bytes
        self._keys = page_keys
        self._prompt_digest = prompt_digest
        self._transfer_tokens = transfer_tokens
        self._codecs = codecs
        self._pages = page_count(transfer_tokens)
        self._next_index = self._first_page = first_page
        self._digests: list[bytes] = []
        self._sequence = 0
        self._ended = False

    def header(self, data: bytes) -> Header:
        """`check` of what is decoded."""
        header = decode(data)
        self.check(header)
        return header

    def check(self, header: Header) -> None:
        """Everything that needs no payload. The state does not move: asking twice is harmless."""
        if self._ended:
            raise wrong("frame", "none after the last", header.kind.name)
        require(header.handoff_id == self.handoff_id, "handoff id", self.handoff_id, header.handoff_id)
        require(header.attempts == self.attempts, "attempts", self.attempts, header.attempts)
        self._require_place(header)
        self._CHECKS[header.kind](self, header)

    def open(self, header: Header) -> None:
        self._advance(header, Kind.OPEN)

    def page(self, header: Header, payload: Buffer) -> Page:
        """Verify and unpack; the page's array may alias `payload`. On FrameError the same page may be tried again."""
        require(len(payload) == header.payload_bytes, "size of payload", header.payload_bytes, len(payload))
        data = codecs.numbered(header.codec_id).decode(payload, header.raw_bytes, self.shape.head_dim)
        self._require_digest(header, data)
        found = Page(header.index, header.tokens, view(data, self.shape))
        fault = _fault(found)
        require(fault is None, "page", "finite values and zero padding", fault)
        self._advance(header, Kind.PAGE)
        self._digests.append(header.digest)
        self._next_index += 1
        return found

    def commit(self, header: Header) -> Commit:
        self._advance(header, Kind.COMMIT)
        self._ended = True
        first_tokens = struct.unpack_from(f"<{_first_tokens(header)}I", header.body)
        return Commit(header.index, first_tokens, _logprobs(header, first_tokens))

    def abort(self, header: Header) -> AbortedError:
        """What P said when it gave up, as an error for the caller to raise."""
        said = _abort_body(header.body)
        self._advance(header, Kind.ABORT)
        self._ended = True
        return said

    def _require_digest(self, header: Header, data: Buffer) -> None:
        got = page_digest(header.key, header.tokens, data)
        if got != header.digest:
            raise wrong("digest of payload", header.digest.hex(), got.hex())

    def _advance(self, header: Header, kind: Kind) -> None:
        if header.kind is not kind:
            raise wrong("kind", kind.name, header.kind.name)
        self._require_place(header)
        self._sequence = header.sequence + 1

    def _require_place(self, header: Header) -> None:
        """Gapless from OPEN on; only ABORT may come anywhere: P may have failed to send what lies between."""
        if header.kind is Kind.ABORT:
            require(header.sequence >= self._sequence, "sequence", f"{self._sequence}..", header.sequence)
            return
        require(header.sequence == self._sequence, "sequence", self._sequence, header.sequence)
        if (header.kind is Kind.OPEN) != (self._sequence == 0):
            raise wrong("first frame", "OPEN", header.kind.name)

    def _check_open(self, header: Header) -> None:
        self._require_whole(header, key=self._prompt_digest)

    def _check_page(self, header: Header) -> None:
        index, size = self._next_index, header.payload_bytes
        if not header.index == index < self._pages:
            raise wrong("page index", f"{index} of {self._pages}", header.index)
        require(0 < size <= self._page_bytes, "size of payload", "at most a page", size)
        if (name := codecs.numbered(header.codec_id).name) not in self._codecs:
            raise wrong("codec", f"one of {', '.join(self._codecs)}", name)
        self._require_whole(
            header,
            codec_id=header.codec_id,
            index=index,
            tokens=page_tokens(index, self._transfer_tokens),
            raw_bytes=self._page_bytes,
            payload_bytes=size,
            key=self._keys[index],
            digest=header.digest,
        )

    def _check_commit(self, header: Header) -> None:
        count = self._pages - self._first_page
        require(header.index == len(self._digests) == count, "number of pages", count, header.index)
        require(header.tokens <= MAX_LOGPROBS + 1, "logprobs of a token", f"at most {MAX_LOGPROBS + 1}", header.tokens)
        size = _first_token_bytes(header.tokens)
        require(len(header.body) % size == 0, "size of body", f"a multiple of {size}", len(header.body))
        require(_first_tokens(header) <= MAX_FIRST_TOKENS, "first tokens", MAX_FIRST_TOKENS, _first_tokens(header))
        require(bool(header.body) or not header.tokens, "logprobs", "none without first tokens", header.tokens)
        require(not _has_nan(_logprobs(header, range(_first_tokens(header)))), "logprobs", "numbers", "NaN")
        digest = transfer_digest(self._prompt_digest, self._digests)
        tokens, body = header.tokens, header.body
        self._require_whole(header, index=count, tokens=tokens, key=self._prompt_digest, digest=digest, body=body)

    def _check_abort(self, header: Header) -> None:
        _abort_body(header.body)
        self._require_whole(header, body=header.body)

    def _require_whole(self, header: Header, **fields: Any) -> None:
        """Nothing but `fields` is said; the others mean nothing for this kind and are zero: one encoding each."""
        head = (header.kind, fields.pop("codec_id", 0), self.handoff_id, self.attempts, header.sequence)
        expected = Header(*head, **fields)
        if header == expected:
            return
        for name, right, got in zip(Header._fields, expected, header, strict=True):
            if got != right:
                raise wrong(_WORDS.get((header.kind, name), name), _shown(right), _shown(got))

    _CHECKS = {
        Kind.OPEN: _check_open,
        Kind.PAGE: _check_page,
        Kind.COMMIT: _check_commit,
        Kind.ABORT: _check_abort,
    }


# What a field is called where it means more than its name says.
_WORDS = {
    (Kind.OPEN, "key"): "prompt digest",
    (Kind.PAGE, "tokens"): "tokens of page",
    (Kind.PAGE, "raw_bytes"): "page size",
    (Kind.PAGE, "key"): "chain key",
    (Kind.COMMIT, "key"): "prompt digest",
    (Kind.COMMIT, "digest"): "digest of transfer",
}


def _shown(value: object) -> object:
    return value.hex() if isinstance(value, bytes) else value


def _entries(first_tokens: Sequence[int], logprobs: Sequence[TokenLogprob]) -> int:
    """What COMMIT says of logprobs: 0 for none, else the token's own and the alternatives, counted together."""
    if not logprobs:
        return 0
    require([one.token_id for one in logprobs] == list(first_tokens), "logprobs", first_tokens, logprobs)
    entries = {1 + len(one.top) for one in logprobs}
    require(len(entries) == 1 and max(entries) <= MAX_LOGPROBS + 1, "logprobs of a token", "as many for each", entries)
    return entries.pop()


def _first_token_bytes(entries: int) -> int:
    return 8 * entries or 4  # id u32, and with logprobs its f32 and (u32, f32) for each alternative


def _first_tokens(header: Header) -> int:
    return len(header.body) // _first_token_bytes(header.tokens)


def _logprobs(header: Header, first_tokens: Sequence[int]) -> tuple[TokenLogprob, ...]:
    if not header.tokens:
        return ()
    return logprob.unpack(header.body[4 * len(first_tokens) :], first_tokens, header.tokens - 1)


def _has_nan(logprobs: Sequence[TokenLogprob]) -> bool:
    return any(math.isnan(value) for one in logprobs for value in (one.logprob, *(p for _, p in one.top)))


def _require_canonical(found: Page, shape: PageShape) -> None:
    data = found.data
    if data.shape != shape.array or data.dtype != np.dtype("<f2") or not data.flags.c_contiguous:
        raise EngineError(f"page {found.index} is {data.dtype}{data.shape}, not contiguous float16{shape.array}")
    if fault := _fault(found):
        raise EngineError(f"page {found.index}: {fault}")


def _fault(found: Page) -> str | None:
    if not 1 <= found.tokens <= PAGE_TOKENS:
        return f"{found.tokens} tokens"
    if not is_finite(found.data):
        return "NaN or Inf: the checkpoint overflows FP16"
    if found.tokens < PAGE_TOKENS and found.data[:, :, :, found.tokens :].any():
        return "padding behind the last token is not zero"
    return None


def _cut(body: bytes, code: str) -> bytes:
    """The escapes of hostile text may outgrow the body: then the code alone must do."""
    if len(body) <= MAX_BODY_BYTES:
        return body
    return json.dumps({"code": code[:64], "message": ""}).encode()


def _abort_body(body: bytes) -> AbortedError:
    try:
        said = json.loads(body)
        code, message = said["code"], said["message"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise FrameError(f"the body of an ABORT frame is not what it should be: {error}") from None
    require(isinstance(code, str) and isinstance(message, str), "body of ABORT", "two strings", "others")
    return AbortedError(code, message)
