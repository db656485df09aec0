"""What the parts of two workers add to their metrics, against the record of the same handoffs."""

from __future__ import annotations

import logging

import pytest
from prometheus_client.parser import text_string_to_metric_families

from pipeline import log
from pipeline.errors import BrokerError, EngineError, HandoffCancelledError, StaleAttemptError
from pipeline.stages import observe
from pipeline.stages.drain import Services, taking_part
from tests.stages.fake import PAGE_BYTES
from tests.stages.stand import Stand, outcome

pytestmark = [pytest.mark.usefixtures("server_url"), pytest.mark.parametrize("server_url", ["valkey"], indirect=True)]


def samples(services: Services) -> dict[str, float]:
    """`name{label values}` to value, of everything that is not zero and no bucket."""
    text = services.observer.metrics.exposition()[0].decode()
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.value and not sample.name.endswith(("_bucket", "_created")):
                found["/".join((sample.name, *sample.labels.values()))] = sample.value
    return found


def test_both_parts_of_a_handoff(stand: Stand) -> None:
    request = stand.open(200)
    p, d = stand.prefill(request), stand.decode(request)
    outcome(p)
    outcome(d)
    trace = stand.ledger.recent(1)[0]
    marks = trace["marks_ms"]
    prefill, decode = samples(stand.p_services), samples(stand.d_services)
    assert prefill.pop("crossfill_queue_seconds_sum/prefill") == pytest.approx(
        marks["prefill_started"] / 1000, abs=2e-6
    )
    for name, start, end in (
        ("prefill", "prefill_started", "prefill_ended"),
        ("first_page", "prefill_started", "first_page_out"),
        ("transfer", "first_page_out", "last_page_out"),
    ):
        took_s = (marks[end] - marks[start]) / 1000
        assert prefill.pop(f"crossfill_{name}_seconds_sum") == pytest.approx(took_s, abs=2e-6)
        assert prefill.pop(f"crossfill_{name}_seconds_count") == 1
    assert prefill == {
        "crossfill_parts_total/done/prefill": 1,
        "crossfill_queue_seconds_count/prefill": 1,
        "crossfill_sent_pages_total": 4,
        "crossfill_sent_bytes_total": 4 * PAGE_BYTES,
    }
    for name, start, end in (
        ("admission", "decode_started", "admitted"),
        ("import", "accepted", "last_page_in"),
        ("first_token", "committed", "first_token"),
        ("decode", "first_token", "finished"),
    ):
        took_s = (marks[end] - marks[start]) / 1000
        assert decode.pop(f"crossfill_{name}_seconds_sum") == pytest.approx(took_s, abs=2e-6)
        assert decode.pop(f"crossfill_{name}_seconds_count") == 1
    assert decode.pop("crossfill_queue_seconds_sum/decode") == pytest.approx(marks["decode_started"] / 1000, abs=2e-6)
    assert decode == {
        "crossfill_parts_total/done/decode": 1,
        "crossfill_queue_seconds_count/decode": 1,
        "crossfill_imported_tokens_total": 199,
        "crossfill_imported_pages_total": 4,
    }


def test_pages_that_d_holds_are_reused(stand: Stand) -> None:
    stand.d.set(held=2)
    request = stand.open(200)
    p, d = stand.prefill(request), stand.decode(request)
    outcome(p)
    outcome(d)
    found = samples(stand.d_services)
    shown = {name: found[f"crossfill_{name}_total"] for name in ("reused_pages", "reused_tokens", "imported_tokens")}
    assert shown == {"reused_pages": 2, "reused_tokens": 128, "imported_tokens": 71}
    assert samples(stand.p_services)["crossfill_sent_pages_total"] == 2


def test_a_prompt_that_d_computed_after_all_is_a_recovery(stand: Stand) -> None:
    stand.p.set(bad_page=0)
    request = stand.open(200)
    p, d = stand.prefill(request), stand.decode(request)
    with pytest.raises(EngineError):
        p.result(60)
    outcome(d)
    assert samples(stand.p_services)["crossfill_parts_total/failed/prefill"] == 1
    found = samples(stand.d_services)
    assert found["crossfill_recoveries_total/recomputed"] == 1
    assert "crossfill_imported_tokens_total" not in found


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (None, "done"),
        (HandoffCancelledError("x"), "cancelled"),
        (StaleAttemptError("x"), "stale"),
        (EngineError("x"), "failed"),
        (KeyError("x"), "failed"),
    ],
)
def test_how_a_part_ended(error: Exception | None, said: str) -> None:
    assert observe.outcome(error) == said


def test_log_lines_of_the_work_are_about_the_handoff(stand: Stand, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    request = stand.open(3)
    with taking_part(stand.p_services, request.handoff_id, "prefill") as part, stand.p_services.observer.watching(part):
        logging.getLogger("engine").info("allocating")
        assert log.handoff_of(caplog.records[-1]) == request.handoff_id
    assert log.handoff_of(caplog.records[-1]) == request.handoff_id
    assert caplog.records[-1].getMessage() == f"prefill of handoff {request.handoff_id}: done"


def test_a_broker_that_was_away_is_counted(stand: Stand) -> None:
    request = stand.open(3)
    with pytest.raises(BrokerError, match="away"):
        _lose_the_broker(stand.p_services, request.handoff_id)
    found = samples(stand.p_services)
    assert found["crossfill_broker_errors_total"] == 1
    assert found["crossfill_parts_total/failed/prefill"] == 1


def _lose_the_broker(services: Services, handoff_id: str) -> None:
    with taking_part(services, handoff_id, "prefill") as part, services.observer.watching(part):
        raise BrokerError("away")
