"""Processes seen from outside."""

from __future__ import annotations

import subprocess
from pathlib import Path


def alive(pid: int) -> bool:
    """Whether process `pid` runs; a zombie that its parent has not reaped does not."""
    if Path("/proc/self/stat").exists():
        try:
            return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
        except (FileNotFoundError, ProcessLookupError):
            return False
    done = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True, check=False)
    return done.stdout.strip() != "" and not done.stdout.startswith("Z")
