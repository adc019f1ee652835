"""A small reference engine for GGUF models, built on the cache."""
