"""Machine: the set-up of one computer when no file describes it. Which engines are here decides.

Two engines give both directions; one alone serves as P and as D in two processes, so pages still cross the broker.
SGLang always takes two: it serves one role per process.
Nothing is imported to find out: an engine lives in an environment of its own and is looked for in its files.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipeline.errors import ConfigError
from pipeline.settings import Settings, WorkerSettings

MODEL = Path("models/smollm2-135m")
VLLM_ENVIRONMENT = Path(".venv-vllm")
SGLANG_ENVIRONMENT = Path(".venv-sglang")
# engine -> the package whose folder proves that it is installed
MODULES = {"vllm": "vllm", "mlx": "mlx_lm", "sglang": "sglang"}
TESTS_ONLY = "crossfill_torchvision.py"  # beside it SGLang is there for tests: slow and incomplete without a GPU


def describe(model: Path, root: Path, prefix: Path, platform: str) -> Settings:
    """Workers for the engines found under `root` (the working directory) and in environment `prefix`. ConfigError."""
    if not (model / "config.json").exists():
        raise ConfigError(f"no checkpoint in {model}: `crossfill model smollm2` writes the sample one, or pass --model")
    found = workers(engines(root, prefix, platform), model)
    return Settings.model_validate({"api": {"model": model}, "workers": found})


def engines(root: Path, prefix: Path, platform: str) -> dict[str, Path]:
    """Engine -> interpreter of its environment, for those that can serve. Where one engine is alone, `reference` is the
    other; MLX on a Mac needs no such help."""
    found = {name: python for name, python in interpreters(root, prefix).items() if not _for_tests(name, python)}
    if len(found) < 2 and not (platform == "darwin" and "mlx" in found):
        found["reference"] = _python(prefix)
    return found


def interpreters(root: Path, prefix: Path) -> dict[str, Path]:
    """The same for all that are installed, though it be for tests only."""
    found: dict[str, Path] = {}
    places = {"vllm": [root / VLLM_ENVIRONMENT, prefix], "mlx": [prefix], "sglang": [root / SGLANG_ENVIRONMENT, prefix]}
    for engine, environments in places.items():
        if environment := next((one for one in environments if _holds(one, MODULES[engine])), None):
            found[engine] = _python(environment)
    return found


def _for_tests(engine: str, python: Path) -> bool:
    site_packages = python.parent.parent.glob("lib/python3*/site-packages")
    return engine == "sglang" and any((folder / TESTS_ONLY).exists() for folder in site_packages)


def _holds(environment: Path, module: str) -> bool:
    return any(environment.glob(f"lib/python3*/site-packages/{module}/__init__.py"))


def _python(environment: Path) -> Path:
    return environment / "bin" / "python"


def workers(found: Mapping[str, Path], model: Path) -> list[dict[str, Any]]:
    """One worker in both roles for each engine, or one in each role where it is alone or can do no other."""
    made = []
    for engine, python in found.items():
        if len(found) > 1 and engine != "sglang":
            made.append(_worker(engine, engine, python, model))
        else:
            roles = ("prefill", "decode")
            made += [_worker(f"{engine}-{role}", engine, python, model) | {"role": role} for role in roles]
    return made


def _worker(name: str, engine: str, python: Path, model: Path) -> dict[str, Any]:
    return {"name": name, "engine": engine, "model": model, "python": python}


def environment(worker: WorkerSettings, platform: str) -> dict[str, str]:
    """Variables that make `worker` run well on a small machine; its own `env` settings win."""
    values = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    if platform == "linux":
        # Threads of two engines on the same few cores fight: a 576x1536 linear went from 0.2 to 11-19 ms.
        values |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    if worker.engine == "vllm":
        values |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "WARNING", "VLLM_NO_USAGE_STATS": "1"}
    if worker.engine == "mlx" and platform == "linux" and (shim := _blas(worker.python)):
        values["LD_PRELOAD"] = str(shim)
    return values | worker.env


def _blas(python: Path | None) -> Path | None:
    """The BLAS shim that `ops/cpu/build_blas_shim.py` put into the environment of `python`, if it is there."""
    prefix = python.parent.parent if python else Path(sys.prefix)  # unresolved: a venv's python is a link
    shim = (prefix / "lib" / "crossfill_blas.so").absolute()
    return shim if shim.exists() else None
