"""Oracle: plain vLLM, without our connector, greedy at the split that a handoff makes.

The first prompt-1 tokens are computed in chunks, then the last token alone: the same sums in the same order as on a
decode engine that imported the rest, so tokens must be equal, not merely close. The split is made by lowering the
scheduler's token budget step by step; the prefix cache is off. Ours is only the choice of CPU kernels (`linear`).

Runs as a process of its own in vLLM's environment. JSON on stdin: `{"model": dir, "prompts": [[ids], ...],
"max_tokens": n, "chunk_tokens": n}`; JSON on stdout: `{"outputs": [{"tokens": [...], "margins": [...]}, ...]}` where a
margin is the gap in log-probability between the best two tokens of that step.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

sys.path.insert(0, ".")

from pipeline.engines.vllm import linear

_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "HF_HUB_OFFLINE": "1",
}


def build(model: str, chunk_tokens: int) -> Any:
    from vllm import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine

    return LLMEngine.from_engine_args(
        EngineArgs(
            model=model,
            dtype="float16",
            skip_tokenizer_init=True,
            generation_config="vllm",
            enforce_eager=True,
            block_size=64,
            max_num_seqs=1,
            max_num_batched_tokens=chunk_tokens,
            kv_cache_memory_bytes=1 << 28,
            enable_prefix_caching=False,
            async_scheduling=False,
            disable_log_stats=True,
        )
    )


def run(engine: Any, prompt: list[int], max_tokens: int, chunk_tokens: int) -> dict[str, list[Any]]:
    """Greedy tokens and top-2 margins of one prompt."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    scheduler = engine.engine_core.engine_core.scheduler
    params = SamplingParams(
        temperature=0.0,
        max_tokens=max_tokens,
        ignore_eos=True,
        detokenize=False,
        logprobs=2,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )
    engine.add_request("oracle", {"prompt_token_ids": prompt}, params)
    left, finished = len(prompt) - 1, None
    while finished is None:
        scheduler.max_num_scheduled_tokens = min(chunk_tokens, left) or 1
        left -= min(chunk_tokens, left)
        finished = next(iter(engine.step()), None)
    completion = finished.outputs[0]
    return {"tokens": list(completion.token_ids), "margins": [_margin(step) for step in completion.logprobs]}


def _margin(step: dict[int, Any]) -> float:
    best, second = sorted((one.logprob for one in step.values()), reverse=True)[:2]
    return float(best - second)


def main() -> None:
    os.environ.update(_ENVIRONMENT)
    task = json.load(sys.stdin)
    engine = build(task["model"], task["chunk_tokens"])
    if linear.wanted("auto"):  # the kernels that the engine under test has on this processor: equal, not merely close
        linear.widen(engine.model_executor.driver_worker.worker.model_runner.model)
    outputs = [run(engine, prompt, task["max_tokens"], task["chunk_tokens"]) for prompt in task["prompts"]]
    print("\n" + json.dumps({"outputs": outputs}))


if __name__ == "__main__":
    main()
