"""The client's side of an engine: its process, streams of answers, text, and `LLM` for scripts. It loads no torch."""
