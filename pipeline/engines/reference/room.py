"""Room: how many pages of KV and how many decode seats the engine has to give. Pure counting, guarded by its owner."""

from __future__ import annotations

from pipeline.engines.room import too_many
from pipeline.errors import EngineError, InvalidParameterError
from pipeline.page import PAGE_TOKENS


class Room:
    """`pages` of KV for both roles together; `seats` for decode requests admitted at once."""

    def __init__(self, pages: int, seats: int) -> None:
        self.pages = pages
        self.seats = seats
        self.free_pages = pages
        self.free_seats = seats

    def require_possible(self, pages: int, seats: int) -> None:
        """Raise EngineError when not even an idle engine has so much, InvalidParameterError when fewer samples fit."""
        if seats > self.seats:
            raise EngineError(f"n = {seats} samples need as many places and max_running is {self.seats}: raise it")
        if pages > self.pages >= pages // max(1, seats):
            raise InvalidParameterError("n", too_many(seats, pages * PAGE_TOKENS, self.pages * PAGE_TOKENS))
        if pages > self.pages:
            raise EngineError(
                f"the request needs {pages} pages of KV and the engine has {self.pages} in all: raise kv_cache_bytes, "
                f"or send a shorter prompt or a smaller max_tokens"
            )

    def can_take(self, pages: int, seats: int) -> bool:
        return pages <= self.free_pages and seats <= self.free_seats

    def take(self, pages: int, seats: int) -> None:
        self.free_pages -= pages
        self.free_seats -= seats

    def give(self, pages: int, seats: int) -> None:
        self.free_pages += pages
        self.free_seats += seats
