"""Quire's stores beneath other engines: vLLM's secondary tier, SGLang's HiCache. They need records and stores alone."""
