"""Frames: mutations of valid frames, mostly with their checksums repaired, so that they reach the deep checks.

Everything comes from one seed. `Feeder.feed` gives one frame to a reader that is somewhere inside a transfer; what the
reader accepts goes to the judge, what it refuses must be a FrameError that left it where it was.
"""

from __future__ import annotations

import random
import struct
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import xxhash

from pipeline import prefix
from pipeline.errors import FrameError
from pipeline.frame import AbortedError, FrameReader, FrameWriter, Kind
from pipeline.handoff import Attempts
from pipeline.page import Page, PageShape, page_tokens
from tests.fuzz.judge import FIXED, Judge

SHAPE = PageShape(layers=1, kv_heads=1, head_dim=2)  # 512 bytes: the checks do not depend on it, the speed does
CONTRACT = "c" * 64
ID, OTHER_ID = "00112233445566778899aabbccddeeff", "ffeeddccbbaa99887766554433221100"
OURS = Attempts(prefill=3, decode=2)
PROMPT = tuple(range(100, 300))  # 199 tokens travel: four pages, the last with seven
EDGES = (0, 1, 2, 3, 4, 7, 63, 64, 65, 127, 128, 255, 256, 511, 512, 513, 0x7FFF, 0xFFFF)
WIDE = (*EDGES, 1 << 16, 1 << 31, (1 << 31) - 1, (1 << 32) - 1, 1 << 30)
# name, offset and struct format of every field of the fixed part
FIELDS = (
    ("magic", 0, "<I"), ("version", 4, "<H"), ("kind", 6, "B"), ("codec", 7, "B"), ("flags", 8, "<I"),
    ("prefill", 28, "<H"), ("decode", 30, "<H"), ("sequence", 32, "<I"), ("index", 36, "<I"), ("tokens", 40, "<H"),
    ("reserved", 42, "<H"), ("raw", 44, "<I"), ("payload", 48, "<I"), ("body", 52, "<I"),
)  # fmt: skip
_BITS = {"B": 8, "<H": 16, "<I": 32}


class Raw(NamedTuple):
    """A frame as bytes, whoever made it."""

    header: bytes
    payload: bytes


class Broken(AssertionError):
    """The reader let something through, or fell over something; `frame` shows it again."""

    def __init__(self, why: str, frame: Raw) -> None:
        super().__init__(f"{why}: header {frame.header.hex()} payload {frame.payload.hex()}")


def make_page(index: int, tokens: int, salt: int) -> Page:
    data = SHAPE.empty()
    valid = page_tokens(index, tokens)
    data[:, :, :, :valid] = (np.arange(4 * valid, dtype=np.float16) + 300 * index + salt).reshape(1, 2, 1, valid, 2)
    return Page(index, valid, data)


def transfer(codec: str, *, handoff: str = ID, attempts: Attempts = OURS, shift: int = 0) -> list[Raw]:
    """A whole valid transfer; `shift` makes it one of another prompt."""
    prompt = [token + shift for token in PROMPT]
    start = prefix.seed(CONTRACT, "")
    keys = prefix.chain(start, prompt[:-1])
    out = FrameWriter(handoff, attempts, SHAPE, keys, prefix.prompt_digest(start, prompt), codec=codec)
    made = [out.open(), *(out.page(make_page(i, len(prompt) - 1, shift)) for i in range(len(keys)))]
    made += [out.commit((17,)), out.abort("engine_failed", "out of memory")]
    return [Raw(bytes(frame.header), bytes(frame.payload)) for frame in made]


def seal(header: bytes) -> bytes:
    """The header with a right digest of its own."""
    return header[:-8] + struct.pack("<Q", xxhash.xxh3_64_intdigest(header[:-8]))


class Mutator:
    """One random change after another, each of a kind that a real fault or a hostile peer could bring."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        codecs = ("raw", "lz4")
        self.valid = {codec: transfer(codec) for codec in codecs}
        strange = [transfer(c, handoff=OTHER_ID) + transfer(c, attempts=Attempts(4, 2)) for c in codecs]
        strange += [transfer(c, shift=1) for c in codecs]
        self._strangers = [frame for frames in strange for frame in frames]
        self._kinds: tuple[Callable[[Raw], Raw], ...] = (
            self.bits, self.fields, self.fields, self.number, self.payload_bits, self.payload_repaired,
            self.payload_repaired, self.resized, self.splice, self.foreign, self.body, self.cut, self.claim,
        )  # fmt: skip

    def frame(self, near: int) -> tuple[str, Raw]:
        """A frame made from a valid one that belongs at place `near` or anywhere; one in 64 is left as it is."""
        rng = self._rng
        frames = self.valid["lz4" if rng.random() < 0.5 else "raw"]
        at = near if rng.random() < 0.7 else rng.randrange(len(frames))
        found = frames[min(at, len(frames) - 1)]
        if rng.random() < 1 / 64:
            return "valid", found
        mutate = rng.choice(self._kinds)
        found = mutate(found)
        if rng.random() < 0.2:
            found = rng.choice(self._kinds)(found)
        if len(found.header) >= 8 and rng.random() < 0.9:
            found = found._replace(header=seal(found.header))
        return mutate.__name__, found

    def bits(self, frame: Raw) -> Raw:
        return frame._replace(header=self._flipped(frame.header))

    def fields(self, frame: Raw) -> Raw:
        """One field gets a value from the edges of its range."""
        _, offset, form = self._rng.choice(FIELDS)
        value = self._rng.choice(WIDE) & ((1 << _BITS[form]) - 1)
        return frame._replace(header=_put(frame.header, offset, struct.pack(form, value)))

    def number(self, frame: Raw) -> Raw:
        """One field is off by one, or random."""
        _, offset, form = self._rng.choice(FIELDS)
        if len(frame.header) < FIXED:
            return frame
        (value,) = struct.unpack_from(form, frame.header, offset)
        value = self._rng.choice((value + 1, value - 1, self._rng.getrandbits(32))) & ((1 << _BITS[form]) - 1)
        return frame._replace(header=_put(frame.header, offset, struct.pack(form, value)))

    def payload_bits(self, frame: Raw) -> Raw:
        return frame._replace(payload=self._flipped(frame.payload))

    def payload_repaired(self, frame: Raw) -> Raw:
        """Other values under a digest that fits them: only NaN, Inf and padding give them away."""
        if len(frame.payload) != SHAPE.page_bytes or len(frame.header) < FIXED:
            return self.payload_bits(frame)
        half = struct.pack("<H", self._rng.choice((0x7C00, 0xFC00, 0x7E00, 0x0001, self._rng.getrandbits(16))))
        payload = _put(frame.payload, 2 * self._rng.randrange(256), half)
        digest = xxhash.xxh3_128(frame.header[56:88] + frame.header[40:42] + payload).digest()
        return Raw(_put(frame.header, 88, digest), payload)

    def resized(self, frame: Raw) -> Raw:
        """Longer or shorter, the header saying so."""
        rng = self._rng
        payload = frame.payload[: rng.randrange(len(frame.payload) + 1)] + rng.randbytes(rng.choice((0, 1, 7, 600)))
        return Raw(_put(frame.header, 48, struct.pack("<I", len(payload))), payload)

    def splice(self, frame: Raw) -> Raw:
        """Header of one, payload of another."""
        return frame._replace(payload=self._rng.choice(self._rng.choice(list(self.valid.values()))).payload)

    def foreign(self, frame: Raw) -> Raw:
        """A frame of another handoff, attempt or prompt; half the time under our id and sequence."""
        other = self._rng.choice(self._strangers)
        if self._rng.random() < 0.5 and len(frame.header) >= FIXED:
            other = other._replace(header=other.header[:12] + frame.header[12:36] + other.header[36:])
        return other

    def body(self, frame: Raw) -> Raw:
        """Another body, the header saying its size."""
        rng = self._rng
        told = rng.choice((b"{}", b"[1]", b'{"code":1,"message":2}', b"\xff" * 9, b"[" * 2000, rng.randbytes(12)))
        header = _put(frame.header[:FIXED], 52, struct.pack("<I", len(told)))
        return frame._replace(header=header + told + bytes(8))

    def cut(self, frame: Raw) -> Raw:
        return frame._replace(header=frame.header[: self._rng.randrange(len(frame.header) + 1)])

    def claim(self, frame: Raw) -> Raw:
        """A size that nobody should allocate."""
        rng = self._rng
        offset = rng.choice((44, 48, 52))
        return frame._replace(header=_put(frame.header, offset, struct.pack("<I", rng.choice((1 << 31, 0xFFFFFFFF)))))

    def _flipped(self, data: bytes) -> bytes:
        if not data:
            return data
        out = bytearray(data)
        for _ in range(self._rng.choice((1, 1, 1, 2, 8))):
            out[self._rng.randrange(len(out))] ^= 1 << self._rng.randrange(8)
        return bytes(out)


def _put(data: bytes, offset: int, value: bytes) -> bytes:
    return data[:offset] + value + data[offset + len(value) :] if len(data) >= offset + len(value) else data


class Feeder:
    """One reader after another, each taken through a transfer by whatever of the flood it accepts."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        self._mutator = Mutator(self._rng)
        start = prefix.seed(CONTRACT, "")
        self._keys = prefix.chain(start, PROMPT[:-1])
        self._digest = prefix.prompt_digest(start, PROMPT)
        self.fed: Counter[str] = Counter()  # mutation -> frames
        self.outcome: Counter[str] = Counter()  # refused, or the kind of what was accepted
        self._renew()

    def run(self, frames: int) -> None:
        """Raises Broken."""
        for _ in range(frames):
            name, frame = self._mutator.frame(self._place)
            self.fed[name] += 1
            self.outcome[self.feed(frame)] += 1
            self._left -= 1
            if not self._left:
                self._renew()

    def feed(self, frame: Raw) -> str:
        """What came of one frame. Raises Broken."""
        try:
            header = self._reader.header(frame.header)
            if header.kind is Kind.PAGE:
                page = self._reader.page(header, frame.payload)
                return self._judged(frame, self._judge.page(*frame, page.index, page.data.tobytes()), "page")
            if header.kind is Kind.COMMIT:
                commit = self._reader.commit(header)
                return self._judged(frame, self._judge.commit(frame.header, *commit), "commit")
            if header.kind is Kind.ABORT:
                raise self._reader.abort(header)
            self._reader.open(header)
        except FrameError:
            return "refused"
        except AbortedError:
            self._renew()
            return "abort"
        except Exception as error:
            raise Broken(f"{type(error).__name__}: {error}", frame) from error
        self._place += 1
        return "open"

    def _judged(self, frame: Raw, wrong: str | None, kind: str) -> str:
        if wrong:
            raise Broken(f"a {kind} came out that is {wrong}", frame)
        self._place += 1
        if kind == "commit":
            self._renew()
        return kind

    def _renew(self) -> None:
        """A fresh reader, fed with the first frames of a valid transfer so that every place is visited."""
        args = (SHAPE, self._keys, self._digest)
        self._reader = FrameReader(ID, OURS, *args, first_page=0, transfer_tokens=len(PROMPT) - 1)
        self._judge = Judge(bytes.fromhex(ID), (3, 2), SHAPE.page_bytes, CONTRACT, "", PROMPT)
        self._place, self._left = 0, 200
        for frame in self._mutator.valid[self._rng.choice(("raw", "lz4"))][: self._rng.randrange(6)]:
            self.feed(frame)
