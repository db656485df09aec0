"""Link: a network of two hosts on one machine. A namespace with a veth pair, each end shaped by tc's token bucket.

Needs Linux, root, `ip` and `tc`. Both ways get the same rate; latency is the kernel's own, some 50 us. The far host is
the namespace: a process enters it by `enter`, a command by the prefix `command`. Addresses are of 198.18.0.0/15, which
is set aside for benchmarks (RFC 2544).
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

BURST_BYTES = 128 << 10  # at 1 Gb/s a millisecond: what a timer of the kernel can be late
QUEUE_MS = 20
NAME = "crossfill-bench-"  # and whose it is: the namespace
_NEWNET = 0x40000000
SHAPED = {"85 MB/s": 85e6, "1 Gb/s": 125e6}  # what the original was measured on, and the usual office network


@dataclass(frozen=True, slots=True)
class Link:
    """`near` is this host's address, `far` the namespace's. Rates count Ethernet frames, headers too."""

    namespace: str
    near: str
    far: str
    number: int  # of its devices

    @property
    def command(self) -> list[str]:
        return ["ip", "netns", "exec", self.namespace]

    def reshape(self, bytes_per_s: float) -> None:
        """Another rate, both ways, for what is sent from here on."""
        for prefix, device in self._ends:
            _run(*prefix, "tc", "qdisc", "replace", "dev", device, "root", "tbf", *_bucket(bytes_per_s))

    @property
    def _ends(self) -> tuple[tuple[list[str], str], ...]:
        """How to reach each end, and its device."""
        return ([], f"bn{self.number}"), (self.command, f"bf{self.number}")

    def enter(self) -> None:
        """This thread, and all that it starts from here on, lives on the far host. Raises OSError."""
        with Path("/run/netns", self.namespace).open() as namespace:
            if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), _NEWNET):
                raise OSError(ctypes.get_errno(), f"cannot enter {self.namespace}")


@contextmanager
def shaped(bytes_per_s: float, number: int = 0) -> Iterator[Link]:
    """A link of that rate for the time of the block; those of one process differ in `number`, 0 to 3. Raises
    RuntimeError where it cannot be made."""
    if why := missing():
        raise RuntimeError(f"no shaped link: {why}")
    unique = (os.getpid() % (1 << 12)) << 2 | number
    third, fourth = unique >> 6, (unique & 63) << 2
    _sweep()
    name = f"{NAME}{os.getpid()}-{number}"
    link = Link(name, f"198.18.{third}.{fourth + 1}", f"198.18.{third}.{fourth + 2}", unique)
    try:
        _run("ip", "netns", "add", link.namespace)
        _connect(link)
        link.reshape(bytes_per_s)
        yield link
    finally:
        for command in (("link", "del", f"bn{unique}"), ("netns", "del", link.namespace)):  # either end takes the other
            subprocess.run(["ip", *command], capture_output=True, check=False)  # less is there after half a start


def missing() -> str:
    """Why no link can be made here; empty when it can."""
    if sys.platform != "linux" or os.geteuid():
        return "it takes Linux and root"
    if lacking := [tool for tool in ("ip", "tc") if not shutil.which(tool)]:
        return f"{' and '.join(lacking)} not found: install iproute2"
    probe = f"{NAME}{os.getpid()}-probe"
    made = subprocess.run(["ip", "netns", "add", probe], capture_output=True, text=True, check=False)
    if made.returncode:
        return made.stderr.strip()
    subprocess.run(["ip", "netns", "del", probe], check=False)
    return ""


def _sweep() -> None:
    """Remove what a bench that was killed has left."""
    for path in Path("/run/netns").glob(f"{NAME}*"):
        owner = path.name.removeprefix(NAME).split("-")[0]
        if not Path("/proc", owner).exists():
            subprocess.run(["ip", "netns", "del", path.name], check=False)


def _connect(link: Link) -> None:
    (_, near), (_, far) = link._ends
    _run("ip", "link", "add", near, "type", "veth", "peer", "name", far, "netns", link.namespace)
    for (prefix, device), address in zip(link._ends, (link.near, link.far), strict=True):
        _run(*prefix, "ip", "address", "add", f"{address}/30", "dev", device)
        _run(*prefix, "ip", "link", "set", device, "up")
    _run(*link.command, "ip", "link", "set", "lo", "up")


def _bucket(bytes_per_s: float) -> list[str]:
    return ["rate", f"{int(bytes_per_s * 8)}bit", "burst", str(BURST_BYTES), "latency", f"{QUEUE_MS}ms"]


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
