"""What does an operator hear when a KV pool is larger than the GPU, and does its memory come back?

    python -m ops.gpu.oom MODEL ENGINE [ENGINE ...]

Each engine is loaded in a process of its own with 400 GiB of KV. Exit status 1 unless every one says which setting to
lower and the GPU has as much free memory afterwards as before.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from ops.gpu.system import environment

POOL_BYTES = 400 << 30
_LOAD = """
import json, sys
from pathlib import Path
from pipeline import engines
from pipeline.errors import ConfigError
from pipeline.settings import EngineSettings
try:
    settings = EngineSettings(role="decode", kv_cache_bytes=int(sys.argv[3]), arguments=json.loads(sys.argv[4]))
    engines.load(sys.argv[2], Path(sys.argv[1]), settings)
except ConfigError as error:
    print("ConfigError:", error)
"""


def used_mib() -> int:
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    return int(subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()[0])


def refused(model: str, engine: str, run: Path) -> bool:
    arguments = {"attention_backend": "triton", "disable_cuda_graph": True} if engine == "sglang" else {}
    before = used_mib()
    argv = [sys.executable, "-c", _LOAD, model, engine, str(POOL_BYTES), json.dumps(arguments)]
    env = {**os.environ, **environment(engine, run)}
    done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=240, check=False)
    said = [line for line in done.stdout.splitlines() if line.startswith("ConfigError:")]
    after = used_mib()
    print(json.dumps({"engine": engine, "said": said, "used_mib_before_and_after": [before, after]}), flush=True)
    if not said:
        print(done.stderr[-3000:], flush=True)
    return bool(said) and "kv_cache_bytes" in said[0]


def main() -> None:
    model, *engines = sys.argv[1:]
    with tempfile.TemporaryDirectory() as run:
        sys.exit(0 if sum(refused(model, engine, Path(run)) for engine in engines) == len(engines) else 1)


if __name__ == "__main__":
    main()
