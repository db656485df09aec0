"""The dashboard and the alerts ask for metrics that exist, with labels they have, in PromQL that parses."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from pipeline.metrics import API, WORKER, Family

ROOT = Path(__file__).parents[2]
DASHBOARD = ROOT / "ops/grafana/crossfill.json"
RULES = ROOT / "ops/prometheus/crossfill.rules.yml"
SAMPLES: dict[str, Family] = {
    name: family
    for family in (*API, *WORKER)
    for name in (
        [f"{family.name}_{end}" for end in ("bucket", "sum", "count")] if family.kind == "histogram" else [family.shown]
    )
}
TARGET_LABELS = {"instance", "job", "le"}  # from Prometheus itself


def _panels() -> list[dict[str, Any]]:
    return [panel for panel in json.loads(DASHBOARD.read_text())["panels"] if panel["type"] != "row"]


def _queries() -> list[str]:
    return [target["expr"] for panel in _panels() for target in panel["targets"]]


def _alerts() -> list[str]:
    return re.findall(r"expr: (?:>-\n)?((?:.+\n)(?: {10,}.+\n)*)", RULES.read_text())


def test_there_is_something_to_look_at() -> None:
    assert len(_panels()) > 20
    assert len(_alerts()) == RULES.read_text().count("- alert:") == 7


@pytest.mark.parametrize("query", [*_queries(), *_alerts()])
def test_a_query_names_metrics_and_labels_that_exist(query: str) -> None:
    names = re.findall(r"crossfill_\w+", query)
    assert names
    assert [name for name in names if name not in SAMPLES] == []
    for name, selector in re.findall(r"(crossfill_\w+)\{([^}]*)\}", query):
        assert set(re.findall(r"(\w+)\s*[=!]", selector)) <= set(SAMPLES[name].labels)
    known = {label for name in names for label in SAMPLES[name].labels} | TARGET_LABELS
    grouped = re.findall(r"(?:by|on|group_left)\s*\(([^)]*)\)", query)
    assert {label.strip() for group in grouped for label in group.split(",")} <= known


def test_every_metric_of_the_table_is_on_the_dashboard() -> None:
    shown = {SAMPLES[name].name for query in _queries() for name in re.findall(r"crossfill_\w+", query)}
    assert {family.name for family in (*API, *WORKER)} - shown == set()


def test_panels_have_ids_of_their_own_and_do_not_overlap() -> None:
    everything = json.loads(DASHBOARD.read_text())["panels"]
    assert len({panel["id"] for panel in everything}) == len(everything)

    def cells(panel: dict[str, Any]) -> set[tuple[int, int]]:
        at = panel["gridPos"]
        assert at["x"] + at["w"] <= 24
        return {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}

    for one, other in combinations(everything, 2):
        assert not cells(one) & cells(other), (one["title"], other["title"])


def test_a_legend_shows_labels_that_its_query_keeps() -> None:
    for panel in _panels():
        for target in panel["targets"]:
            kept = re.findall(r"(?:by|group_left)\s*\(([^)]*)\)", target["expr"])
            labels = {label.strip() for group in kept for label in group.split(",")}
            assert set(re.findall(r"{{(\w+)}}", target["legendFormat"])) <= labels, target


@pytest.fixture
def promtool() -> str:
    return shutil.which("promtool") or pytest.skip("promtool is not installed")


def test_the_dashboards_queries_parse(promtool: str, tmp_path: Path) -> None:
    rules = [
        {"record": f"q:{at}", "expr": query.replace("$__rate_interval", "1m")} for at, query in enumerate(_queries())
    ]
    file = tmp_path / "queries.yml"
    file.write_text(json.dumps({"groups": [{"name": "dashboard", "rules": rules}]}))  # JSON is YAML
    done = subprocess.run([promtool, "check", "rules", file], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert f"{len(rules)} rules found" in done.stdout


def test_the_scrape_configuration_and_the_alerts_are_valid(promtool: str) -> None:
    config = ROOT / "ops/prometheus/prometheus.yml"
    done = subprocess.run([promtool, "check", "config", config], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "7 rules found" in done.stdout
