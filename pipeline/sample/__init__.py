"""Checkpoints to try things with: `tiny` makes seeded random ones, `smollm2` unpacks a real small model.

Both write ordinary Hugging Face directories that vLLM, SGLang and mlx-lm load. No engine is needed to write them.
"""
