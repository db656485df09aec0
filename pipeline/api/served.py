"""Served: the one model behind this edge, as far as the edge must know it."""

from __future__ import annotations

from dataclasses import dataclass

from pipeline import checkpoint
from pipeline.api.text import Text
from pipeline.contract import Contract
from pipeline.errors import ConfigError, ContextLengthError, ModelNotFoundError
from pipeline.settings import ApiSettings


@dataclass(frozen=True, slots=True)
class Served:
    """`created` is Unix seconds; `eos_token_ids` end an answer unless the client asks otherwise."""

    name: str
    text: Text
    contract: Contract
    eos_token_ids: tuple[int, ...]
    created: int

    @property
    def fingerprint(self) -> str:
        return f"crossfill-{self.contract.digest[:8]}"

    @property
    def card(self) -> dict[str, object]:
        """The entry of `/v1/models`."""
        return {
            "id": self.name,
            "object": "model",
            "created": self.created,
            "owned_by": "crossfill",
            "root": self.name,
            "parent": None,
            "max_model_len": self.contract.context_length,
        }

    def require(self, name: str | None) -> None:
        """Nothing named means this model. Raises ModelNotFoundError."""
        if name and name != self.name:
            raise ModelNotFoundError(f"The model `{name}` does not exist.")

    def room(self, prompt_tokens: int, param: str) -> int:
        """How many tokens may follow the prompt, at least one. Raises ContextLengthError."""
        limit = self.contract.context_length
        if prompt_tokens >= limit:
            raise ContextLengthError(limit, prompt_tokens, param)
        return limit - prompt_tokens


def load(settings: ApiSettings, created: int) -> Served:
    """Read tokenizer, template and contract of the model directory. Raises ConfigError."""
    if not settings.model.is_dir():
        raise ConfigError(f"api.model: {settings.model} is not a directory: point it to a checkpoint")
    return Served(
        name=settings.served_name or settings.model.name,
        text=Text.load(settings.model),
        contract=checkpoint.read_contract(settings.model),
        eos_token_ids=checkpoint.eos_token_ids(settings.model),
        created=created,
    )
