"""Oracle: plain SGLang, without our plug-in, greedy: the prompt in chunks, then token after token.

That is the split of a handoff to SGLang: its decode engine gets the KV of the whole prompt and the first token.

Runs as a process of its own in SGLang's environment, without a line of Crossfill. JSON on stdin:
`{"model": dir, "prompts": [[ids], ...], "max_tokens": n, "chunk_tokens": n}`; JSON on the last line of stdout:
`{"outputs": [{"tokens": [...], "margins": [...]}, ...]}` where a margin is the gap in log-probability between the best
two tokens of that step.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

_ENVIRONMENT = {"SGLANG_USE_CPU_ENGINE": "1", "HF_HUB_OFFLINE": "1", "TORCHDYNAMO_DISABLE": "1"}


def build(model: str, chunk_tokens: int) -> Any:
    import sglang

    return sglang.Engine(
        model_path=model,
        skip_tokenizer_init=True,
        device="cpu",
        dtype="float16",
        attention_backend="torch_native",
        page_size=64,
        chunked_prefill_size=chunk_tokens,
        max_total_tokens=8192,
        max_running_requests=4,
        disable_radix_cache=True,
        disable_overlap_schedule=True,
        disable_cuda_graph=True,
        sampling_backend="pytorch",
        grammar_backend="none",
        mem_fraction_static=0.3,
        skip_server_warmup=True,
        log_level="error",
    )


def run(engine: Any, prompt: list[int], max_tokens: int) -> dict[str, list[Any]]:
    """Greedy tokens and top-2 margins of one prompt."""
    params = {"temperature": 0.0, "max_new_tokens": max_tokens, "ignore_eos": True}
    answer = engine.generate(input_ids=prompt, sampling_params=params, return_logprob=True, top_logprobs_num=2)
    steps = answer["meta_info"]["output_top_logprobs"]
    return {"tokens": answer["output_ids"], "margins": [float(step[0][0] - step[1][0]) for step in steps]}


def main() -> None:
    os.environ.update(_ENVIRONMENT)
    task = json.load(sys.stdin)
    engine = build(task["model"], task["chunk_tokens"])
    outputs = [run(engine, prompt, task["max_tokens"]) for prompt in task["prompts"]]
    engine.shutdown()
    print("\n" + json.dumps({"outputs": outputs}))


if __name__ == "__main__":
    main()
