"""Schemas: what a client may ask, as strict types, and one table of what is refused.

Rules: null is absent; a value that changes nothing is accepted; what we cannot do is refused by name, because
ignoring it would change the answer silently; unknown fields and those without effect on the text are ignored.
The first fault ends the reading of a list or a mapping of a length of its own: pydantic notes one for each item.
Everything here is checked before a prompt is tokenised or a job exists.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from pipeline import grammar
from pipeline.errors import InvalidParameterError
from pipeline.request import MAX_LOGPROBS, MAX_SAMPLES

MAX_STOPS = 16
MAX_PROMPTS = 16
_MAX_STOP_CHARS = 1000
_MAX_BIASES = 1024
_MAX_TOOLS = 128
_MAX_PATH_CHARS = 200  # keys of a client's own are named in a path

# field -> the values that ask for nothing (null always is one)
_INERT: dict[str, tuple[object, ...]] = {
    "length_penalty": (1,),
    "prompt_logprobs": (),
    "functions": ([],),  # what `tools` were before 2023
    "function_call": ("none",),
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
# What one of the two endpoints does not have.
_CHAT_INERT: dict[str, tuple[object, ...]] = {"echo": (False,), "best_of": (1,), "prompt": ()}
_TEXT_INERT: dict[str, tuple[object, ...]] = {
    "tools": ([],),
    "tool_choice": ("none",),
    "parallel_tool_calls": (True, False),
    "top_logprobs": (0,),
    "messages": (),
}

M = TypeVar("M", bound="Ask")
S = TypeVar("S", bound="Strict")


class Strict(BaseModel):
    """Types are what they are: no number from a text, no NaN; unknown fields are ignored."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True, allow_inf_nan=False)


def _clean_salt(salt: str) -> str:
    if any(character in salt for character in "@/\\\0"):
        raise ValueError("must not contain @, /, \\ or NUL")
    return salt


TokenId = Annotated[int, Field(ge=0, lt=1 << 32)]
TokenCount = Annotated[int, Field(ge=0, lt=1 << 31)]
TokenIds = Annotated[list[TokenId], Field(min_length=1, fail_fast=True)]
PromptText = Annotated[str, Field(min_length=1)]
StopText = Annotated[str, Field(min_length=1, max_length=_MAX_STOP_CHARS)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
BiasKey = Annotated[str, Field(pattern=r"^[0-9]{1,9}$")]  # a token id; JSON has text keys only
Bias = Annotated[float, Field(ge=-100, le=100)]
Salt = Annotated[str, Field(min_length=1, max_length=128), AfterValidator(_clean_salt)]


class JsonSchema(Strict):
    """`strict` changes nothing: the text is always held to the schema."""

    name: str | None = None
    schema_: Annotated[dict[str, Any], Field(alias="schema")]


class ResponseFormat(Strict):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _schema_is_there(self) -> Any:
        if self.type == "json_schema" and self.json_schema is None:
            raise _Refused("response_format.json_schema", "`response_format.json_schema` is missing")
        return self

    @property
    def grammar(self) -> str | None:
        """What the text must match, as the engines are told."""
        if self.type == "json_object":
            return grammar.encode("json_object", True)
        return grammar.encode("json_schema", self.json_schema.schema_) if self.json_schema else None


class StreamOptions(Strict):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class Ask(Strict):
    """What chat and text completions share."""

    model: str | None = None
    max_tokens: TokenCount | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=1 << 31)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=10)] | None = None
    logit_bias: Annotated[dict[BiasKey, Bias], Field(max_length=_MAX_BIASES, fail_fast=True)] | None = None
    min_tokens: TokenCount | None = None
    n: Annotated[int, Field(ge=1, le=MAX_SAMPLES)] | None = None
    response_format: ResponseFormat | None = None
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
    def samples(self) -> int:
        return self.n or 1

    @property
    def alternatives(self) -> int | None:
        """How many likely tokens are told beside each sampled one; None: no log-probabilities at all."""
        return None

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @model_validator(mode="after")
    def _a_grammar_ends_the_text(self) -> Any:
        if self.response_format is not None and self.response_format.grammar is not None:
            for name in ("ignore_eos", "min_tokens"):
                if getattr(self, name):
                    raise _Refused(name, f"`{name}` and a `response_format` of JSON exclude each other")
        return self

    @model_validator(mode="after")
    def _options_need_stream(self) -> Any:
        if self.stream_options is not None and not self.stream:
            raise _Refused("stream_options", "`stream_options` is only allowed when `stream` is true")
        return self


class Part(Strict):
    """A piece of a message's content; only text can be served."""

    type: str
    text: str | None = None
    refusal: str | None = None


class Function(Strict):
    name: Annotated[str, Field(pattern=r"^[\w.-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None


class Tool(Strict):
    type: Literal["function"]
    function: Function


class FunctionName(Strict):
    name: str


class NamedChoice(Strict):
    type: Literal["function"]
    function: FunctionName


class ToolCall(Strict):
    """A call in the history, passed on to the template as it came."""

    model_config = ConfigDict(extra="allow")
    function: dict[str, Any]


class ChatMessage(Strict):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[Part], Field(fail_fast=True)] | None = None
    name: str | None = None
    tool_calls: Annotated[list[ToolCall], Field(fail_fast=True)] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None


class ChatAsk(Ask):
    messages: Annotated[list[ChatMessage], Field(min_length=1, fail_fast=True)]
    max_completion_tokens: TokenCount | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    enable_thinking: bool | None = None  # short for the option of that name in `chat_template_kwargs`
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    tools: Annotated[list[Tool], Field(max_length=_MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedChoice | None = None
    parallel_tool_calls: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None

    @property
    def alternatives(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def forced(self) -> str | None:
        """The tool that must be called, "required" for any of them, None where the model chooses."""
        if isinstance(self.tool_choice, NamedChoice):
            return self.tool_choice.function.name
        return "required" if self.tool_choice == "required" else None

    @property
    def template_options(self) -> dict[str, Any]:
        thinking = {} if self.enable_thinking is None else {"enable_thinking": self.enable_thinking}
        return thinking | (self.chat_template_kwargs or {})

    @model_validator(mode="after")
    def _top_needs_logprobs(self) -> Any:
        if self.top_logprobs and not self.logprobs:
            raise _Refused("top_logprobs", "`top_logprobs` is only allowed when `logprobs` is true")
        return self

    @model_validator(mode="after")
    def _a_tool_to_call(self) -> Any:
        names = [tool.function.name for tool in self.tools or ()]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise _Refused("tools", f"two `tools` are called `{twice[0]}`")
        if self.forced and not names:
            raise _Refused("tool_choice", "`tool_choice` is only allowed when `tools` are given")
        if isinstance(self.tool_choice, NamedChoice) and self.forced not in names:
            raise _Refused("tool_choice", f"`tool_choice` names `{self.forced}`, which is none of the `tools`")
        return self

    @model_validator(mode="after")
    def _one_form_for_the_text(self) -> Any:
        strict = self.response_format is not None and self.response_format.grammar is not None
        if strict and self.tools and self.tool_choice != "none":
            raise _Refused("response_format", "`response_format` of JSON needs `tool_choice` `none`: one of the two")
        for name in ("ignore_eos", "min_tokens"):
            if self.forced and getattr(self, name):
                raise _Refused(name, f"`{name}` and a tool that must be called exclude each other")
        return self

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
        | TokenIds
        | Annotated[list[PromptText], Field(min_length=1, fail_fast=True)]
        | Annotated[list[TokenIds], Field(min_length=1, fail_fast=True)]
    )
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    best_of: Annotated[int, Field(ge=1)] | None = None

    @property
    def alternatives(self) -> int | None:
        return self.logprobs

    @property
    def prompts(self) -> list[str | list[int]]:
        if isinstance(self.prompt, str):
            return [self.prompt]
        if isinstance(self.prompt[0], int):
            return [self.prompt]
        return list(self.prompt)

    @model_validator(mode="after")
    def _all_samples_are_answers(self) -> Any:
        if self.best_of is not None and self.best_of != self.samples:
            raise _Refused("best_of", "`best_of` must equal `n`: samples are not ranked here")
        return self

    @model_validator(mode="after")
    def _echo_is_not_scored(self) -> Any:
        if self.echo and self.logprobs is not None:
            raise _Refused("logprobs", "`logprobs` of an echoed prompt are not computed: leave out one of the two")
        return self

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
    _refuse_unsupported(present, _INERT | (_CHAT_INERT if issubclass(kind, ChatAsk) else _TEXT_INERT))
    if issubclass(kind, CompletionAsk) and present.get("logprobs") is False:
        del present["logprobs"]  # as a chat says that it wants none
    return read_strict(kind, present)


def read_strict(kind: type[S], present: Mapping[str, Any]) -> S:
    """Raises InvalidParameterError with the dotted path of the first fault."""
    try:
        return kind.model_validate(present)
    except ValidationError as error:
        raise _explained(error) from None


def _refuse_unsupported(present: Mapping[str, Any], table: Mapping[str, tuple[object, ...]]) -> None:
    for name, values in table.items():
        if name in present and not any(_same(present[name], value) for value in values):
            message = f"`{name}` is not supported with this value."
            raise InvalidParameterError(name, message, code="unsupported_parameter")


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
    return path[:_MAX_PATH_CHARS]
