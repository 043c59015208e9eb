"""Engines in a process for `speculation.py`, as `worker.py` answers. All of them draw the answers they are given.

start  -> {"versions"}       load an engine of the kind and under the name that is given, with drafts or without
run    -> {"cpu", "wall", "wrong", "drafts", "accepted"}     prompts that are cached, timed here
draw   -> {"tokens"}         what Quire draws itself
"""

from __future__ import annotations

import gc
import time
from typing import Any

import numpy as np
from bench.peers.engines import Quire, Vllm
from bench.peers.worker import answer_requests, versions

_CERTAIN = 1e9  # a logit that is always the largest


class Given:
    """The answers of the prompts that run now, by row."""

    def __init__(self, prompts: list[list[int]], answers: list[list[int]]) -> None:
        self._rows = {tuple(prompt): at for at, prompt in enumerate(prompts)}
        self._tokens = np.array(answers)
        self._row_of: dict[Any, int] = {}

    def row(self, name: Any, prompt: Any) -> int:
        """The row of a request; `prompt` is called for the tokens of its prompt the first time."""
        if name not in self._row_of:
            self._row_of[name] = self._rows[tuple(prompt().tolist())]
        return self._row_of[name]

    def follow(self, logits: Any, rows: Any, outputs: Any) -> None:
        """Row i of `logits` draws output number `outputs[i]` of row `rows[i]`; past the end, any."""
        outputs = np.minimum(outputs, self._tokens.shape[1] - 1)
        logits[np.arange(len(outputs)), self._tokens[rows, outputs]] = _CERTAIN


class FollowingQuire(Quire):
    """The sampler gets logits in which only the given token's is changed."""

    def start(
        self,
        *,
        speculative: dict[str, Any] | None,
        kv_bytes: int,
        max_model_len: int,
        governed: bool,
        **settings: Any,
    ) -> None:
        """As `Quire.start`. Unless `governed`, drafts are computed whatever they cost: the same on each machine."""
        import torch

        from quire import LLM

        torch.set_num_threads(settings["threads"])
        self.llm = LLM(
            settings["folder"],
            skip_tokenizer_init=True,
            kv_memory=kv_bytes,
            dtype=settings["dtype"],
            device="cpu",
            max_model_len=max_model_len,
            max_running_requests=settings["max_requests"],
            speculative_config=speculative,
        )
        speculator = self.llm.engine.speculator
        if speculator is not None and not governed:
            speculator._governor = None
        self.given: Given | None = None
        sampler = self.llm.engine.runner._sampler
        draw = sampler.draw

        def following(logits: Any, places: Any, *more: Any) -> Any:
            if self.given is not None:
                given = self.given
                rows = [
                    given.row(each.request_id, lambda each=each: each.tokens[: each.num_prompt_tokens])
                    for each in places.requests
                ]
                given.follow(logits, rows, places.outputs)
            return draw(logits, places, *more)

        sampler.draw = following
        self._turns = 0

    def run(self, prompts: list[list[int]], new: int) -> list[list[int]]:
        """One `generate` call. Nothing that an earlier pair of calls had is found: the salt is another."""
        from quire import SamplingParams

        self._turns += 1
        params = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True)
        given = [{"prompt_token_ids": prompt} for prompt in prompts]
        outputs = self.llm.generate(given, params, salt=f"turn {(self._turns - 1) // 2}")
        return [output.outputs[0].token_ids for output in outputs]

    def draw(self, prompts: list[list[int]], new: int, temperature: float) -> list[list[int]]:
        """Its own answers."""
        from quire import SamplingParams

        self.given = None
        params = [
            SamplingParams(temperature=temperature, seed=at, max_tokens=new, ignore_eos=True)
            for at in range(len(prompts))
        ]
        outputs = self.llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, salt="drawn")
        return [output.outputs[0].token_ids for output in outputs]

    def counters(self) -> dict[str, int]:
        """Drafts so far, those that were right, and steps."""
        found = self.llm.statistics()
        said = found.get("speculation") or {}
        return {
            "drafts": said.get("draft_tokens", 0),
            "accepted": said.get("accepted_tokens", 0),
            "steps": found["steps"],
        }


class FollowingVllm(Vllm):
    """The same in `GPUModelRunner._sample`, which vLLM's runner on a CPU inherits."""

    def start(self, *, speculative: dict[str, Any] | None, governed: bool = True, **settings: Any) -> None:
        """As `Vllm.start`. The scheduler is the synchronous one, as it is with n-grams on a CPU anyway."""
        from vllm.v1.worker.gpu_model_runner import GPUModelRunner

        self.given: Given | None = None
        self._counts = {"drafts": 0, "accepted": 0, "steps": 0}
        sample = GPUModelRunner._sample

        def following(runner: Any, logits: Any, metadata: Any) -> Any:
            self._counts["steps"] += 1
            batch, given = runner.input_batch, self.given
            if given is None:
                return sample(runner, logits, metadata)
            each = range(len(batch.req_ids))
            prompts = batch.num_prompt_tokens
            rows = np.array(
                [given.row(batch.req_ids[i], lambda i=i: batch.token_ids_cpu[i, : prompts[i]]) for i in each],
                dtype=np.int64,
            )
            last = runner.query_start_loc.np[1 : len(rows) + 1] - 1
            at, owners = last, np.arange(len(rows))
            if metadata is not None:
                at = metadata.logits_indices.numpy()
                owners = np.repeat(owners, np.array(metadata.num_draft_tokens) + 1)
            outputs = runner.positions.numpy()[at] + 1 - prompts[owners]
            given.follow(logits, rows[owners], np.maximum(outputs, 0))
            found = sample(runner, logits, metadata)
            if metadata is not None:
                self._counts["drafts"] += sum(metadata.num_draft_tokens)
                self._counts["accepted"] += int((found.sampled_token_ids >= 0).sum()) - len(rows)
            return found

        GPUModelRunner._sample = following
        from vllm import LLM

        self.llm = LLM(
            settings["folder"],
            skip_tokenizer_init=True,
            dtype=settings["dtype"],
            max_model_len=settings["max_model_len"],
            kv_cache_memory_bytes=settings["kv_bytes"],
            max_num_seqs=settings["max_requests"],
            enable_prefix_caching=True,
            disable_log_stats=True,
            seed=0,
            **({"speculative_config": speculative} if speculative else {}),
        )
        self.hits = 0

    def counters(self) -> dict[str, int]:
        """As Quire's."""
        return dict(self._counts)


KINDS = {"quire": FollowingQuire, "vllm": FollowingVllm}


class Worker:
    """Holds the engines between requests."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._engines: dict[str, Any] = {}

    def start(self, name: str, **settings: Any) -> dict[str, Any]:
        """Load an engine. An error is in the answer."""
        engine = KINDS[self._kind]()
        try:
            engine.start(**settings)
        except Exception as error:
            return {"error": f"{type(error).__name__}: {error}", "versions": versions()}
        self._engines[name] = engine
        return {"versions": versions()}

    def draw(self, name: str, prompts: list[list[int]], new: int, temperature: float) -> dict[str, Any]:
        """What the engine draws itself."""
        return {"tokens": self._engines[name].draw(prompts, new, temperature)}

    def run(self, name: str, prompts: list[list[int]], answers: list[list[int]]) -> dict[str, Any]:
        """Give these answers. The prompts are computed before, untimed."""
        engine = self._engines[name]
        engine.given = Given(prompts, answers)
        engine.run(prompts, 1)
        engine.given = Given(prompts, answers)
        before = engine.counters()
        gc.collect()
        cpu, wall = time.process_time(), time.perf_counter()
        found = engine.run(prompts, len(answers[0]))
        cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
        counts = {key: value - before[key] for key, value in engine.counters().items()}
        wrong = sum(
            left != right for pair in zip(found, answers, strict=True) for left, right in zip(*pair, strict=True)
        )
        return {"cpu": cpu, "wall": wall, "wrong": wrong, **counts}


if __name__ == "__main__":
    answer_requests(Worker)
