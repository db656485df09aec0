"""Which engines a machine has, told from files alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.cli import machine
from pipeline.errors import ConfigError
from pipeline.settings import WorkerSettings


def install(environment: Path, module: str) -> None:
    package = environment / "lib/python3.11/site-packages" / module
    package.mkdir(parents=True)
    (package / "__init__.py").touch()


@pytest.fixture
def model(tmp_path: Path) -> Path:
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "config.json").write_text("{}")
    return directory


@pytest.mark.parametrize(
    ("vllm", "mlx", "platform", "workers"),
    [
        (True, True, "linux", [("vllm", "both"), ("mlx", "both")]),
        (True, False, "linux", [("vllm", "both"), ("reference", "both")]),
        (False, True, "linux", [("mlx", "both"), ("reference", "both")]),
        (False, False, "linux", [("reference", "prefill"), ("reference", "decode")]),
        (False, True, "darwin", [("mlx", "prefill"), ("mlx", "decode")]),
    ],
)
def test_workers_follow_what_is_installed(
    tmp_path: Path, model: Path, vllm: bool, mlx: bool, platform: str, workers: list[tuple[str, str]]
) -> None:
    prefix = tmp_path / ".venv"
    if vllm:
        install(tmp_path / ".venv-vllm", "vllm")
    if mlx:
        install(prefix, "mlx_lm")
    settings = machine.describe(model, tmp_path, prefix, platform)
    assert [(worker.engine, worker.role) for worker in settings.workers] == workers
    assert len({worker.name for worker in settings.workers}) == 2
    expected = {"vllm": tmp_path / ".venv-vllm/bin/python"}
    assert [w.python for w in settings.workers] == [expected.get(e, prefix / "bin/python") for e, _ in workers]
    assert "url" not in settings.broker.model_fields_set


def test_sglang_takes_a_worker_for_each_role(tmp_path: Path, model: Path) -> None:
    install(tmp_path / ".venv-sglang", "sglang")
    install(tmp_path / ".venv", "mlx_lm")
    settings = machine.describe(model, tmp_path, tmp_path / ".venv", "linux")
    assert [(worker.name, worker.role) for worker in settings.workers] == [
        ("mlx", "both"),
        ("sglang-prefill", "prefill"),
        ("sglang-decode", "decode"),
    ]
    assert settings.workers[1].python == tmp_path / ".venv-sglang/bin/python"


def test_sglang_for_tests_serves_nobody(tmp_path: Path) -> None:
    install(tmp_path / ".venv-sglang", "sglang")
    (tmp_path / ".venv-sglang/lib/python3.11/site-packages/crossfill_torchvision.py").touch()
    assert list(machine.engines(tmp_path, tmp_path / ".venv", "linux")) == ["reference"]
    assert list(machine.interpreters(tmp_path, tmp_path / ".venv")) == ["sglang"]


def test_vllm_may_live_beside_us(tmp_path: Path) -> None:
    install(tmp_path / "here", "vllm")
    install(tmp_path / "here", "mlx_lm")
    python = tmp_path / "here/bin/python"
    assert machine.engines(tmp_path, tmp_path / "here", "linux") == {"vllm": python, "mlx": python}


def test_a_missing_checkpoint_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="`crossfill model smollm2`"):
        machine.describe(tmp_path / "none", tmp_path, tmp_path, "linux")


def test_the_shim_is_preloaded_for_mlx_on_linux_only(tmp_path: Path) -> None:
    shim = tmp_path / "lib/crossfill_blas.so"
    shim.parent.mkdir()
    shim.touch()
    mlx, vllm = (
        WorkerSettings(name=e, engine=e, model=tmp_path, python=tmp_path / "bin/python") for e in ("mlx", "vllm")
    )
    assert machine.environment(mlx, "linux")["LD_PRELOAD"] == str(shim)
    assert "LD_PRELOAD" not in machine.environment(mlx, "darwin")
    assert "LD_PRELOAD" not in machine.environment(vllm, "linux")
    shim.unlink()
    assert "LD_PRELOAD" not in machine.environment(mlx, "linux")


def test_a_workers_own_variables_win(tmp_path: Path) -> None:
    worker = WorkerSettings(name="w", engine="vllm", model=tmp_path, env={"OMP_NUM_THREADS": "8", "MINE": "1"})
    found = machine.environment(worker, "linux")
    assert (found["OMP_NUM_THREADS"], found["MINE"], found["OPENBLAS_NUM_THREADS"]) == ("8", "1", "1")
