"""What is used of mlx-lm, imported in one place: importing it lowers the limit of open files, a server needs that.

The limit is kept by making the call a no-op while the import runs: a hard limit once lowered could only be raised
again by root.
"""

from __future__ import annotations

import resource
from unittest import mock

with mock.patch.object(resource, "setrlimit"):
    from mlx_lm.models.cache import BatchKVCache, KVCache, make_prompt_cache
    from mlx_lm.utils import load_model

__all__ = ["BatchKVCache", "KVCache", "load_model", "make_prompt_cache"]
