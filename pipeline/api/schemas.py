"""Schemas: what a client may ask, as strict types, and one table of what is refused.

Rules: null is absent; a value that changes nothing is accepted; what we cannot do is refused by name, because
ignoring it would change the answer silently; unknown fields and those without effect on the text are ignored.
Everything here is checked before a prompt is tokenised or a job exists.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from pipeline.errors import InvalidParameterError

MAX_STOPS = 16
MAX_PROMPTS = 16
_MAX_STOP_CHARS = 1000

# field -> the values that ask for nothing (null always is one)
_INERT: dict[str, tuple[object, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "length_penalty": (1,),
    "logit_bias": ({},),
    "min_p": (0,),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "prompt_logprobs": (),
    "tools": ([],),
    "tool_choice": ("none",),
    "functions": ([],),
    "function_call": ("none",),
    "parallel_tool_calls": (False,),
    "response_format": ({"type": "text"},),
    "structured_outputs": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "grammar": (),
    "json_schema": (),
    "suffix": ("",),
    "use_beam_search": (False,),
    "bad_words": ([],),
    "allowed_token_ids": (),
    "min_tokens": (0,),
    "truncate_prompt_tokens": (),
    "prompt_embeds": (),
    "mm_processor_kwargs": (),
    "modalities": (["text"],),
    "audio": (),
    "web_search_options": (),
    "lora": (),
    "adapters": (),
    "chat_template": (),
    "documents": ([],),
    "kv_transfer_params": (),
    "bootstrap_host": (),
    "bootstrap_port": (),
    "bootstrap_room": (),
    "handoff_id": (),
}
_VALUE_OFF = frozenset({"n", "best_of"})  # supported fields of which only one value is

M = TypeVar("M", bound="Ask")


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", frozen=True, allow_inf_nan=False)


def _clean_salt(salt: str) -> str:
    if any(character in salt for character in "@/\\\0"):
        raise ValueError("must not contain @, /, \\ or NUL")
    return salt


TokenId = Annotated[int, Field(ge=0, lt=1 << 32)]
TokenCount = Annotated[int, Field(ge=0, lt=1 << 31)]
PromptText = Annotated[str, Field(min_length=1)]
StopText = Annotated[str, Field(min_length=1, max_length=_MAX_STOP_CHARS)]
Salt = Annotated[str, Field(min_length=1, max_length=128), AfterValidator(_clean_salt)]


class StreamOptions(_Strict):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class Ask(_Strict):
    """What chat and text completions share."""

    model: str | None = None
    max_tokens: TokenCount | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=1 << 31)] | None = None
    seed: Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)] | None = None
    stop: StopText | Annotated[list[StopText], Field(max_length=MAX_STOPS)] | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=128)] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    add_special_tokens: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    cache_salt: Salt | None = None

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @model_validator(mode="after")
    def _options_need_stream(self) -> Any:
        if self.stream_options is not None and not self.stream:
            raise _Refused("stream_options", "`stream_options` is only allowed when `stream` is true")
        return self


class Part(_Strict):
    """A piece of a message's content; only text can be served."""

    type: str
    text: str | None = None
    refusal: str | None = None


class ToolCall(_Strict):
    """A call in the history, passed on to the template as it came."""

    model_config = ConfigDict(extra="allow")
    function: dict[str, Any]


class ChatMessage(_Strict):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[Part] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None


class ChatAsk(Ask):
    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_completion_tokens: TokenCount | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None

    @property
    def wanted_tokens(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @model_validator(mode="after")
    def _one_way_to_go_on(self) -> Any:
        if self.continue_final_message and self.add_generation_prompt:
            raise _Refused(
                "continue_final_message", "`continue_final_message` and `add_generation_prompt` exclude each other"
            )
        return self


class CompletionAsk(Ask):
    """`prompt`: one text, one list of token ids, or a list of either."""

    prompt: (
        PromptText
        | Annotated[list[TokenId], Field(min_length=1)]
        | Annotated[list[PromptText], Field(min_length=1)]
        | Annotated[list[Annotated[list[TokenId], Field(min_length=1)]], Field(min_length=1)]
    )
    echo: bool | None = None

    @property
    def prompts(self) -> list[str | list[int]]:
        if isinstance(self.prompt, str):
            return [self.prompt]
        if isinstance(self.prompt[0], int):
            return [self.prompt]
        return list(self.prompt)

    @model_validator(mode="after")
    def _not_too_many(self) -> Any:
        if len(self.prompts) > MAX_PROMPTS:
            raise _Refused("prompt", f"`prompt` may hold at most {MAX_PROMPTS} prompts")
        return self


class _Refused(ValueError):
    """A rule over several fields, with the one to blame."""

    def __init__(self, param: str, message: str) -> None:
        super().__init__(message)
        self.param = param


def read(kind: type[M], raw: Mapping[str, Any]) -> M:
    """Raises InvalidParameterError with the dotted path of the first fault."""
    present = {name: value for name, value in raw.items() if value is not None}
    _refuse_unsupported(present, inert=("echo",) if kind is ChatAsk else ())
    try:
        return kind.model_validate(present)
    except ValidationError as error:
        raise _explained(error) from None


def _refuse_unsupported(present: Mapping[str, Any], inert: tuple[str, ...]) -> None:
    table = {**_INERT, **dict.fromkeys(inert, (False,))}
    for name, values in table.items():
        if name in present and not any(_same(present[name], value) for value in values):
            code = "unsupported_value" if name in _VALUE_OFF else "unsupported_parameter"
            raise InvalidParameterError(name, f"`{name}` is not supported with this value.", code=code)


def _same(a: object, b: object) -> bool:
    """Equality that keeps true apart from 1."""
    return a == b and isinstance(a, bool) == isinstance(b, bool)


def _explained(error: ValidationError) -> InvalidParameterError:
    found = error.errors(include_url=False)
    same_field = [each for each in found if each["loc"][:1] == found[0]["loc"][:1]]
    first = max(same_field, key=lambda each: len(each["loc"]))  # of a union, the branch that came furthest
    cause = first.get("ctx", {}).get("error")
    if isinstance(cause, _Refused):
        return InvalidParameterError(cause.param, f"{cause}.")
    path = _path(first["loc"])
    return InvalidParameterError(path or None, f"Invalid value for `{path}`: {first['msg']}.")


def _path(loc: tuple[int | str, ...]) -> str:
    """`messages[0].content`; the branches of a union, which pydantic names in the path, are left out."""
    path = ""
    for item in loc:
        if isinstance(item, int):
            path += f"[{item}]"
        elif item.isidentifier() and item not in ("str", "int"):
            path += f".{item}" if path else item
    return path
