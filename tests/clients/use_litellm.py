"""LiteLLM: `use_litellm.py URL MODEL`."""

from __future__ import annotations

import json
import sys

import litellm
from question import LIMITS, QUESTION, ROUTE, SCHEMA, TOOL, tell

url, model = sys.argv[1:]
common = {"model": f"openai/{model}", "api_base": url, "api_key": "none", "extra_headers": ROUTE, **LIMITS}
messages = [{"role": "user", "content": QUESTION}]
whole = litellm.completion(messages=messages, **common)
chunks = list(litellm.completion(messages=messages, stream=True, stream_options={"include_usage": True}, **common))
called = litellm.completion(messages=messages, tools=[TOOL], tool_choice="required", **common)
parts = list(litellm.completion(messages=messages, tools=[TOOL], tool_choice="required", stream=True, **common))
rebuilt = litellm.stream_chunk_builder(parts)
response_format = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA, "strict": True}}
form = litellm.completion(messages=messages, response_format=response_format, **common)
try:
    litellm.completion(messages=[{"role": "user", "content": "word " * 30_000}], **common)
    refusal = "none"
except litellm.ContextWindowExceededError:
    refusal = "context window"


def call(answer: litellm.ModelResponse) -> list[object]:
    function = answer.choices[0].message.tool_calls[0].function
    return [function.name, json.loads(function.arguments)]


tell(
    text=whole.choices[0].message.content,
    streamed="".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices),
    usage=whole.usage.total_tokens,
    streamed_usage=sum(chunk.usage.total_tokens for chunk in chunks if getattr(chunk, "usage", None)),
    model=whole.model,
    call=call(called),
    streamed_call=call(rebuilt),
    form=json.loads(form.choices[0].message.content),
    refusal=refusal,
)
