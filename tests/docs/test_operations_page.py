"""The runbook: what the alerts and the text point to exists."""

from __future__ import annotations

import re
from pathlib import Path

from pipeline import errors
from pipeline.__main__ import COMMANDS
from pipeline.metrics import API, WORKER

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/operations.md").read_text()
CLI = (ROOT / "docs/cli.md").read_text()


def test_every_alert_has_its_section() -> None:
    headings = {
        re.sub(r"[^a-z0-9 ]", "", line[4:].lower()).replace(" ", "-")
        for line in PAGE.splitlines()
        if line[:4] == "### "
    }
    anchors = re.findall(r"docs/operations\.md#([\w-]+)", (ROOT / "ops/prometheus/crossfill.rules.yml").read_text())
    assert len(anchors) == 7
    assert set(anchors) <= headings


def test_metrics_and_codes_exist() -> None:
    names = {family.shown for family in (*API, *WORKER)}
    assert set(re.findall(r"`(crossfill_\w+)`", PAGE)) <= names
    known = {getattr(error, "code", None) for error in vars(errors).values()}
    known |= {"worker_lost"}  # the janitor's
    assert set(re.findall(r"^\| `(\w+)`", PAGE, re.M)) | set(re.findall(r", `(\w+)` \|", PAGE)) <= known


def test_commands_exist_and_none_is_left_out() -> None:
    said = set(re.findall(r"`crossfill ([a-z]+)", PAGE + CLI))
    assert said - set(COMMANDS) == set()
    mine = {"up", "demo", "serve", "worker", "model", "status", "queues", "replicas", "handoffs", "handoff", "cancel"}
    assert mine | {"drain", "doctor", "dashboard"} <= said


def test_pictures_and_pages_exist() -> None:
    for target in re.findall(r"\]\(([^)#:]+)\)", PAGE):
        assert (ROOT / "docs" / target).exists(), target
