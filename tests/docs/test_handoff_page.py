"""`docs/handoff.md` is what the transition table says today."""

from __future__ import annotations

from docs import generate_handoff
from pipeline.handoff import TRANSITIONS, Event


def test_the_page_is_current() -> None:
    assert generate_handoff.PAGE.read_text(encoding="utf-8") == generate_handoff.page()


def test_every_transition_is_drawn_or_is_a_failure() -> None:
    drawn = "\n".join(generate_handoff.diagram())
    for (state, event), to in TRANSITIONS.items():
        edge = next((line for line in drawn.splitlines() if line.strip().startswith(f"{state} --> {to}:")), "")
        assert (event in edge.partition(": ")[2].split(", ")) == (event is not Event.FAIL)


def test_every_transition_is_in_the_table() -> None:
    cells = [cell.strip() for line in generate_handoff.table()[2:] for cell in line.strip("|").split("|")[1:]]
    assert len([cell for cell in cells if cell != "·"]) == len(TRANSITIONS)
