"""`python -m bench [NAME ...]`: run the named benchmarks, or all of them, each with its defaults."""

from __future__ import annotations

import subprocess
import sys

BENCHES = ("router", "scale", "stream", "pagesize", "codec", "api", "memory", "ttft", "turns", "links", "load")


def main() -> int:
    names = sys.argv[1:] or list(BENCHES)
    if unknown := [name for name in names if name not in BENCHES]:
        print(f"no benchmark called {', '.join(unknown)}: there is {', '.join(BENCHES)}", file=sys.stderr)
        return 2
    return max(subprocess.run([sys.executable, "-m", f"bench.{name}"], check=False).returncode for name in names)


if __name__ == "__main__":
    sys.exit(main())
