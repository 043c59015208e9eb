"""What a server and its engine on the CPU import, with a model's code: loaded once by the fork server of tests."""

import gc
import os
from importlib import import_module

from quire.engine.lean_imports import without_compiler

os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # a look for GPUs leaves no CUDA context, which no fork survives
without_compiler("auto")
for name in (
    *("transformers.models.llama.modeling_llama", "transformers.models.qwen3.modeling_qwen3"),
    *(
        "quire.cli.app",
        "quire.cli.serve",
        "quire.engine.core",
        "quire.client.llm",
        "quire.serve.app",
        "quire.serve.server",
    ),
    *("quire.speculative.speculator", "quire.transfer.part", "tests.serve.fake_core", "tests.serve.tiny_model"),
):
    import_module(name)
gc.collect()
gc.freeze()
