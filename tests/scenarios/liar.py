"""Liar: a prefill worker that does one thing wrong, as a process of its own. Not an engine anyone can configure.

    python -m tests.scenarios.liar --config settings.json --name liar-0 --fault FAULT

`wrong_page` sends wrong KV with perfectly valid digests, `wrong_third_page` does so in the third page only; all
other faults damage what goes over the wire.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from pipeline import engines
from pipeline.broker.connect import connect
from pipeline.cli import config
from pipeline.engines.base import Engine, Prefill
from pipeline.frame import Frame, FrameWriter
from pipeline.page import Page
from pipeline.request import Request
from pipeline.stages import prefill
from pipeline.workers.runtime import Runtime

NAME = "liar"


class LyingPrefill:
    """Some pages come with their numbers turned around: finite, well-formed, and wrong."""

    def __init__(self, honest: Prefill, pages: Collection[int]) -> None:
        self._honest = honest
        self._wrong = pages

    def read(self, index: int) -> Page:
        page = self._honest.read(index)
        if index not in self._wrong:
            return page
        data = np.zeros_like(page.data)
        data[..., : page.tokens, :] = -page.data[..., : page.tokens, :][..., ::-1]
        return replace(page, data=data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._honest, name)


class LyingEngine:
    def __init__(self, honest: Engine, pages: Collection[int]) -> None:
        self._honest = honest
        self._wrong = pages

    def prefill(self, request: Request) -> LyingPrefill:
        return LyingPrefill(self._honest.prefill(request), self._wrong)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._honest, name)


@dataclass
class LyingFrames:
    """A FrameWriter whose second page frame suffers from `fault`."""

    honest: FrameWriter
    fault: str
    made: int = 0
    kept: Frame | None = None

    def page(self, page: Page) -> Frame:
        frame = self.honest.page(page)
        self.made += 1
        if self.made == 1:
            self.kept = frame
        return FAULTS[self.fault](self, frame) if self.made == 2 else frame

    def __getattr__(self, name: str) -> Any:
        return getattr(self.honest, name)


def _flip(data: bytes | memoryview, at: int) -> bytes:
    raw = bytearray(data)
    raw[at] ^= 1
    return bytes(raw)


def _stall(lie: LyingFrames, frame: Frame) -> Frame:
    time.sleep(3600)
    return frame


FAULTS: dict[str, Callable[[LyingFrames, Frame], Frame]] = {
    "none": lambda lie, frame: frame,
    "payload_bit": lambda lie, frame: frame._replace(payload=_flip(frame.payload, 100)),
    "header_bit": lambda lie, frame: frame._replace(header=_flip(frame.header, 40)),
    "truncated": lambda lie, frame: frame._replace(payload=bytes(frame.payload)[:-2]),
    "swapped": lambda lie, frame: frame._replace(payload=lie.kept.payload if lie.kept else b""),
    "duplicated": lambda lie, frame: lie.kept or frame,
    "die": lambda lie, frame: os._exit(9),
    "stall": _stall,
}


WRONG_PAGES: dict[str, Collection[int]] = {"wrong_page": range(1 << 20), "wrong_third_page": {2}}


def frames(fault: str) -> Callable[..., Any]:
    """What takes FrameWriter's place in the prefill stage."""

    def make(*args: Any, **kwargs: Any) -> Any:
        return LyingFrames(FrameWriter(*args, **kwargs), fault)

    return make


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--name", required=True)
    parser.add_argument("--fault", required=True)
    options = parser.parse_args()
    settings = config.load(options.config, os.environ)
    mine = next(w for w in settings.workers if w.name == options.name)
    honest = engines.load(mine.engine, mine.model, mine.engine_settings)
    if options.fault in WRONG_PAGES:
        engine: Any = LyingEngine(honest, WRONG_PAGES[options.fault])
    else:
        engine = honest
        setattr(prefill, "FrameWriter", frames(options.fault))  # noqa: B010  # the stage's own import of it
    mine = mine.model_copy(update={"engine": NAME, "role": "prefill"})
    with closing(honest):
        runtime = Runtime(settings, mine, engine, connect(settings.broker.url))
        runtime.start()
        print("ready", flush=True)
        for _ in _stdin():
            pass
        runtime.close()


def _stdin() -> Iterator[str]:
    """Until the test closes our standard input, or dies."""
    while True:
        try:
            yield input()
        except EOFError:
            return


if __name__ == "__main__":
    main()
