"""kvstore: a store for the attention state (KV cache) of LLM services."""

__version__ = "0.1.0"
