"""Hugging Face models on Quire's pools: loading, checking, running, and their tokenizers."""
