"""Suite: every test, each in the environment it needs, and one closing line over all of them.

An engine's tests run where that engine is installed and are skipped elsewhere: a test counts once, by its best
outcome but for a failure. Exit status 1 when anything failed, nothing ran, or an engine that must be here was skipped.
Two runs at a time where there are two cores: each one's output comes as a whole when it ends.
Run by `make test`; further arguments go to pytest.
"""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parent.parent
REPORTS = ROOT / ".run"
CORE = ROOT / ".venv"
VLLM = ROOT / ".venv-vllm"
SGLANG = ROOT / ".venv-sglang"
BLAS = CORE / "lib" / "crossfill_blas.so"
NO_GPU = "no GPU here"  # the reason of a skip
NOT_OFFERED = "does not offer"  # likewise: a feature that an engine lacks and says so; docs/engines.md has the table
BEAT_S = 60.0  # what runs is named this often
NOTHING_COLLECTED = 5  # pytest's exit status when a filter leaves no test


class Run(NamedTuple):
    """One pytest process. `engines` must be present in its environment."""

    name: str
    environment: Path
    arguments: tuple[str, ...]
    engines: tuple[str, ...]
    preload: Path | None = None


class Case(NamedTuple):
    """One test's outcome: passed, failed or skipped; `detail` is a skip's reason."""

    name: str
    outcome: str
    detail: str = ""


class Result(NamedTuple):
    cases: list[Case]
    status: int  # pytest's own: it also tells of broken collections and of a crash


_CORE = ("reference", "mlx")
_ELSEWHERE = ("--ignore=tests/engines", "--ignore=tests/pairs")
_SYSTEMS = ("tests/scenarios", "tests/cli", "tests/faults")  # whole systems of many processes: half of the time
_UNITS = ("tests", *_ELSEWHERE, *(f"--ignore={folder}" for folder in _SYSTEMS))
# What is drawn begins at the logits, where checkpoint families no longer differ: one of them shows it.
_ONE = "not (test_contract_sampling and qwen)"
_ALL = ("mlx", "vllm", "sglang")
RANK = {"skipped": 0, "passed": 1, "failed": 2}


def plan() -> list[Run]:
    """What runs on this machine, the longest first."""
    preload = BLAS if BLAS.exists() else None
    both = sys.platform == "linux" and platform.machine() == "x86_64"
    runs = [
        Run("scenarios", CORE, _SYSTEMS, _ALL if both else ()),
        Run("units", CORE, _UNITS, ("reference",)),
        Run(
            "engines: reference, MLX",
            CORE,
            ("tests/engines", "-k", f"not vllm and not sglang and {_ONE}"),
            _CORE,
            preload,
        ),
    ]
    if both:
        # PyTorch is there too: the reference engine is compared with transformers in the same run.
        runs.append(Run("engines: vLLM", VLLM, ("tests/engines", "-k", f"vllm and {_ONE} or transformers"), ("vllm",)))
        # An SGLang start takes a minute or two: one checkpoint family here, all three by `make pairs`.
        runs.append(Run("engines: SGLang", SGLANG, ("tests/engines", "-k", "sglang and not qwen"), ("sglang",)))
        # Likewise: every engine in both roles is started once, for all sixteen pairs.
        runs.append(Run("pairs", CORE, ("tests/pairs/test_pairs.py",), _ALL))
    return runs


def execute(run: Run, extra: Sequence[str]) -> Result:
    """Run pytest and read its report. Whatever keeps it from reporting is a failed case of its own."""
    report, log = _file(run, ".xml"), _file(run, ".log")
    report.unlink(missing_ok=True)
    start = time.monotonic()
    python = str(run.environment / "bin" / "python")
    argv = [python, "-m", "pytest", "-q", f"--junitxml={report}", *run.arguments, *extra]
    with log.open("w") as output:
        status = subprocess.run(
            argv, cwd=ROOT, env=variables(run), stdout=output, stderr=subprocess.STDOUT, check=False
        ).returncode
    title = f"== {run.name} ({run.environment.name}): {time.monotonic() - start:.0f} s"
    print(f"{title}\n{log.read_text(errors='replace')}", flush=True)
    cases = read(report.read_text(encoding="utf-8")) if report.exists() else []
    if status not in (0, 1, NOTHING_COLLECTED) or not report.exists():
        cases.append(Case(f"pytest ({run.name})", "failed"))
    return Result(cases, status)


def execute_all(runs: Sequence[Run], extra: Sequence[str], lanes: int) -> list[Result]:
    """The results in the order of `runs`, `lanes` of which run at a time."""
    with ThreadPoolExecutor(lanes) as pool:
        futures: dict[Future[Result], Run] = {pool.submit(execute, run, extra): run for run in runs}
        waiting = set(futures)
        while waiting:
            _, waiting = wait(waiting, timeout=BEAT_S, return_when=FIRST_COMPLETED)
            for run in (futures[future] for future in waiting if future.running()):
                print(f"running: {run.name} {progress(_file(run, '.log'))}".rstrip(), flush=True)
        return [future.result() for future in futures]


def progress(log: Path) -> str:
    """How far pytest says it is, such as "45%"; empty before it says so."""
    seen = re.findall(r"\[ *(\d+%)\]", log.read_text(errors="replace")) if log.exists() else []
    return seen[-1] if seen else ""


def _file(run: Run, suffix: str) -> Path:
    return REPORTS / f"suite-{re.sub('[^a-z]+', '-', run.name.lower())}{suffix}"


def variables(run: Run) -> dict[str, str]:
    """One thread per engine: those of two on the same few cores fight."""
    found = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    found |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    if run.engines:
        found["CROSSFILL_REQUIRE_ENGINES"] = ",".join(run.engines)
    if run.preload:
        found["LD_PRELOAD"] = str(run.preload)
    return found


def read(report: str) -> list[Case]:
    """The cases of a JUnit report as pytest writes it."""
    cases = []
    for case in ElementTree.fromstring(report).iter("testcase"):
        name = "::".join(filter(None, (case.get("classname"), case.get("name"))))
        skip = case.find("skipped")
        if case.find("failure") is not None or case.find("error") is not None:
            cases.append(Case(name, "failed"))
        elif skip is not None and skip.get("type") != "pytest.xfail":  # a module skipped as a whole has no type
            cases.append(Case(name, "skipped", skip.text or skip.get("message") or ""))
        else:  # an expected failure is a test that did what it says
            cases.append(Case(name, "passed"))
    return cases


def combine(cases: Iterable[Case]) -> list[Case]:
    """One case per test: a failure anywhere wins, then a pass. A module skipped as a whole counts as its tests do."""
    best: dict[str, Case] = {}
    for case in cases:
        if case.name not in best or RANK[case.outcome] > RANK[best[case.name].outcome]:
            best[case.name] = case
    modules = {name.split("::")[0] for name in best if "::" in name}
    return [case for name, case in best.items() if case.outcome != "skipped" or name not in modules]


def missing(cases: Sequence[Case], engines: Iterable[str]) -> list[Case]:
    """Skipped tests of engines that must be here. What only a GPU can show is not missed where there is none, nor a
    feature that an engine does not claim."""
    skipped = [case for case in cases if case.outcome == "skipped" and case.name.startswith("tests.engines")]
    expected = [case for case in skipped if NO_GPU in case.detail or NOT_OFFERED in case.detail]
    return [case for case in skipped if case not in expected and any(engine in case.name for engine in engines)]


def main() -> int:
    REPORTS.mkdir(exist_ok=True)
    runs = plan()
    chosen = sys.argv[1:]  # who picks tests does not want to hear of the others
    results = execute_all(runs, chosen, lanes=min(2, os.cpu_count() or 1))
    cases = combine(case for result in results for case in result.cases)
    absent = [] if chosen else missing(cases, {engine for run in runs for engine in run.engines})
    count = {outcome: sum(case.outcome == outcome for case in cases) for outcome in RANK}
    for case in cases:
        if case.outcome != "passed":
            why = " (must run here)" if case in absent else ""
            print(f"{case.outcome}{why}: {case.name} {case.detail}".rstrip())
    print(f"{count['passed']} passed, {count['failed']} failed, {count['skipped']} skipped")
    good = all(result.status in (0, NOTHING_COLLECTED) for result in results)
    return 0 if good and count["passed"] and not count["failed"] and not absent else 1


if __name__ == "__main__":
    sys.exit(main())
