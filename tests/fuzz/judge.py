"""Judge: what a page that comes out must be, worked out from the prompt and the wire format's page alone.

Nothing of `pipeline.frame`, `header`, `codec`, `prefix` or `page` is used here: another SHA-256 chain, another parser,
another test for NaN. A page is right when the values that came out have the digest that follows from the prompt's own
token ids. How they were packed does not matter: LZ4's decoder takes blocks that no encoder writes (an offset of 0), and
what they unpack to still has to have that digest.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import xxhash

PAGE = 64
FIXED = 104  # bytes before the body; docs/wire-format.md


def links(contract_digest: str, salt: str, token_ids: Sequence[int]) -> list[bytes]:
    """The content address after each 64 token ids, and after the last."""
    link = hashlib.sha256(b"crossfill/1\0" + contract_digest.encode() + b"\0" + salt.encode()).digest()
    found = []
    for at in range(0, len(token_ids), PAGE):
        part = token_ids[at : at + PAGE]
        link = hashlib.sha256(link + struct.pack(f"<{len(part)}I", *part)).digest()
        found.append(link)
    return found


@dataclass
class Judge:
    """Knows one transfer: which pages it may bring, in which order, and what its COMMIT must say."""

    handoff: bytes
    attempts: tuple[int, int]
    page_bytes: int
    contract_digest: str
    salt: str
    prompt: Sequence[int]
    first_page: int = 0
    head_dim: int = 2
    digests: list[bytes] = field(default_factory=list)

    def __post_init__(self) -> None:
        moved = self.prompt[:-1]
        self.links = links(self.contract_digest, self.salt, moved)
        self.whole = links(self.contract_digest, self.salt, self.prompt)[-1]
        self.tokens = [min(PAGE, len(moved) - PAGE * i) for i in range(len(self.links))]

    def page(self, header: bytes, payload: bytes, index: int, data: bytes) -> str | None:
        """What is wrong with accepting `data` as the next page, None when it is verified through and through."""
        due = self.first_page + len(self.digests)
        handoff, attempts = header[12:28], struct.unpack_from("<HH", header, 28)
        if (handoff, attempts) != (self.handoff, self.attempts):
            return "of another handoff or attempt"
        if index != due or due >= len(self.links) or struct.unpack_from("<I", header, 36)[0] != due:
            return f"page {index} where {due} is due"
        if len(data) != self.page_bytes or (header[7] == 0 and payload != data):
            return "not what the payload holds"
        digest = xxhash.xxh3_128(self.links[due] + struct.pack("<H", self.tokens[due]) + data).digest()
        if digest != header[88:104]:
            return "its digest does not follow from the prompt"
        values = np.frombuffer(data, "<f2").reshape(-1, PAGE, self.head_dim)
        if not np.isfinite(values.astype(np.float64)).all() or values[:, self.tokens[due] :].any():
            return "not finite, or dirty behind its last token"
        self.digests.append(digest)
        return None

    def commit(
        self,
        header: bytes,
        pages: int,
        first_tokens: tuple[int, ...],
        first_logprobs: Sequence[tuple[int, float, Sequence[tuple[int, float]]]],
    ) -> str | None:
        if self.first_page + len(self.digests) != len(self.links) or pages != len(self.digests):
            return "before its last page"
        if header[56:88] != self.whole:
            return "of another prompt"
        if header[88:104] != xxhash.xxh3_128(self.whole + b"".join(self.digests)).digest():
            return "of other pages"
        body = struct.pack(f"<{len(first_tokens)}I", *first_tokens)
        (entries,) = struct.unpack_from("<H", header, 40)
        for token, value, top in first_logprobs:
            body += struct.pack("<f", value) + b"".join(struct.pack("<If", *pair) for pair in top)
            if token not in first_tokens or len(top) + 1 != entries:
                return "with logprobs of other tokens"
        if len(first_logprobs) != (len(first_tokens) if entries else 0):
            return "with too few logprobs, or too many"
        return None if body == header[FIXED:-8] else "with other tokens"
