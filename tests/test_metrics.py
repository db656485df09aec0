"""Every family of the table: named as Prometheus wants it, exposed as Prometheus reads it."""

from __future__ import annotations

import re
import shutil
import subprocess
import urllib.request

import pytest
from prometheus_client.parser import text_string_to_metric_families

from pipeline.errors import ConfigError
from pipeline.metrics import API, FAMILIES, WORKER, Family, Metrics, Process, Reading
from tests.ports import free_port

ALL = [*API, *WORKER]
UNITS = {"seconds", "bytes", "tokens", "pages"}
PROCESSES: tuple[Process, ...] = ("api", "worker")


def _filled(process: Process) -> Metrics:
    """Every family with one sample in every label."""
    metrics = Metrics(process)
    read = [family for family in FAMILIES[process] if family.read]
    metrics.add_source(lambda: [Reading(f.name, 1.0, ("x",) * len(f.labels)) for f in read])
    for family in FAMILIES[process]:
        labels = dict.fromkeys(family.labels, "x")
        if family.kind == "histogram":
            metrics.observe(family.name, 0.5, **labels)
        elif not family.read:
            metrics.count(family.name, 1, **labels)
    return metrics


@pytest.mark.parametrize("family", ALL, ids=lambda family: family.name)
def test_a_name_follows_the_conventions(family: Family) -> None:
    assert re.fullmatch(r"crossfill(_[a-z]+)+", family.name)
    words = family.name.split("_")
    assert words[-1] not in ("total", "count", "sum", "bucket", "ms", "kb", "mb")  # the client adds the first four
    assert family.kind != "histogram" or words[-1] == "seconds"
    assert [word for word in words[:-1] if word in UNITS - {"tokens", "pages"}] == []
    assert family.help[0].isupper() or family.help[0].isdigit()
    assert family.help.endswith(".")
    assert [label for label in family.labels if not re.fullmatch("[a-z]+", label)] == []
    assert not set(family.labels) & {"id", "handoff", "user", "instance", "job", "le"}
    assert list(family.buckets) == sorted(set(family.buckets))


@pytest.mark.parametrize("process", PROCESSES)
def test_what_is_exposed_is_the_table(process: Process) -> None:
    text, content_type = _filled(process).exposition()
    assert content_type.startswith("text/plain; version=")
    found = {family.name: family for family in text_string_to_metric_families(text.decode())}
    exposed = {name: family for name, family in found.items() if not name.endswith("_created")}
    assert exposed.keys() == {family.name for family in FAMILIES[process]}
    for family in FAMILIES[process]:
        seen = exposed[family.name]
        assert (seen.type, seen.documentation) == (family.kind, family.help)
        samples = {sample.name for sample in seen.samples} - {f"{family.name}_created"}
        expected = {f"{family.name}_{end}" for end in ("bucket", "count", "sum")}
        assert samples == (expected if family.kind == "histogram" else {family.shown})
        assert {*seen.samples[0].labels} - {"le"} == {*family.labels}


@pytest.mark.parametrize("process", PROCESSES)
def test_promtool_has_nothing_to_say(process: Process) -> None:
    """Prometheus' own lint: names, units, types, help."""
    promtool = shutil.which("promtool") or pytest.skip("promtool is not installed")
    text, _ = _filled(process).exposition()
    done = subprocess.run([promtool, "check", "metrics"], input=text, capture_output=True, check=False)
    assert (done.returncode, done.stderr.decode()) == (0, "")


def test_names_are_used_once_in_a_process() -> None:
    for families in FAMILIES.values():
        names = [family.name for family in families]
        assert len(names) == len(set(names))


def test_counts_and_observations_add_up() -> None:
    metrics = Metrics("api")
    metrics.count("crossfill_requests", model="m", outcome="finished")
    metrics.count("crossfill_requests", 2, model="m", outcome="finished")
    metrics.observe("crossfill_time_per_output_token_seconds", 0.02, model="m")
    samples = {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(metrics.exposition()[0].decode())
        for sample in family.samples
    }
    assert samples["crossfill_requests_total", "m", "finished"] == 3
    assert samples["crossfill_time_per_output_token_seconds_sum", "m"] == 0.02
    assert samples["crossfill_time_per_output_token_seconds_bucket", "0.01", "m"] == 0
    assert samples["crossfill_time_per_output_token_seconds_bucket", "0.02", "m"] == 1


def test_what_is_not_in_the_table_is_refused() -> None:
    metrics = Metrics("api")
    with pytest.raises(KeyError):
        metrics.count("crossfill_parts", role="prefill", outcome="done")  # a worker's
    with pytest.raises(ValueError, match="label"):
        metrics.count("crossfill_requests", model="m")
    with pytest.raises(AssertionError, match="not a histogram"):
        metrics.observe("crossfill_prompt_tokens", 1, model="m")


def test_two_processes_worth_of_metrics_do_not_meet() -> None:
    one, other = Metrics("worker"), Metrics("worker")
    one.count("crossfill_sent_pages")
    assert b"crossfill_sent_pages_total 1.0" in one.exposition()[0]
    assert b"crossfill_sent_pages_total 0.0" in other.exposition()[0]


def test_openmetrics_for_who_accepts_it() -> None:
    text, content_type = Metrics("worker").exposition("application/openmetrics-text; version=1.0.0")
    assert content_type.startswith("application/openmetrics-text")
    assert text.endswith(b"# EOF\n")


def test_a_port_of_its_own() -> None:
    metrics, port = Metrics("worker"), free_port()
    close = metrics.serve("127.0.0.1", port)
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
            assert answer.status == 200
            assert b"crossfill_sent_pages_total 0.0" in answer.read()
        with pytest.raises(
            ConfigError, match=f"metrics_port: cannot listen on 127.0.0.1:{port}: Address already in use"
        ):
            Metrics("worker").serve("127.0.0.1", port)
    finally:
        close()
    metrics.serve("127.0.0.1", port)()  # the port is free again
