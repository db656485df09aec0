"""What is the reference engine's own: its math against other implementations, its draws, its limits, its failures."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline import checkpoint
from pipeline.checkpoint import RopeScaling
from pipeline.engines.reference import ReferenceEngine
from pipeline.engines.reference.model import KvCache, Model
from pipeline.engines.reference.oracle import split_prefill, split_run
from pipeline.engines.reference.rope import Rope, scale
from pipeline.engines.reference.sampler import distribution, sample
from pipeline.errors import (
    ConfigError,
    ContextLengthError,
    DeadlineError,
    EngineError,
    HandoffCancelledError,
    InvalidParameterError,
)
from pipeline.page import Page
from pipeline.request import Sampling
from pipeline.settings import EngineSettings
from tests.engines.conftest import ARCHITECTURES
from tests.engines.flow import PATIENCE_S, Waiter, compute_locally, deliver, export, prompt, read_text, request

Make = Callable[..., ReferenceEngine]


@pytest.fixture(params=ARCHITECTURES)
def any_checkpoint(request: pytest.FixtureRequest, checkpoints: dict[str, Path]) -> Path:
    return checkpoints[request.param]


@pytest.fixture
def llama(checkpoints: dict[str, Path]) -> Path:
    return checkpoints["llama"]


@pytest.fixture
def make(llama: Path) -> Iterator[Make]:
    """Build engines with settings of one's own; all are closed after the test."""
    engines: list[ReferenceEngine] = []

    def build(*, entropy: Callable[[], int] = lambda: 1, **settings: Any) -> ReferenceEngine:
        engines.append(ReferenceEngine(llama, EngineSettings(chunk_tokens=64, **settings), entropy=entropy))
        return engines[-1]

    yield build
    for engine in engines:
        engine.close()


# Math


def exact_logits(directory: Path, ids: list[int]) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Without the FP16 rounding of KV, so that only the order of FP32 sums differs from another implementation."""
    model = Model.load(directory)
    cache = KvCache(model.shape, len(ids))
    cache.data = cache.data.astype(np.float32)
    model.prefill(ids[:70], cache)
    return model.logits(ids[70:], cache)


def test_logits_equal_transformers(any_checkpoint: Path) -> None:
    torch = pytest.importorskip("torch")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        transformers = pytest.importorskip("transformers")
        theirs = transformers.AutoModelForCausalLM.from_pretrained(any_checkpoint, dtype=torch.float32)
        ids = list(prompt(130))
        with torch.no_grad():
            expected = theirs(torch.tensor([ids])).logits[0, -1].numpy()
    np.testing.assert_allclose(exact_logits(any_checkpoint, ids), expected, atol=2e-5)


def test_logits_equal_mlx_lm(any_checkpoint: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        mx = pytest.importorskip("mlx.core")
        utils = pytest.importorskip("mlx_lm.utils")
        theirs, _ = utils.load_model(any_checkpoint)
        theirs.set_dtype(mx.float32)
        ids = list(prompt(130))
        expected = np.array(theirs(mx.array([ids]))[0, -1])
    np.testing.assert_allclose(exact_logits(any_checkpoint, ids), expected, atol=2e-5)


def test_chunks_do_not_change_the_result(any_checkpoint: Path) -> None:
    model = Model.load(any_checkpoint)
    one, _ = split_prefill(model, prompt(200), 0, chunk_tokens=1000)
    many, _ = split_prefill(model, prompt(200), 0, chunk_tokens=64)
    assert one.tokens == many.tokens == 200
    np.testing.assert_allclose(one.data.astype(np.float32), many.data.astype(np.float32), rtol=2e-3, atol=2e-3)


def test_rope_turns_pairs_half_a_head_apart(llama: Path) -> None:
    config = checkpoint.read_config(llama)
    half, position = config.head_dim // 2, 5
    x = np.zeros((1, 1, config.head_dim), np.float32)
    x[0, 0, 3] = 1.0
    angle = position * config.rope_theta ** (-2 * 3 / config.head_dim)
    turned = Rope.apply(x, Rope(config).turn(position, 1))[0, 0]
    assert turned[3] == pytest.approx(math.cos(angle))
    assert turned[3 + half] == pytest.approx(math.sin(angle))
    assert np.count_nonzero(turned) == 2


def test_rope_scalings() -> None:
    frequencies = np.array([1.0, 0.01, 2 * math.pi / 4096, 1e-5])
    assert scale(frequencies, None).tolist() == frequencies.tolist()
    assert scale(frequencies, RopeScaling("linear", 4.0)).tolist() == (frequencies / 4).tolist()
    # llama3, original context 8192: wavelengths below 8192/4 stay, above 8192/1 are divided, 4096 is 1/3 of the way.
    got = scale(frequencies, RopeScaling("llama3", 8.0, 1.0, 4.0, 8192))
    blended = frequencies[2] * (1 / 3 + 2 / 3 / 8)
    np.testing.assert_allclose(got, [1.0, 0.01, blended, 1e-5 / 8])


def test_a_missing_tensor_is_named(llama: Path) -> None:
    tensors = dict(checkpoint.load_tensors(llama))
    del tensors["model.layers.1.mlp.down_proj.weight"]
    with pytest.raises(ConfigError, match=r"model\.layers\.1\.mlp\.down_proj\.weight"):
        Model(checkpoint.read_config(llama), tensors)


def test_kv_that_overflows_fp16_never_leaves(make: Make, llama: Path) -> None:
    tensors = dict(checkpoint.load_tensors(llama))
    name = "model.layers.0.self_attn.v_proj.weight"
    tensors[name] = np.full_like(tensors[name], 6e4)
    engine = make()
    engine.model = Model(checkpoint.read_config(llama), tensors)
    with pytest.raises(EngineError, match="page 0 holds NaN or Inf"):
        export(engine, request(prompt(100)))
    with pytest.raises(EngineError, match="not sound"):
        compute_locally(engine, request(prompt(100)))


def test_margins_are_those_of_the_logits(llama: Path) -> None:
    model = Model.load(llama)
    run = split_run(model, prompt(70), 2)
    _, logits = split_prefill(model, prompt(70), 0)
    best = np.sort(logits)
    assert run.tokens[0] == int(np.argmax(logits))
    assert run.margins[0] == pytest.approx(float(best[-1] - best[-2]))


# Sampling

LOGITS = np.log(np.array([0.15, 0.5, 0.05, 0.3], np.float32))


@pytest.mark.parametrize(
    ("sampling", "ids", "probs"),
    [
        (Sampling(1), [1, 3, 0, 2], [0.5, 0.3, 0.15, 0.05]),
        (Sampling(1, top_k=3), [1, 3, 0], [50 / 95, 30 / 95, 15 / 95]),
        (Sampling(1, top_p=0.5), [1], [1.0]),
        (Sampling(1, top_p=0.51), [1, 3], [0.625, 0.375]),
        (Sampling(1, top_p=0.0), [1], [1.0]),
        # top_p counts what top_k left: 50/80 is short of 0.6 of the whole, but not of 0.6 of the two.
        (Sampling(1, top_k=2, top_p=0.6), [1], [1.0]),
        # Temperature comes first: at 0.5 the probabilities are squared and renormalised before top_p looks.
        (Sampling(1, temperature=0.5, top_p=0.7), [1, 3], [0.25 / 0.34, 0.09 / 0.34]),
        (Sampling(1, top_k=9), [1, 3, 0, 2], [0.5, 0.3, 0.15, 0.05]),
    ],
)
def test_the_filters_and_their_order(sampling: Sampling, ids: list[int], probs: list[float]) -> None:
    order, got = distribution(LOGITS, sampling)
    assert order.tolist() == ids
    np.testing.assert_allclose(got, probs, rtol=1e-5)


def test_draws_follow_the_distribution() -> None:
    drawn = [sample(LOGITS, Sampling(1), 11, position) for position in range(4000)]
    np.testing.assert_allclose(np.bincount(drawn, minlength=4) / 4000, np.exp(LOGITS), atol=0.025)


def test_a_draw_depends_on_seed_and_position_alone() -> None:
    def draws(seed: int) -> list[int]:
        return [sample(LOGITS, Sampling(1), seed, position) for position in range(50)]

    assert draws(-1) == draws((1 << 64) - 1)
    assert draws(1) != draws(2)
    assert draws(1)[10:] == [sample(LOGITS, Sampling(1), 1, position) for position in range(10, 50)]


def test_greedy_takes_the_lowest_of_equal_ids() -> None:
    assert sample(np.array([0, 3, 3], np.float32), Sampling(1, temperature=0.0), 0, 0) == 1


def test_a_resumed_sampled_text_goes_on_as_it_would_have(make: Make) -> None:
    engine = make(prefix_cache_bytes=0)
    whole = compute_locally(engine, request(prompt(60), Sampling(20, temperature=1.0, seed=5)))
    rest = compute_locally(engine, request((*prompt(60), *whole[:9]), Sampling(11, temperature=1.0, seed=5)))
    assert whole[9:] == rest


def test_the_seed_of_an_unseeded_request_is_drawn(make: Make) -> None:
    engine = make(entropy=iter([3, 3, 4]).__next__)
    texts = [compute_locally(engine, request(prompt(60), Sampling(12))) for _ in range(3)]
    assert texts[0] == texts[1] != texts[2]


# Limits


def test_the_context_ends_the_text(make: Make) -> None:
    engine = make(context_length=70)
    order = request(prompt(66), Sampling(100, temperature=0.0))
    ids, held, finish = deliver(engine, order, export(engine, order))
    assert (len(ids), held, finish) == (4, 1, "length")
    assert engine.contract.context_length == 70


@pytest.mark.parametrize("tokens", [70, 71])
def test_a_prompt_must_leave_room_for_a_token(make: Make, tokens: int) -> None:
    engine = make(context_length=70)
    for call in (engine.prefill, engine.admit):
        with pytest.raises(ContextLengthError, match="70 tokens"):
            call(request(prompt(tokens)))


def test_senseless_requests_are_refused(make: Make) -> None:
    engine = make()
    with pytest.raises(InvalidParameterError, match="no token"):
        engine.prefill(request(()))
    with pytest.raises(InvalidParameterError, match="max_tokens is 0"):
        engine.admit(request((5,), Sampling(0)))


def test_seats_bound_decoding_and_not_prefill(make: Make) -> None:
    engine = make(max_running=2)
    admitted = [engine.admit(request(prompt(10))) for _ in range(2)]
    with pytest.raises(DeadlineError, match="0 seats"):
        engine.admit(request(prompt(10)), timeout_s=0.05)
    assert len(export(engine, request(prompt(100)))) == 2
    admitted[0].close()
    assert len(compute_locally(engine, request(prompt(10)))) == 8
    admitted[1].close()


def test_a_finished_request_gives_its_room_back_before_it_is_closed(make: Make) -> None:
    engine = make(max_running=1)
    first = engine.admit(request(prompt(10)), local=True)
    assert len(read_text(first.decode())[0]) == 8
    second = engine.admit(request(prompt(10)), timeout_s=PATIENCE_S)
    second.close()
    first.close()


def test_the_pages_of_an_answer_are_held_for_the_next_turn(make: Make) -> None:
    engine = make()
    answer = compute_locally(engine, request(prompt(100), Sampling(60, temperature=0.0)))
    turn = engine.admit(request((*prompt(100), *answer, *prompt(30, seed=1))))
    assert turn.held_pages == 2  # 128 of the 159 tokens whose KV was computed
    turn.close()


def test_a_page_is_read_once(make: Make) -> None:
    running = make().prefill(request(prompt(100)))
    running.read(1)
    running.skip_to(1)
    for index, why in (
        (0, "read or skipped"),
        (1, "read or skipped"),
        (2, "the prompt has 2"),
        (-1, "the prompt has 2"),
    ):
        with pytest.raises(EngineError, match=why):
            running.read(index)
        with pytest.raises(EngineError, match=why):
            running.wait_ready(index, 0.0)
    assert running.done
    assert running.first_tokens == ()


# Misuse and failure


def test_misuse_of_an_admission_is_refused(make: Make) -> None:
    engine = make()
    pages = export(engine, request(prompt(100)))
    engine.reset_prefix_cache()
    admission = engine.admit(request(prompt(100)))
    with pytest.raises(EngineError, match="with 0 of 2 pages"):
        admission.decode()
    with pytest.raises(EngineError, match="page 0 of 2 with 64 tokens must follow"):
        admission.import_page(Page(0, 63, pages[0].data))
    with pytest.raises(EngineError, match="not float16"):
        admission.import_page(Page(0, 64, pages[0].data.astype(np.float32)))
    for page in pages:
        admission.import_page(page)
    with pytest.raises(EngineError, match="page 2 of 2 with 0 tokens"):
        admission.import_page(Page(2, 1, pages[1].data))
    steps = admission.decode()
    with pytest.raises(EngineError, match="twice"):
        admission.decode()
    assert len(read_text(steps)[0]) == 8


def test_a_local_request_imports_nothing(make: Make) -> None:
    engine = make()
    pages = export(engine, request(prompt(100)))
    admission = engine.admit(request(prompt(100)), local=True)
    with pytest.raises(EngineError, match="computed here"):
        admission.import_page(pages[1])
    admission.close()


def test_a_poisoned_request_fails_alone(make: Make) -> None:
    engine = make(prefix_cache_bytes=0)
    pages = export(engine, request(prompt(100)))
    expected = compute_locally(engine, request(prompt(100), Sampling(40, temperature=0.0)))
    neighbour = Waiter(lambda: compute_locally(engine, request(prompt(100), Sampling(40, temperature=0.0))))
    pages[0].data[...] = np.nan
    with pytest.raises(EngineError, match="not sound"):
        deliver(engine, request(prompt(100)), pages)
    neighbour.join()
    assert neighbour.value == expected
    assert engine.stats().running == 0


def test_an_unexpected_error_fails_one_request(make: Make) -> None:
    engine = make()
    with pytest.raises(EngineError, match="IndexError"):
        compute_locally(engine, request((5, 5000, 5)))  # no such token id
    assert len(compute_locally(engine, request((5, 6, 7)))) == 8
    assert engine.stats().running == 0


def test_closing_the_engine_wakes_everybody(make: Make) -> None:
    engine = make(held_pages=1)
    first = engine.prefill(request(prompt(100)))
    assert first.wait_ready(1, PATIENCE_S)
    second = engine.prefill(request(prompt(100, seed=1)))
    decoding = engine.admit(request(prompt(50), Sampling(5000, temperature=0.0)), local=True)
    waiters = [Waiter(lambda: second.read(0)), Waiter(lambda: read_text(decoding.decode()))]
    engine.close()
    for waiter in waiters:
        waiter.join()
        assert isinstance(waiter.error, EngineError)
    with pytest.raises(EngineError, match="was closed"):
        engine.admit(request(prompt(5)))
    with pytest.raises(EngineError, match="was closed"):
        engine.prefill(request(prompt(5)))
    assert engine.stats().running == 0


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # the thread reports its death
def test_the_death_of_the_thread_reaches_everybody(make: Make) -> None:
    engine = make()

    class Dying(Model):
        def logits(self, *_: object) -> Any:
            raise SystemExit("out of memory")

    engine.model = Dying.load(engine.directory)
    with pytest.raises(EngineError, match="thread died: SystemExit"):
        compute_locally(engine, request(prompt(5)))
    with pytest.raises(EngineError, match="thread died"):
        engine.prefill(request(prompt(5)))


def test_close_waits_for_the_chunk_that_runs(make: Make) -> None:
    engine = make()
    running = engine.prefill(request(prompt(2000)))
    assert running.wait_ready(0, PATIENCE_S)
    running.close()
    assert engine.stats().running == 0
    assert engine.stats().free_pages == engine.room.pages
    with pytest.raises(HandoffCancelledError):
        running.read(5)
