"""Edge: what every handler of one API process shares. Built once, passed in, never global."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from pipeline.api.answer import Pace
from pipeline.api.relay import Backend
from pipeline.api.served import Served


def unix_time() -> int:
    """Seconds, for the `created` fields of the OpenAI schema; nothing is measured with it."""
    return int(time.time())


@dataclass(frozen=True, slots=True)
class Edge:
    served: Served
    backend: Backend
    max_body_bytes: int
    default_max_tokens: int
    pace: Pace
    now: Callable[[], int] = unix_time
