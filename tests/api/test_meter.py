"""What the API counts of the requests that pass, with a clock that only moves when a test says so."""

from __future__ import annotations

import asyncio

import pytest
from prometheus_client.parser import text_string_to_metric_families

from pipeline.api.meter import MeteredBackend, MeteredSubmission
from pipeline.api.served import Served
from pipeline.broker.channel import ErrorInfo, TokenEntry
from pipeline.errors import BrokerError, CrossfillError, OverloadedError
from pipeline.metrics import Metrics
from pipeline.request import Request, Sampling
from pipeline.routing import Wish
from tests.api.fake import FakeBackend, Step, failure, told

pytestmark = pytest.mark.anyio
REQUEST = Request("a" * 32, (1, 2, 3), Sampling(max_tokens=4))


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        self.now_s += 0.5
        return self.now_s


def _samples(metrics: Metrics) -> dict[str, float]:
    families = text_string_to_metric_families(metrics.exposition()[0].decode())
    return {
        "/".join((sample.name.removeprefix("crossfill_"), *sample.labels.values())): sample.value
        for family in families
        for sample in family.samples
        if sample.value and not sample.name.endswith(("_bucket", "_created"))
    }


async def _submit(
    model: Served, *script: Step, refusal: CrossfillError | None = None
) -> tuple[MeteredSubmission, Metrics]:
    metrics = Metrics("api")
    backend = MeteredBackend(FakeBackend([list(script)], refusal), metrics, now_s=Clock())
    found = await backend.submit(REQUEST, Wish(), model)
    assert isinstance(found, MeteredSubmission)
    return found, metrics


async def test_a_finished_answer(model: Served) -> None:
    script = (TokenEntry(0, (5,)), TokenEntry(1, (6, 7)), TokenEntry(3, (8,), "length", held_tokens=0))
    submission, metrics = await _submit(model, *script)
    seen = await told(submission)
    await submission.close()
    assert seen == [*script]
    assert _samples(metrics) == {
        "requests_total/tiny/finished": 1,
        "prompt_tokens_total/tiny": 3,
        "output_tokens_total/tiny": 4,
        "time_to_first_token_seconds_count/tiny": 1,
        "time_to_first_token_seconds_sum/tiny": 0.5,
        "time_per_output_token_seconds_count/tiny": 1,
        "time_per_output_token_seconds_sum/tiny": pytest.approx(1.0 / 3),  # three more tokens in two steps of the clock
        "request_duration_seconds_count/tiny": 1,
        "request_duration_seconds_sum/tiny": 2.0,
    }


async def test_a_failure_has_its_code_and_counts_once(model: Served) -> None:
    submission, metrics = await _submit(model, TokenEntry(0, (5,)), failure("worker_lost"))
    assert len(await told(submission)) == 2
    await submission.cancel("sibling")
    await submission.close()
    found = _samples(metrics)
    assert found["requests_total/tiny/failed"] == 1
    assert found["request_errors_total/worker_lost"] == 1
    assert [name for name in found if name.startswith("requests_total")] == ["requests_total/tiny/failed"]
    assert "time_per_output_token_seconds_count/tiny" not in found  # of one token there is no pace


@pytest.mark.parametrize("end", ["cancel", "close", "operator"])
async def test_a_cancel_is_no_failure(model: Served, end: str) -> None:
    cancelled = TokenEntry(0, (), error=ErrorInfo("cancelled", "x", retryable=False, http_status=499))
    submission, metrics = await _submit(model, cancelled)
    if end == "operator":
        assert len(await told(submission)) == 1
    elif end == "cancel":
        await submission.cancel("client-gone")
    await submission.close()
    found = _samples(metrics)
    assert found["requests_total/tiny/cancelled"] == 1
    assert [name for name in found if "errors" in name] == []


async def test_a_stop_string_is_a_finish(model: Served) -> None:
    submission, metrics = await _submit(model, TokenEntry(0, (5,)))
    heard: list[object] = []
    submission.listen(heard.append)
    while not heard:
        await asyncio.sleep(0)
    assert await submission.stop() is True
    await submission.close()
    assert _samples(metrics)["requests_total/tiny/finished"] == 1


@pytest.mark.parametrize(("error", "lost"), [(OverloadedError("full"), 0), (BrokerError("away"), 1)])
async def test_a_refusal(model: Served, error: CrossfillError, lost: int) -> None:
    metrics = Metrics("api")
    backend = MeteredBackend(FakeBackend(refusal=error), metrics, now_s=Clock())
    with pytest.raises(type(error)):
        await backend.submit(REQUEST, Wish(), model)
    found = _samples(metrics)
    assert found["requests_total/tiny/refused"] == 1
    assert found[f"request_errors_total/{error.code}"] == 1
    assert found.get("broker_errors_total", 0) == lost
    assert "prompt_tokens_total/tiny" not in found
    assert "request_duration_seconds_count/tiny" not in found


async def test_everything_else_is_the_inner_backends(model: Served) -> None:
    inner = FakeBackend()
    backend = MeteredBackend(inner, Metrics("api"))
    await backend.start()
    assert await backend.status() == await inner.status()
    assert await backend.handoffs(7) == await inner.handoffs(7)
    assert await backend.handoff("a" * 32) == {"handoff_id": "a" * 32}
    inner.unready = BrokerError("away")
    with pytest.raises(BrokerError):
        await backend.require_ready(model)
    await backend.close()
    assert inner.log == [("start",), ("end",)]
