"""Lifeline: a process that `crossfill up` started must not outlive it, however that one ends.

The child ties the rope itself: a hook between fork and exec would run Python in a forked, threaded parent.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time

PR_SET_PDEATHSIG = 1  # prctl(2)
POLL_S = 0.5


def hold(parent: int) -> None:
    """Die by SIGKILL once process `parent` is gone. A parent that ended already ends this process at once.

    Nothing is handed back then: the broker of that set-up is owned by the same parent and dies with it. Linux has
    a kernel hook for it (bound to the parent's starting thread: start children from its main thread).
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    else:
        threading.Thread(target=_watch, args=(parent,), name="lifeline", daemon=True).start()
    if os.getppid() != parent:  # it died before the hook was in place
        os.kill(os.getpid(), signal.SIGKILL)


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(POLL_S)
    os.kill(os.getpid(), signal.SIGKILL)
