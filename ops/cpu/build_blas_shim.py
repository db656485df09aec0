"""Compile `blas_shim.c` against the OpenBLAS of this environment's numpy, for MLX on a Linux CPU.

    .venv/bin/python ops/cpu/build_blas_shim.py [TARGET]      # default: <prefix>/lib/crossfill_blas.so

Prints the path of the library, which a worker loads through LD_PRELOAD. Where it cannot be built (another system,
no C compiler, a numpy without its own OpenBLAS) it says why on stderr, prints nothing and exits 0: MLX then runs on
its own BLAS, about ten times slower. Build again after numpy was upgraded: the library names numpy's file.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

SOURCE = Path(__file__).with_name("blas_shim.c")


class CannotBuildError(Exception):
    """Why this environment stays with the BLAS it has."""


def default_target() -> Path:
    return Path(sys.prefix) / "lib" / "crossfill_blas.so"


def find_openblas() -> Path:
    """numpy's OpenBLAS with 64-bit indices. Raises CannotBuildError when this numpy has none."""
    from importlib.util import find_spec  # found, not imported: importing numpy would start its threads

    spec = find_spec("numpy")
    if spec is None or spec.origin is None:
        raise CannotBuildError("numpy is not installed here")
    libraries = Path(spec.origin).parent.with_name("numpy.libs")
    found = sorted(libraries.glob("libscipy_openblas64_*.so*"))
    if not found:
        raise CannotBuildError(f"no libscipy_openblas64_ in {libraries}")
    return found[0]


def find_compiler() -> str:
    if sys.platform != "linux":
        raise CannotBuildError(f"only needed on Linux, this is {sys.platform}")
    for name in filter(None, (os.environ.get("CC"), "cc", "gcc", "clang")):
        if path := shutil.which(name):
            return path
    raise CannotBuildError("no C compiler: install gcc or clang")


def build(target: Path) -> Path:
    """Compile into `target`, atomically. Raises CannotBuildError with the compiler's words."""
    openblas = find_openblas()
    partial = target.with_suffix(f".{os.getpid()}")
    command = [find_compiler(), "-O2", "-shared", "-fPIC", "-Wall", "-Wextra", "-o", str(partial), str(SOURCE)]
    command += [str(openblas), f"-Wl,-rpath,{openblas.parent}", "-Wl,--no-undefined"]
    target.parent.mkdir(parents=True, exist_ok=True)
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        partial.unlink(missing_ok=True)
        raise CannotBuildError(f"{' '.join(command)} failed:\n{done.stderr}")
    partial.replace(target)
    return target


def main(arguments: list[str]) -> int:
    target = Path(arguments[0]) if arguments else default_target()
    try:
        print(build(target))
    except CannotBuildError as error:
        print(f"no fast BLAS for MLX: {error}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
