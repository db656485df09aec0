"""Served: the models behind this edge, as far as the edge must know them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

from pipeline import checkpoint
from pipeline.api.text import Text
from pipeline.contract import Contract
from pipeline.errors import ConfigError, ContextLengthError, InvalidParameterError, ModelNotFoundError
from pipeline.settings import ApiSettings, ModelSettings


@dataclass(frozen=True, slots=True)
class Served:
    """`created` is Unix seconds; `eos_token_ids` end an answer unless the client asks otherwise."""

    name: str
    text: Text
    contract: Contract
    eos_token_ids: tuple[int, ...]
    created: int
    aliases: tuple[str, ...] = ()

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

    def room(self, prompt_tokens: int, param: str) -> int:
        """How many tokens may follow the prompt, at least one. Raises ContextLengthError."""
        limit = self.contract.context_length
        if prompt_tokens >= limit:
            raise ContextLengthError(limit, prompt_tokens, param)
        return limit - prompt_tokens


class Catalogue:
    """The models by every name they have. A request may leave the name out where there is one model only."""

    def __init__(self, models: Sequence[Served]) -> None:
        """Raises ConfigError when two models share a name."""
        self.all = tuple(models)
        self._by_name: dict[str, Served] = {}
        for name, model in chain.from_iterable(((name, m) for name in (m.name, *m.aliases)) for m in models):
            if self._by_name.setdefault(name, model) is not model:
                raise ConfigError(f"api.models: two models are called {name!r}: give one another served_name or alias")

    @property
    def default(self) -> Served:
        return self.all[0]

    def find(self, name: str | None) -> Served:
        """Raises ModelNotFoundError, InvalidParameterError for none where several could be meant."""
        if not name and len(self.all) > 1:
            named = ", ".join(f"`{model.name}`" for model in self.all)
            raise InvalidParameterError("model", f"`model` is missing, and several are served here: {named}.")
        if not name:
            return self.default
        if name not in self._by_name:
            raise ModelNotFoundError(f"The model `{name}` does not exist.")
        return self._by_name[name]


def load(settings: ApiSettings, created: int) -> Catalogue:
    """Read tokenizer, template and contract of every model directory. Raises ConfigError."""
    return Catalogue([_load(each, created) for each in (settings, *settings.models)])


def _load(settings: ModelSettings, created: int) -> Served:
    if not settings.model.is_dir():
        raise ConfigError(f"api.model: {settings.model} is not a directory: point it to a checkpoint")
    return Served(
        name=settings.name,
        text=Text.load(settings.model),
        contract=checkpoint.read_contract(settings.model),
        eos_token_ids=checkpoint.eos_token_ids(settings.model),
        created=created,
        aliases=settings.aliases,
    )
