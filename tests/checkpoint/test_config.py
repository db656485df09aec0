"""Config: what is read, both spellings of rotary positions, and every refusal naming its field."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.checkpoint.config import ModelConfig, RopeScaling, eos_token_ids, read_config
from pipeline.errors import ConfigError, UnsupportedModelError
from pipeline.sample import tiny
from tests.checkpoint.conftest import Copy, edit

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def test_every_field_of_a_llama(originals: dict[str, Path]) -> None:
    assert read_config(originals["llama"]) == ModelConfig(
        arch="llama",
        hidden_size=128,
        intermediate_size=256,
        layers=2,
        heads=4,
        kv_heads=2,
        head_dim=32,
        vocab_size=1024,
        rms_norm_eps=1e-5,
        rope_theta=100_000.0,
        rope_scaling=None,
        tie_word_embeddings=False,
        attention_bias=False,
        mlp_bias=False,
        context_length=8192,
        eos_token_ids=(2,),
    )


def test_what_the_architecture_implies(originals: dict[str, Path], copy: Copy) -> None:
    qwen2, qwen3 = read_config(originals["qwen2"]), read_config(originals["qwen3"])
    assert (qwen2.attention_bias, qwen2.output_bias, qwen2.qk_norm) == (True, False, False)
    assert (qwen3.attention_bias, qwen3.output_bias, qwen3.qk_norm, qwen3.head_dim) == (False, False, True, 64)
    biased = read_config(copy(attention_bias=True))
    assert (biased.attention_bias, biased.output_bias) == (True, True)


def test_defaults_that_all_engines_share(copy: Copy) -> None:
    found = read_config(copy(head_dim=..., num_key_value_heads=..., hidden_act=..., attention_bias=..., mlp_bias=...))
    assert (found.head_dim, found.kv_heads, found.attention_bias, found.mlp_bias) == (32, 4, False, False)


@pytest.mark.parametrize(
    ("scaling", "expected"),
    [
        ({"rope_type": "linear", "factor": 2}, RopeScaling("linear", 2.0)),
        ({"type": "linear", "factor": 2.0}, RopeScaling("linear", 2.0)),
        (LLAMA3, RopeScaling("llama3", 8.0, 1.0, 4.0, 8192)),
        ({"rope_type": "default"}, None),
    ],
)
def test_rope_scaling_reads_the_same_from_one_or_both_places(
    copy: Copy, scaling: dict[str, object], expected: RopeScaling | None
) -> None:
    both = {"rope_theta": 100_000.0, **scaling}
    for number, nested in enumerate((..., both, None)):
        directory = copy(name=str(number), rope_scaling=scaling, rope_parameters=nested)
        assert read_config(directory).rope_scaling == expected


@pytest.mark.parametrize(
    ("arch", "field", "value"),
    [
        ("llama", "model_type", "mistral"),
        ("llama", "model_type", "qwen2_moe"),
        ("llama", "model_type", None),
        ("llama", "architectures", ["LlamaForSequenceClassification"]),
        ("llama", "quantization_config", {"quant_method": "awq"}),
        ("llama", "quantization", {"bits": 4, "group_size": 64}),
        ("qwen2", "use_sliding_window", True),
        ("llama", "sliding_window", 4096),
        ("qwen3", "layer_types", ["full_attention", "sliding_attention"]),
        ("qwen3", "layer_types", ["full_attention", "linear_attention"]),
        ("llama", "vision_config", {"hidden_size": 8}),
        ("llama", "audio_config", {"hidden_size": 8}),
        ("llama", "text_config", {"hidden_size": 8}),
        ("llama", "auto_map", {"AutoModel": "modeling.Model"}),
        ("llama", "num_experts", 8),
        ("llama", "hidden_act", "gelu"),
        ("llama", "pretraining_tp", 2),
        ("llama", "torch_dtype", "float32"),
        ("llama", "dtype", "float8_e4m3fn"),
        ("qwen3", "attention_bias", True),
        ("qwen2", "mlp_bias", True),
        ("llama", "tie_word_embeddings", ...),
        ("llama", "rms_norm_eps", ...),
        ("llama", "rms_norm_eps", 0),
        ("llama", "rms_norm_eps", float("nan")),
        ("llama", "rope_theta", ...),
        ("llama", "rope_theta", 500_000.0),  # rope_parameters says 100000
        ("llama", "rope_scaling", {"rope_type": "linear", "factor": 2.0}),  # rope_parameters says default
        ("llama", "rope_scaling", "linear"),
        ("llama", "partial_rotary_factor", 0.5),
        ("llama", "num_hidden_layers", 0),
        ("llama", "num_hidden_layers", True),
        ("llama", "hidden_size", "128"),
        ("llama", "num_key_value_heads", 3),
        ("llama", "head_dim", 33),
        ("llama", "max_position_embeddings", ...),
    ],
)
def test_refusals_name_the_field_and_its_value(copy: Copy, arch: str, field: str, value: object) -> None:
    directory = copy(arch, **{field: value})
    with pytest.raises(UnsupportedModelError) as caught:
        read_config(directory)
    assert caught.value.field == field
    assert field in str(caught.value)
    if field not in ("layer_types", "rms_norm_eps"):
        assert caught.value.value == (None if value is ... else value)


@pytest.mark.parametrize("kind", ["dynamic", "yarn", "longrope", "mrope"])
def test_rope_types_that_engines_treat_differently_are_refused(copy: Copy, kind: str) -> None:
    scaling = {"rope_type": kind, "factor": 2.0}
    with pytest.raises(UnsupportedModelError) as caught:
        read_config(copy(rope_scaling=scaling, rope_parameters=...))
    assert (caught.value.field, caught.value.value) == ("rope_scaling.rope_type", kind)


def test_an_incomplete_scaling_names_what_is_missing(copy: Copy) -> None:
    scaling = {name: value for name, value in LLAMA3.items() if name != "high_freq_factor"}
    with pytest.raises(UnsupportedModelError) as caught:
        read_config(copy(rope_scaling=scaling, rope_parameters=...))
    assert caught.value.field == "high_freq_factor"


def test_a_theta_only_in_rope_parameters_is_refused_with_the_remedy(copy: Copy) -> None:
    with pytest.raises(UnsupportedModelError, match=r"add a top-level rope_theta of 100000\.0"):
        read_config(copy(rope_theta=...))


def test_an_adapter_is_refused(copy: Copy) -> None:
    directory = copy()
    (directory / "adapter_config.json").write_text("{}")
    with pytest.raises(UnsupportedModelError, match="LoRA"):
        read_config(directory)


def test_harmless_spellings_are_taken(copy: Copy) -> None:
    directory = copy(
        "qwen2", sliding_window=32768, layer_types=["full_attention"] * 3, torch_dtype=..., dtype="bfloat16"
    )
    assert read_config(directory).layers == 3


@pytest.mark.parametrize(
    ("content", "hint"), [(b"{", "is not JSON"), (b"[1]", "is not a JSON object"), (b"\xff", "JSON")]
)
def test_a_broken_config_says_what_to_do(copy: Copy, content: bytes, hint: str) -> None:
    directory = copy()
    (directory / "config.json").write_bytes(content)
    with pytest.raises(ConfigError, match=f"{hint}.*fetch the checkpoint again"):
        read_config(directory)


def test_a_missing_directory_is_asked_about(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is this a checkpoint directory"):
        read_config(tmp_path / "absent")


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [(7, 2, (7, 2)), ([9, 2], 2, (9, 2)), (None, [4, 5], (4, 5)), (..., 2, (2,)), ([], None, ())],
)
def test_eos_ids_come_from_both_files_once_each(
    copy: Copy, generation: object, config: object, expected: tuple[int, ...]
) -> None:
    directory = copy(eos_token_id=config)
    edit(directory / "generation_config.json", eos_token_id=generation)
    assert eos_token_ids(directory) == expected


def test_eos_ids_without_a_generation_config(copy: Copy) -> None:
    directory = copy()
    (directory / "generation_config.json").unlink()
    assert eos_token_ids(directory) == (2,)


@pytest.mark.parametrize("value", ["2", -1, [2, None], True])
def test_an_eos_id_that_is_none_is_refused(copy: Copy, value: object) -> None:
    directory = copy(eos_token_id=value)
    with pytest.raises(ConfigError, match="eos_token_id"):
        eos_token_ids(directory)


def test_scaling_written_by_the_sample_is_read_back(tmp_path: Path) -> None:
    directory = tiny.write("qwen2", tmp_path / "m", rope_scaling={"rope_type": "linear", "factor": 4.0}, layers=1)
    assert read_config(directory).rope_scaling == RopeScaling("linear", 4.0)
