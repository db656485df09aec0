"""`python -m bench [NAME ...]`: run the named benchmarks, or all of them, each with its defaults.

Each ends by itself within minutes; one that does not is stopped after `PATIENCE_S`. At the end stands what each took.
"""

from __future__ import annotations

import subprocess
import sys
import time

from bench import ending

BENCHES = ("router", "scale", "stream", "pagesize", "ticks", "codec", "api", "memory", "ttft", "turns", "links", "load")
PATIENCE_S = 600.0
GRACE_S = 60.0  # for what it has to put away
LATE = 124  # as timeout(1) says it


def main() -> int:
    names = sys.argv[1:] or list(BENCHES)
    if unknown := [name for name in names if name not in BENCHES]:
        print(f"no benchmark called {', '.join(unknown)}: there is {', '.join(BENCHES)}", file=sys.stderr)
        return 2
    lines, worst = [], 0
    with ending.orderly():
        for name in names:
            start = time.monotonic()
            status = run([sys.executable, "-m", f"bench.{name}"], PATIENCE_S)
            lines.append(f"{name}: {time.monotonic() - start:.0f} s" + (f", status {status}" if status else ""))
            worst = max(worst, abs(status))  # negative: the signal that killed it
    print("\n".join(lines))
    return worst


def run(command: list[str], patience_s: float) -> int:
    """Its exit status. It is asked to end when its time is over, or ours, and waited for: it has things to put away."""
    with subprocess.Popen(command) as process:
        try:
            return process.wait(patience_s)
        except subprocess.TimeoutExpired:
            print(f"{' '.join(command)} did not end within {patience_s:.0f} s", file=sys.stderr)
            return LATE
        finally:
            process.terminate()
            try:
                process.wait(GRACE_S)
            except subprocess.TimeoutExpired:
                process.kill()


if __name__ == "__main__":
    sys.exit(main())
