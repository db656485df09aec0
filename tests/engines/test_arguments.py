"""Arguments of an operator beside those that Crossfill sets."""

from __future__ import annotations

import pytest

from pipeline.engines.arguments import checked
from pipeline.errors import ConfigError


def test_arguments_of_an_operator_are_checked() -> None:
    known, ours = {"attention_backend", "page_size"}, {"page_size"}
    assert checked("SGLang", {"attention_backend": "triton"}, known, ours) == {"attention_backend": "triton"}
    with pytest.raises(ConfigError, match="this SGLang has no argument 'attention_bakend'"):
        checked("SGLang", {"attention_bakend": "triton"}, known, ours)
    with pytest.raises(ConfigError, match="'page_size' is set by Crossfill"):
        checked("SGLang", {"page_size": 1}, known, ours)
