"""Checkpoint: a Hugging Face model directory, read without any engine: config, weights, tokenizer, contract."""

from pipeline.checkpoint.config import ModelConfig, RopeScaling, eos_token_ids, read_config
from pipeline.checkpoint.identity import Difference, differences, read_contract, require_complete
from pipeline.checkpoint.tensor import load_tensors
from pipeline.checkpoint.tokenizer import chat_template
from pipeline.checkpoint.weight import TensorDigest

__all__ = [
    "Difference",
    "ModelConfig",
    "RopeScaling",
    "TensorDigest",
    "chat_template",
    "differences",
    "eos_token_ids",
    "load_tensors",
    "read_config",
    "read_contract",
    "require_complete",
]
