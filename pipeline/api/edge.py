"""Edge: what every handler of one API process shares. Built once, passed in, never global."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from pipeline.api.answer import Pace
from pipeline.api.relay import Backend
from pipeline.api.served import Catalogue
from pipeline.settings import ApiSettings


def unix_time() -> int:
    """Seconds, for the `created` fields of the OpenAI schema; nothing is measured with it."""
    return int(time.time())


@dataclass(frozen=True, slots=True)
class Edge:
    settings: ApiSettings
    models: Catalogue
    backend: Backend
    pace: Pace
    now: Callable[[], int] = unix_time
