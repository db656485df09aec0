"""What a lossy codec changes: the arithmetic against plain numpy, and a tiny model from end to end."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from bench import quality
from bench.quality import Passage
from pipeline.codec import CODECS
from pipeline.engines.reference import ReferenceEngine
from pipeline.engines.reference.model import Model
from pipeline.engines.reference.oracle import split_run
from pipeline.settings import EngineSettings
from tests.engines.flow import prompt

TINY = Path("models/tiny-llama")


def test_distance_of_two_distributions() -> None:
    p, q = np.array([0.5, 0.25, 0.25]), np.array([0.25, 0.5, 0.25])
    found = quality.distance(np.log([p, p]).astype(np.float32), np.log([q, p]).astype(np.float32), [0, 0])
    divergence = float((p * np.log(p / q)).sum())
    assert found["kl_max"] == pytest.approx(divergence, rel=1e-5)
    assert found["kl_mean"] == pytest.approx(divergence / 2, rel=1e-5)
    assert found["best_equal"] == 0.5
    assert found["nll"] == pytest.approx(np.log(2), rel=1e-5)
    assert found["nll_added"] == pytest.approx(np.log(2) / 2, rel=1e-5)


def test_leading_tokens() -> None:
    assert quality.leading([1, 2, 3], [1, 2, 4]) == 2
    assert quality.leading([1, 2], [1, 2]) == 2
    assert quality.leading([5], [6]) == 0


@pytest.mark.skipif(not TINY.exists(), reason="no tiny model: `make models`")
def test_a_tiny_model_from_end_to_end() -> None:
    ids = prompt(150, seed=4)
    passage = Passage("noise", ids[:140], ids[140:])
    engine, model = ReferenceEngine(TINY, EngineSettings()), Model.load(TINY)
    try:
        pages = quality.export(engine, passage.context)
        assert [page.tokens for page in pages] == [64, 64, 11]
        (lossless,) = quality.report(engine, model, [passage], [pages], CODECS["zstd"])
        (lossy,) = quality.report(engine, model, [passage], [pages], CODECS["int8"])
        answer = quality.greedy(engine, pages, passage.context, 6)
    finally:
        engine.close()
    assert answer == list(split_run(model, passage.context, 6).tokens)
    assert (lossless["relative_rms"], lossless["kl_max"], lossless["best_equal"]) == (0.0, 0.0, 1.0)
    assert lossless["greedy_equal"] == lossless["greedy_leading"] == 10
    assert 1e-3 < lossy["relative_rms"] < 0.02
    assert lossy["kl_mean"] > 0


@pytest.mark.skipif(not Path("models/smollm2-135m").exists(), reason="no sample model: `make models`")
def test_passages_are_what_the_files_begin_with() -> None:
    found = quality.passages(Path("models/smollm2-135m"), 100, 20)
    assert [(len(each.context), len(each.continuation)) for each in found] == [(100, 20)] * 3
    assert len({each.digest for each in found}) == 3
    with pytest.raises(ValueError, match="9000000 are asked for"):
        quality.passages(Path("models/smollm2-135m"), 8_999_999, 1)
