"""The system under measurement on one GPU: broker, API and a worker per engine, each in a process of its own.

    python -m ops.gpu.system up MODEL RUN.json --engines sglang,mlx      # until SIGTERM; RUN.json says where it is
    python -m ops.gpu.system join MODEL RUN.json --engines vllm          # one worker more; returns once it is ready

`pairs`, `ttft` and `soak` beside this file start a system of their own, or take the one of `--at RUN.json`.

Each engine's packages are looked for in the folder that CROSSFILL_SITE_<ENGINE> names, else in its own environment.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import httpx
from redis import Redis

from bench.fleet import READY_S, free_port, running
from pipeline.cli import config, machine
from pipeline.cli.fleet import Fleet
from pipeline.settings import Settings

ROOT = Path(__file__).parents[2]
ONE_ROLE = ("sglang",)  # a worker of it prefills or decodes, and its decoder computes no prompt: no `local:` route
Gauges = dict[str, dict[str, int]]


class System:
    """A running system, seen as a client and an operator see it."""

    def __init__(self, url: str, broker_url: str, model: Path) -> None:
        self.url = url
        self.broker_url = broker_url
        self.model = model
        self.http = httpx.Client(base_url=url, timeout=120)
        self.broker = Redis.from_url(broker_url)

    def close(self) -> None:
        self.http.close()
        self.broker.close()

    def complete(self, prompt: Sequence[int], route: str, tokens: int) -> dict[str, Any]:
        """Greedy, with a salt of its own. Raises RuntimeError when the answer is an error."""
        headers = {"X-Crossfill-Route": route, "X-Crossfill-Trace": "1"}
        answer = self.http.post("/v1/completions", json=self.body(prompt, tokens), headers=headers)
        if answer.status_code != 200:
            raise RuntimeError(f"{route} at {len(prompt)} tokens: {answer.text}")
        result: dict[str, Any] = answer.json()
        return result

    def body(self, prompt: Sequence[int], tokens: int) -> dict[str, Any]:
        return {
            "model": self.model.name,
            "prompt": list(prompt),
            "max_tokens": tokens,
            "temperature": 0,
            "ignore_eos": True,
            "cache_salt": secrets.token_hex(8),
        }

    def settled(self, timeout_s: float = 60.0) -> Gauges:
        """Every replica's gauges once nothing is in flight anywhere. Raises RuntimeError naming what stays behind."""
        deadline = time.monotonic() + timeout_s
        while left := self._busy():
            if time.monotonic() > deadline:
                raise RuntimeError(f"left behind after {timeout_s:g} s: {json.dumps(left)}")
            time.sleep(0.1)
        return {one["name"]: one["stats"] for one in self._status()["replicas"]}

    def _status(self) -> dict[str, Any]:
        return dict(self.http.get("/status").json())

    def _busy(self) -> dict[str, Any]:
        """What is not at rest, by name: live handoffs, keys, bytes in flight, and each replica's gauges."""
        status = self._status()
        keys = [key.decode() for key in self.broker.scan_iter("cf:*", count=1000) if b"{" in key]
        found: dict[str, Any] = {"live": status["live"], "keys": keys}
        found["bytes"] = int(self.broker.get("cf:budget:total") or 0)
        for one in status["replicas"]:
            gauges = {name: one["stats"][name] for name in ("running", "held_pages")} | one["load"]
            found[one["name"]] = {name: value for name, value in gauges.items() if value}
        return {name: value for name, value in found.items() if value}


def environment(engine: str, directory: Path) -> dict[str, str]:
    """What the worker of `engine` needs beside this process's own variables."""
    site = os.environ.get(f"CROSSFILL_SITE_{engine.upper()}")
    if site is None:
        return {}
    places = [str(ROOT), site, os.environ.get("PYTHONPATH", "")]
    values = {"PYTHONPATH": os.pathsep.join([*places, *([_metadata(directory)] if engine == "sglang" else [])])}
    if engine == "mlx":  # it finds CUDA's libraries by the loader's path only
        folders = Path(sys.prefix).glob("lib/python3*/site-packages/nvidia/*/lib")
        values["LD_LIBRARY_PATH"] = os.pathsep.join([*map(str, folders), os.environ.get("LD_LIBRARY_PATH", "")])
    return values


def _metadata(directory: Path) -> str:
    """A folder that makes this checkout look installed: SGLang finds plug-ins by their entry points only."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    info = directory / "site" / f"{project['name']}-0.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: 0\n")
    groups = project["entry-points"].items()
    lines = [f"[{group}]\n" + "".join(f"{name} = {value}\n" for name, value in one.items()) for group, one in groups]
    (info / "entry_points.txt").write_text("\n".join(lines))
    return str(info.parent)


def workers(options: argparse.Namespace, engines: Sequence[str], directory: Path) -> list[dict[str, Any]]:
    """One replica of each engine in both roles, or two with one each."""
    found = machine.interpreters(Path(), Path(sys.prefix))
    engine_settings = {
        "chunk_tokens": options.chunk,
        "kv_cache_bytes": options.kv_mib << 20,
        "prefix_cache_bytes": options.kv_mib << 18,
        "held_pages": 4096,
        "max_running": options.running,
    }
    return [
        {
            "name": f"{engine}-{role}",
            "engine": engine,
            "role": role,
            "model": options.model.resolve(),
            "env": environment(engine, directory),
            "python": found.get(engine, Path(sys.executable)),
            "slots": options.slots,
            "engine_settings": engine_settings
            | ({"arguments": json.loads(options.sglang)} if engine == "sglang" else {}),
        }
        for engine in engines
        for role in (("prefill", "decode") if engine in ONE_ROLE else ("both",))
    ]


def settings(options: argparse.Namespace, engines: Sequence[str], directory: Path) -> Settings:
    """Policy `fail`: a silent recompute would pass for a handoff."""
    return Settings.model_validate(
        {
            "api": {"model": options.model.resolve(), "port": free_port()},
            "broker": {"budget_bytes": options.budget_mib << 20},
            "handoff": {"failure_policy": "fail"},
            "workers": workers(options, engines, directory),
        }
    )


@contextmanager
def launched(options: argparse.Namespace, engines: Sequence[str]) -> Iterator[tuple[Fleet, Path]]:
    """A fleet that is ready, and its folder."""
    with tempfile.TemporaryDirectory() as run, running(settings(options, engines, Path(run)), Path(run)) as fleet:
        yield fleet, Path(run)


@contextmanager
def opened(options: argparse.Namespace) -> Iterator[System]:
    """The system of `--at`, else one of our own."""
    if options.at is not None:
        at = json.loads(options.at.read_text())
        with closing(System(at["url"], at["broker"], options.model)) as system:
            yield system
        return
    with (
        launched(options, options.engines.split(",")) as (fleet, _),
        closing(System(fleet.url, fleet.settings.broker.url, options.model)) as system,
    ):
        yield system


def up(options: argparse.Namespace) -> None:
    """Serve until SIGTERM; `options.result` says where, once all is ready."""
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    with launched(options, options.engines.split(",")) as (fleet, run):
        at = {"url": fleet.url, "broker": fleet.settings.broker.url, "directory": str(run)}
        options.result.write_text(json.dumps(at))
        print("ready:", options.result, flush=True)
        stop.wait()


def join(options: argparse.Namespace) -> None:
    """Start workers beside a running system, in sessions of their own, and wait until they serve."""
    at = json.loads(options.result.read_text())
    run = Path(at["directory"])
    more = Settings.model_validate(
        {"broker": {"url": at["broker"]}, "workers": workers(options, options.engines.split(","), run)}
    )
    theirs = config.load(run / "settings.json", {})
    file = run / "joined.json"
    config.save(theirs.model_copy(update={"workers": more.workers}), file)
    for worker in more.workers:
        log = (run / f"{worker.name}.log").open("w")
        argv = [str(worker.python), "-m", "pipeline", "worker", "--config", str(file), "--name", worker.name]
        env = {**os.environ, **worker.env}
        subprocess.Popen(argv, env=env, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
    system = System(at["url"], at["broker"], options.model)
    wanted, deadline = {worker.name for worker in more.workers}, time.monotonic() + READY_S
    while not wanted <= {one["name"] for one in system._status()["replicas"]}:
        if time.monotonic() > deadline:
            raise RuntimeError("".join((run / f"{name}.log").read_text()[-3000:] for name in wanted))
        time.sleep(0.5)
    print("joined:", *wanted, flush=True)


def machine_line() -> dict[str, Any]:
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    found = shutil.which(query[0]) is not None
    gpu = subprocess.run(query, capture_output=True, text=True, check=False).stdout.strip() if found else "none"
    return {"gpu": gpu, "cores": os.cpu_count(), "python": sys.version.split()[0]}


def save(options: argparse.Namespace, result: dict[str, Any]) -> None:
    """Write a result with what it was measured on."""
    about = {
        "machine": machine_line(),
        "model": f"{options.model.name}: random FP16 weights",
        "engines": options.engines.split(","),
        "chunk_tokens": options.chunk,
        "budget_mib": options.budget_mib,
    }
    options.result.write_text(json.dumps(about | result, indent=2) + "\n")
    print("written:", options.result, flush=True)


def arguments(doc: str | None) -> argparse.ArgumentParser:
    """What every piece understands."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("result", type=Path)
    parser.add_argument("--engines", default="vllm,mlx")
    parser.add_argument("--at", type=Path, help="RUN.json of a system that runs already")
    parser.add_argument("--chunk", type=int, default=1024)
    parser.add_argument("--kv-mib", type=int, default=4096)
    parser.add_argument("--sglang", default="{}", help="JSON: more of SGLang's arguments")
    parser.add_argument("--slots", type=int, default=16, help="jobs at once, per worker and role")
    parser.add_argument("--running", type=int, default=16, help="requests that an engine steps at once")
    parser.add_argument("--budget-mib", type=int, default=256)
    return parser


def main() -> None:
    what, *rest = sys.argv[1:] or ["--help"]
    {"up": up, "join": join}[what](arguments(__doc__).parse_args(rest))


if __name__ == "__main__":
    main()
