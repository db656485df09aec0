"""Stream: one handoff's pages crossing the page server under the byte budget, in order. All that stages need of it.

P's end is `writer`, D's is `reader`; `credit` is the server's side of both, `payload` their connection.
"""

from __future__ import annotations

from pipeline.broker.credit import BudgetGauges, gauges, heartbeat, raise_fence, reap, release
from pipeline.broker.reader import PageReader
from pipeline.broker.writer import PageWriter

__all__ = ["BudgetGauges", "PageReader", "PageWriter", "gauges", "heartbeat", "raise_fence", "reap", "release"]
