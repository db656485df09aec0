"""Codecs between two workers: what each side is set to, what crosses, and a clear word where they do not match."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from pipeline.errors import CodecRefusedError
from pipeline.settings import Codec
from pipeline.stages.drain import Services
from tests.stages.fake import PAGE_BYTES, pages, text
from tests.stages.stand import FINISHED, Stand, failure, outcome, same

pytestmark = pytest.mark.parametrize("server_url", ["valkey"], indirect=True)


def _set(services: Services, codec: Codec) -> Services:
    settings = services.settings
    return replace(
        services,
        settings=settings.model_copy(update={"broker": settings.broker.model_copy(update={"codec": codec})}),
    )


@pytest.mark.parametrize("codec", ["raw", "lz4", "zstd", "auto"])
def test_every_lossless_codec_needs_only_one_side(stand: Stand, codec: Codec) -> None:
    stand.p_services = _set(stand.p_services, codec)
    request = stand.open()
    p, d = stand.begin(request)
    assert outcome(p)["pages"] == 4
    assert outcome(d) == FINISHED
    assert same(stand.d.imported, pages(request))
    if codec == "zstd":
        assert int(stand.field(request, "bytes") or 0) < 4 * PAGE_BYTES
    assert stand.remains(request) == []


def test_a_lossy_codec_that_both_asked_for(stand: Stand) -> None:
    stand.p_services, stand.d_services = _set(stand.p_services, "int8"), _set(stand.d_services, "int8")
    request = stand.open()
    p, d = stand.begin(request)
    assert outcome(p) == {"outcome": "sent", "pages": 4, "bytes": 4 * (PAGE_BYTES // 2 + PAGE_BYTES // 32)}
    assert outcome(d) == FINISHED
    for got, exact in zip(stand.d.imported, pages(request), strict=True):
        step = np.abs(exact.data).max(axis=3, keepdims=True) / 127
        assert (np.abs(got.data - exact.data) <= 0.52 * step + 1e-3).all()
        assert not np.array_equal(got.data, exact.data)


@pytest.mark.parametrize("theirs", ["raw", "auto"])
def test_a_codec_that_the_peer_does_not_take_is_refused_at_accept(stand: Stand, theirs: Codec) -> None:
    stand.p_services, stand.d_services = _set(stand.p_services, "int8"), _set(stand.d_services, theirs)
    request = stand.open()
    p, d = stand.begin(request)
    refused = failure(p)
    assert isinstance(refused, CodecRefusedError)
    assert "give both the same broker.codec" in str(refused)
    assert outcome(d) == FINISHED  # D computed the prompt itself
    assert stand.said(request) == list(text(request))
    assert stand.field(request, "recomputed") == "peer_error"
    assert stand.d.imported == []
    assert stand.remains(request) == []
