"""Seeds: every request draws by its own seed and position, whatever else is in the batch.

SGLang has such a sampler but uses it in its "deterministic" mode only, which also changes attention. The worker gives
every request a seed, so each batch gets the tensor that mode would have made.
"""

from __future__ import annotations

from typing import Any

import torch


def add_seeds(info: Any, *arguments: Any, **named: Any) -> Any:
    """After `SamplingBatchInfo.from_schedule_batch(batch, vocab_size)`; as it is a classmethod, the class may lead."""
    batch = named.get("batch") or next(one for one in arguments if hasattr(one, "reqs"))
    seeds = [request.sampling_params.sampling_seed or 0 for request in batch.reqs]
    info.sampling_seed = torch.tensor(seeds, dtype=torch.int64, device=batch.device)
    return info
