"""Process: what the kernel knows of one. Linux."""

from __future__ import annotations

import os
from pathlib import Path


def cpu_s(pid: int) -> float:
    """CPU seconds of all its threads so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def below(pid: int) -> set[int]:
    """Processes that `pid` has started, and theirs."""
    children: dict[int, set[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except (ProcessLookupError, FileNotFoundError):  # it has ended
            continue
        children.setdefault(int(fields[1]), set()).add(int(stat.parent.name))
    found, ahead = set[int](), [pid]
    while ahead:
        ahead += (more := children.get(ahead.pop(), set()))
        found |= more
    return found


def status_bytes(pid: int, field: str) -> int:
    """A size out of its status: `VmHWM`, the most that was ever resident, or `VmRSS`, what is. Raises KeyError."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    fields = dict(line.split(":", 1) for line in lines)
    return int(fields[field].removesuffix("kB")) * 1024


def reset_peak(pid: int) -> int:
    """`VmHWM` begins anew from what is resident now, which is returned."""
    Path(f"/proc/{pid}/clear_refs").write_text("5")
    return status_bytes(pid, "VmRSS")
