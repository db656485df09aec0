"""How two runs of one suite are counted."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from ops import suite
from ops.suite import Case, Run

REPORT = """<?xml version="1.0"?><testsuites><testsuite>
<testcase classname="tests.a" name="test_good"/>
<testcase classname="tests.a" name="test_bad"><failure message="no">trace</failure></testcase>
<testcase classname="tests.a" name="test_broken"><error message="no">trace</error></testcase>
<testcase classname="tests.a" name="test_left"><skipped type="pytest.skip" message="x">no mlx</skipped></testcase>
<testcase classname="tests.a" name="test_expected"><skipped type="pytest.xfail" message="known"/></testcase>
<testcase classname="" name="tests.engines.test_vllm"><skipped message="collection skipped">no vllm</skipped></testcase>
</testsuite></testsuites>"""


def test_read() -> None:
    assert suite.read(REPORT) == [
        Case("tests.a::test_good", "passed"),
        Case("tests.a::test_bad", "failed"),
        Case("tests.a::test_broken", "failed"),
        Case("tests.a::test_left", "skipped", "no mlx"),
        Case("tests.a::test_expected", "passed"),
        Case("tests.engines.test_vllm", "skipped", "no vllm"),
    ]


def test_read_what_pytest_writes(tmp_path: Path) -> None:
    """The outcomes of a real run: pytest words a skipped module and a skipped test differently."""
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "test_module.py").write_text("import pytest\npytest.importorskip('no_such_module_anywhere')\n")
    (tmp_path / "test_cases.py").write_text(
        "import pytest\n"
        "def test_pass(): pass\n"
        "def test_fail(): assert 0\n"
        "def test_skip(): pytest.skip('why')\n"
        "@pytest.mark.xfail\n"
        "def test_expected(): assert 0\n"
        "@pytest.fixture\n"
        "def broken(): raise OSError\n"
        "def test_error(broken): pass\n"
    )
    report = tmp_path / "junit.xml"
    argv = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}", str(tmp_path)]
    assert subprocess.run(argv, cwd=tmp_path, capture_output=True, check=False).returncode == 1
    assert {case.name: case.outcome for case in suite.read(report.read_text())} == {
        "test_module": "skipped",
        "test_cases::test_pass": "passed",
        "test_cases::test_fail": "failed",
        "test_cases::test_skip": "skipped",
        "test_cases::test_expected": "passed",
        "test_cases::test_error": "failed",
    }


@pytest.mark.parametrize(
    ("first", "second", "counted"),
    [("skipped", "passed", "passed"), ("passed", "skipped", "passed"), ("passed", "failed", "failed")],
)
def test_a_test_of_two_runs_counts_once(first: str, second: str, counted: str) -> None:
    cases = suite.combine([Case("t::a", first), Case("t::a", second)])
    assert [case.outcome for case in cases] == [counted]


def test_a_module_skipped_as_a_whole_counts_as_its_tests_did_elsewhere() -> None:
    module = Case("tests.engines.test_vllm", "skipped")
    ran = Case("tests.engines.test_vllm::test_a", "passed")
    assert suite.combine([module, ran]) == [ran]
    assert suite.combine([module]) == [module]
    skipped = Case("tests.engines.test_vllm::test_a", "skipped", "no GPU here")
    assert suite.combine([module, skipped]) == [skipped]


def test_only_engines_that_must_be_here_are_missing() -> None:
    vllm, mlx = (Case(f"tests.engines.test_contract::test_a[{name}]", "skipped") for name in ("vllm", "mlx"))
    elsewhere = Case("tests.api.test_a::test_vllm", "skipped")
    assert suite.missing([vllm, mlx, elsewhere], ["vllm", "reference"]) == [vllm]


def test_what_needs_a_gpu_is_not_missed_where_there_is_none() -> None:
    gpu = Case("tests.engines.vllm.test_cuda::test_a", "skipped", "test_cuda.py:26: no GPU here")
    absent = Case("tests.engines.vllm.test_engine::test_b", "skipped", "vLLM is not installed")
    assert suite.missing([gpu, absent], ["vllm"]) == [absent]


def test_a_feature_that_an_engine_does_not_claim_is_not_missed() -> None:
    name = "tests.engines.test_contract_sampling::test_a[sglang-llama]"
    assert suite.missing([Case(name, "skipped", "test_a.py:56: sglang does not offer grammar")], ["sglang"]) == []


def test_runs_side_by_side_report_each_for_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(suite, "REPORTS", tmp_path)
    (tmp_path / "test_one.py").write_text("def test_pass(): pass\ndef test_fail(): assert 0\n")
    (tmp_path / "test_two.py").write_text("def test_pass(): pass\n")
    (tmp_path / "test_three.py").write_text("import os\nos._exit(70)\n")
    runs = [Run(name, Path(sys.prefix), (str(tmp_path / f"test_{name}.py"),), ()) for name in ("one", "two", "three")]
    one, two, three = suite.execute_all(runs, ["-p", "no:cacheprovider"], lanes=2)
    assert (one.status, [case.outcome for case in one.cases]) == (1, ["passed", "failed"])
    assert (two.status, [case.outcome for case in two.cases]) == (0, ["passed"])
    assert (three.status, three.cases) == (70, [Case("pytest (three)", "failed")])
    shown = capsys.readouterr().out
    assert [shown.count(f"== {name} (") for name in ("one", "two", "three")] == [1, 1, 1]
    assert "1 failed, 1 passed" in shown


def test_progress_is_what_pytest_said_last(tmp_path: Path) -> None:
    log = tmp_path / "a.log"
    assert suite.progress(log) == ""
    log.write_text("........ [  8%]\n....... [ 45%]\n....")
    assert suite.progress(log) == "45%"
