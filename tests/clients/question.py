"""What every client asks, in one place: a question, a tool and a form whose answers are short and can be checked."""

from __future__ import annotations

import json
from typing import Any

QUESTION = "What is the capital of France?"
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Paris", "Rome"]}, "large": {"type": "boolean"}},
    "required": ["city", "large"],
    "additionalProperties": False,
}
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "look_up", "description": "Facts about a city", "parameters": SCHEMA},
}
ROUTE = {"X-Crossfill-Route": "vllm->mlx"}
LIMITS: dict[str, Any] = {"temperature": 0, "max_tokens": 40}


def tell(**found: object) -> None:
    """One line for the test that started the client."""
    print(json.dumps(found))
