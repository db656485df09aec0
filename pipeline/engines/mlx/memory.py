"""Memory: how many bytes of live KV cache an engine may have, given out in order of arrival.

Counted is what mlx-lm allocates: a prompt being computed takes its own capacity; requests that decode share one
left-padded batch, so each of them takes the capacity of the longest. Thread safe; knows sizes only.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from pipeline.engines.room import too_many
from pipeline.errors import EngineError, HandoffCancelledError, InvalidParameterError


class Share:
    """A place in the line, later a part of the memory: `tokens` of capacity for each of `rows` that decode.

    `rows` 0: a prompt being computed.
    """

    __slots__ = ("granted", "rows", "tokens")

    def __init__(self, tokens: int, rows: int) -> None:
        self.tokens = tokens
        self.rows = rows
        self.granted = False


class Memory:
    """`cap_bytes` of memory at `token_bytes` a token, and `slots` rows decoding at once.

    `on_grant` is called, with no lock held, after a share was granted by somebody else's release.
    """

    def __init__(self, cap_bytes: int, token_bytes: int, slots: int, on_grant: Callable[[], None]) -> None:
        self._cap_bytes = cap_bytes
        self._token_bytes = token_bytes
        self._slots = slots
        self._on_grant = on_grant
        self._changed = threading.Condition()
        self._line: deque[Share] = deque()
        self._granted: set[Share] = set()
        self._closed = False

    @property
    def free_bytes(self) -> int:
        with self._changed:
            return self._cap_bytes - self._used(self._granted)

    @property
    def max_tokens(self) -> int:
        """What one request could be granted at most."""
        return self._cap_bytes // self._token_bytes

    def require_fits(self, tokens: int) -> None:
        """Raise EngineError when `tokens` of capacity could never be granted."""
        need = tokens * self._token_bytes
        if need > self._cap_bytes:
            raise EngineError(
                f"this request needs {need} bytes of KV cache, the engine has {self._cap_bytes}: "
                f"set kv_cache_bytes to {need} or more"
            )

    def ask(self, tokens: int, *, rows: int) -> Share:
        """Join the line; the share may be granted at once.

        Raises EngineError when it could never be, InvalidParameterError when only fewer samples could.
        """
        self.require_fits(tokens)
        if tokens * rows > self.max_tokens:
            raise InvalidParameterError("n", too_many(rows, tokens * rows, self.max_tokens))
        if rows > self._slots:
            raise EngineError(f"n = {rows} samples need as many places and max_running is {self._slots}: raise it")
        share = Share(tokens, rows)
        with self._changed:
            self._line.append(share)
            self._grant()
        return share

    def wait(self, share: Share, timeout_s: float) -> bool:
        """True once `share` is granted; False after `timeout_s`. Raises HandoffCancelledError when the engine ends."""
        with self._changed:
            self._changed.wait_for(lambda: share.granted or self._closed, timeout_s)
            if self._closed:
                raise HandoffCancelledError("the engine is closing")
            return share.granted

    def release(self, share: Share) -> None:
        """Give the share, or its place in the line, back. Idempotent."""
        with self._changed:
            self._granted.discard(share)
            if share in self._line:
                self._line.remove(share)
            self._grant()
        self._on_grant()

    def close(self) -> None:
        """Wake everybody who waits."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _grant(self) -> None:
        # Strictly in order: a large request that waits is not passed by small ones for ever.
        while self._line and self._fits(self._line[0]):
            share = self._line.popleft()
            share.granted = True
            self._granted.add(share)
        self._changed.notify_all()

    def _fits(self, share: Share) -> bool:
        after = self._granted | {share}
        return self._used(after) <= self._cap_bytes and sum(one.rows for one in after) <= self._slots

    def _used(self, shares: set[Share]) -> int:
        longest = max((share.tokens for share in shares if share.rows), default=0)
        alone = sum(share.tokens for share in shares if not share.rows)
        return (alone + sum(share.rows for share in shares) * longest) * self._token_bytes
