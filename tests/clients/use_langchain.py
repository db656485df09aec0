"""langchain-openai: `use_langchain.py URL MODEL`."""

from __future__ import annotations

import sys

from langchain_openai import ChatOpenAI, OpenAI
from question import LIMITS, QUESTION, ROUTE, SCHEMA, TOOL, tell

url, model = sys.argv[1:]
chat = ChatOpenAI(base_url=url, api_key="none", model=model, default_headers=ROUTE, stream_usage=True, **LIMITS)
whole = chat.invoke(QUESTION)
chunks = list(chat.stream(QUESTION))
with_tool = chat.bind_tools([TOOL], tool_choice="required")
call = with_tool.invoke(QUESTION).tool_calls[0]
merged = None
for chunk in with_tool.stream(QUESTION):
    merged = chunk if merged is None else merged + chunk
form = chat.with_structured_output({"title": "Answer", **SCHEMA}, method="json_schema").invoke(QUESTION)
text = OpenAI(base_url=url, api_key="none", model=model, default_headers=ROUTE, **LIMITS)
tell(
    text=whole.content,
    streamed="".join(chunk.content for chunk in chunks),
    usage=whole.usage_metadata["total_tokens"],
    streamed_usage=sum(chunk.usage_metadata["total_tokens"] for chunk in chunks if chunk.usage_metadata),
    model=whole.response_metadata["model_name"],
    call=[call["name"], call["args"]],
    streamed_call=[merged.tool_calls[0]["name"], merged.tool_calls[0]["args"]],
    form=form,
    completions=text.generate(["The capital of France is", "The capital of Italy is"])
    .flatten()[1]
    .generations[0][0]
    .text,
)
