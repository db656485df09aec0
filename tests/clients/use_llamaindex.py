"""LlamaIndex OpenAILike: `use_llamaindex.py URL MODEL`."""

from __future__ import annotations

import sys

from llama_index.core.llms import ChatMessage
from llama_index.llms.openai_like import OpenAILike
from question import QUESTION, ROUTE, TOOL, tell

url, model = sys.argv[1:]
common = {
    "model": model,
    "api_base": url,
    "api_key": "none",
    "temperature": 0,
    "max_tokens": 40,
    "context_window": 2048,
}
chat = OpenAILike(is_chat_model=True, default_headers=ROUTE, **common)
messages = [ChatMessage(role="user", content=QUESTION)]
answer = chat.chat(messages, tools=[TOOL], tool_choice="required")
call = answer.message.additional_kwargs["tool_calls"][0].function
text = OpenAILike(is_chat_model=False, default_headers=ROUTE, **common)
tell(
    text=chat.chat(messages).message.content,
    streamed="".join(part.delta or "" for part in chat.stream_chat(messages)),
    call=[call.name, __import__("json").loads(call.arguments)],
    completions=text.complete("The capital of Italy is").text,
    streamed_completions="".join(part.delta or "" for part in text.stream_complete("The capital of Italy is")),
)
