"""Log lines as text and JSON: every line about a handoff has its id, wherever it comes from."""

from __future__ import annotations

import json
import logging
import sys
import threading
from collections.abc import Iterator

import pytest

from pipeline import log

ID, OTHER = "a1" * 16, "b2" * 16


@pytest.fixture(autouse=True)
def root() -> Iterator[None]:
    """The process's logging as it was, afterwards."""
    logger = logging.getLogger()
    before = logger.handlers[:], logger.level
    yield
    logger.handlers[:], logger.level = before


def _record(message: str, *arguments: object, error: BaseException | None = None) -> logging.LogRecord:
    info = (type(error), error, error.__traceback__) if error else None
    return logging.LogRecord("pipeline.x", logging.WARNING, "f.py", 1, message, arguments, info)


def test_a_line_of_json() -> None:
    found = json.loads(log.JsonFormatter("vllm-0").format(_record("slow: %d ms", 5)))
    assert found.pop("time").endswith("+00:00")
    assert found == {"level": "WARNING", "process": "vllm-0", "logger": "pipeline.x", "message": "slow: 5 ms"}


def test_an_exception_and_a_line_break_stay_in_one_line() -> None:
    try:
        raise ValueError("two\nlines")
    except ValueError as error:
        line = log.JsonFormatter("api").format(_record("broke\nhere", error=error))
    assert line.count("\n") == 0
    found = json.loads(line)
    assert found["message"] == "broke\nhere"
    assert found["exception"].splitlines()[0] == "Traceback (most recent call last):"
    assert found["exception"].endswith("ValueError: two\nlines")


@pytest.mark.parametrize("words", ["handoff %s: worker lost", "Successfully completed prefill %s job", "decode %s"])
def test_a_message_that_names_a_handoff_is_about_it(words: str) -> None:
    with log.about(OTHER):
        assert log.handoff_of(_record(words, ID)) == ID
    assert log.handoff_of(_record("handoff %s", "short")) == ""


def test_the_context_says_it_where_the_message_does_not() -> None:
    with log.about(ID):
        assert json.loads(log.JsonFormatter("api").format(_record("no kernel")))["handoff"] == ID
        with log.about(OTHER):
            assert log.handoff_of(_record("x")) == OTHER
        assert log.handoff_of(_record("x")) == ID
    assert log.handoff_of(_record("x")) == ""


def test_each_thread_has_its_own() -> None:
    seen: list[str] = []
    with log.about(ID):
        thread = threading.Thread(target=lambda: seen.append(log.handoff_of(_record("x"))))
        thread.start()
        thread.join()
    assert seen == [""]


def test_text_names_the_handoff_once() -> None:
    with log.about(ID):
        assert (
            log.TextFormatter().format(_record("no kernel")).endswith(f"WARNING pipeline.x: no kernel [handoff {ID}]")
        )
        assert log.TextFormatter().format(_record("handoff %s ended", ID)).endswith(f"pipeline.x: handoff {ID} ended")
    assert log.TextFormatter().format(_record("up")).endswith("WARNING pipeline.x: up")


def test_setup_writes_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    log.setup("json", "w-0")
    logging.getLogger("anywhere").info("hello")
    logging.getLogger("anywhere").debug("not this")
    sys.stderr.flush()
    (line,) = capsys.readouterr().err.splitlines()
    assert json.loads(line)["message"] == "hello"
    log.setup("text", "w-0")
    logging.getLogger("anywhere").info("again")
    assert capsys.readouterr().err.endswith("INFO anywhere: again\n")
