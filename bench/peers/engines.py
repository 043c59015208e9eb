"""The engines that are compared, each behind the same three calls: start, run, counters.

Every engine gets the model folder, the element type, the threads and the memory for keys and values, and otherwise its
own defaults; what differs from them is said where it is set. Imports happen in `start`: not every engine is installed.
"""

from __future__ import annotations

from typing import Any

from bench.peers.engine import Engine
from bench.peers.llama_cpp_engine import LlamaCpp
from bench.peers.openvino_engine import OpenVino


class Quire(Engine):
    """Quire, in this process."""

    package = "quire.client.llm"

    def start(
        self,
        *,
        folder: str,
        dtype: str,
        threads: int,
        kv_bytes: int,
        max_model_len: int,
        max_requests: int,
        kv_dtype: str = "auto",
    ) -> None:
        """Load through the public `LLM`."""
        import torch

        from quire import LLM

        torch.set_num_threads(threads)
        self.llm = LLM(
            folder,
            skip_tokenizer_init=True,
            kv_memory=kv_bytes,
            kv_dtype=kv_dtype,
            dtype=dtype,
            device="cpu",
            max_model_len=max_model_len,
        )

    def run(self, prompts: list[list[int]], new: int) -> list[list[int]]:
        """One `generate` call."""
        from quire import SamplingParams

        params = SamplingParams(**self.sampling, max_tokens=new, ignore_eos=True)
        outputs = self.llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params)
        return [output.outputs[0].token_ids for output in outputs]

    def counters(self) -> dict[str, int]:
        """The engine's own statistics, as far as they count."""
        counted = ("hit_tokens", "matched_tokens", "evicted_pages", "preemptions", "steps")
        found = self.llm.statistics()
        return {name: int(found[name]) for name in counted if name in found}


class Generate(Engine):
    """transformers' `generate` on one padded batch. Keeps nothing between calls."""

    package = "transformers.models.llama"

    def start(
        self, *, folder: str, dtype: str, threads: int, kv_bytes: int, max_model_len: int, max_requests: int
    ) -> None:
        """Load with the default attention (sdpa)."""
        self.model = _transformers_model(folder, dtype, threads)

    def run(self, prompts: list[list[int]], new: int) -> list[list[int]]:
        """One `generate` call, prompts padded on the left."""
        import torch

        longest = max(map(len, prompts))
        ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        with torch.inference_mode():
            out = self.model.generate(
                ids, attention_mask=mask, max_new_tokens=new, min_new_tokens=new, do_sample=False, pad_token_id=0
            )
        return out[:, longest:].tolist()

    def counters(self) -> dict[str, int]:
        """Nothing is reused."""
        return {"hit_tokens": 0}


class ContinuousBatching(Engine):
    """transformers' continuous batching. One manager is kept, or every batch would start with an empty cache."""

    package = "transformers.models.llama"

    def start(
        self, *, folder: str, dtype: str, threads: int, kv_bytes: int, max_model_len: int, max_requests: int
    ) -> None:
        """Load; the cache is sized here, for it would otherwise take 60 % of the machine's memory."""
        from transformers import ContinuousBatchingConfig, GenerationConfig

        self.model = _transformers_model(folder, dtype, threads)
        config = self.model.config
        page_size = 64  # 256, the default, is more than a short own prompt: it would not share as much of the prefix
        block_bytes = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * page_size
        block_bytes *= self.model.dtype.itemsize
        self.config = ContinuousBatchingConfig(
            page_size=page_size, num_blocks=kv_bytes // block_bytes, max_batch_tokens=2048
        )
        self.generation = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0)
        self._matched = 0
        self._count_matches()

    def run(self, prompts: list[list[int]], new: int) -> list[list[int]]:
        """One `generate_batch` call."""
        results = self.model.generate_batch(
            prompts,
            generation_config=self.generation,
            continuous_batching_config=self.config,
            max_new_tokens=new,
            persistent_manager=True,
        )
        if len(results) != len(prompts):
            raise RuntimeError(f"{len(prompts)} prompts, {len(results)} results")
        return [list(result.generated_tokens) for result in results.values()]

    def counters(self) -> dict[str, int]:
        """Prompt tokens found in the cache."""
        return {"hit_tokens": self._matched}

    def _count_matches(self) -> None:
        from transformers.generation.continuous_batching.cache import PagedAttentionCache

        search = PagedAttentionCache.search_prefix_match

        def counted(cache: Any, request_id: str, prompt_ids: list[int]) -> int:
            matched = search(cache, request_id, prompt_ids)
            self._matched += matched
            return matched

        PagedAttentionCache.search_prefix_match = counted


class Vllm(Engine):
    """vLLM's CPU backend, in this process."""

    package = "vllm"

    def start(
        self, *, folder: str, dtype: str, threads: int, kv_bytes: int, max_model_len: int, max_requests: int
    ) -> None:
        """Load through the public `LLM`; compiled, as is its default."""
        from vllm import LLM

        self.hits = 0
        self.llm = LLM(
            folder,
            skip_tokenizer_init=True,
            dtype=dtype,
            max_model_len=max_model_len,
            kv_cache_memory_bytes=kv_bytes,
            max_num_seqs=max_requests,
            enable_prefix_caching=True,
            disable_log_stats=True,
            seed=0,
        )

    def run(self, prompts: list[list[int]], new: int) -> list[list[int]]:
        """One `generate` call."""
        from vllm import SamplingParams

        params = SamplingParams(**self.sampling, max_tokens=new, ignore_eos=True, detokenize=False)
        outputs = self.llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
        self.hits += sum(output.num_cached_tokens or 0 for output in outputs)
        return [list(output.outputs[0].token_ids) for output in outputs]

    def counters(self) -> dict[str, int]:
        """Prompt tokens found in the cache."""
        return {"hit_tokens": self.hits}


ENGINES: dict[str, type[Engine]] = {
    "quire": Quire,
    "generate": Generate,
    "cb": ContinuousBatching,
    "vllm": Vllm,
    "llama.cpp": LlamaCpp,
    "openvino": OpenVino,
}


def _transformers_model(folder: str, dtype: str, threads: int) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(threads)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
