"""Crossfill: prefill a prompt on one LLM engine and decode it on another."""

__version__ = "0.1.0"
