"""Engines on a device in Python: the tokens of the CPU, and no step waits for the device before its readback."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import Tensor

from quire.engine.core import EngineCore
from quire.engine.device.runner import LaunchedForward, ModelRunner
from quire.engine.device.sampler import Sampler
from quire.engine.messages import EngineRequest, TokenLogprobs
from quire.models.hf import LoadedModel
from quire.scheduler.sampling_params import SamplingParams
from quire.scheduler.step import Step
from tests.changes import DEVICE, in_turns
from tests.engine.running import core_for, run, shared_prompts
from tests.engine.test_sampler import places, request
from tests.fake_cuda import POISON, FakeCuda
from tests.tiny_hybrids import build_hybrid
from tests.tiny_latents import SPARSE, build_latent
from tests.tiny_models import VOCAB_SIZE

CUDA = torch.device("cuda")
GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
LONG = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
PROMPTS = shared_prompts(7, shared=37, tails=(3, 20), vocabulary=VOCAB_SIZE)
MIXED = (
    SamplingParams(temperature=0, max_tokens=5, logprobs=2),
    SamplingParams(seed=1, top_p=0.9, max_tokens=5, logprobs=3),
    SamplingParams(seed=2, top_k=5, repetition_penalty=1.2, max_tokens=5),
    SamplingParams(seed=3, min_tokens=3, logit_bias={3: 1.0}, max_tokens=5),
    SamplingParams(temperature=0.7, presence_penalty=0.5, frequency_penalty=0.1, max_tokens=4),
    SamplingParams(min_p=0.1, max_tokens=4),
)
FAMILIES = {
    "llama_gqa": "full attention",
    "gemma2": "windows and caps",
    "gpt_oss": "sinks",
    "llama4_text": "chunks",
    "deepseek_v2": "latents",
    "deepseek_v32": "selected latents",
    "minimax_m3": "selected blocks",
    "mamba2": "states",
    "bamba": "states beside attention",
}


def build(name: str) -> Any:
    """The tiny model of that name."""
    return build_latent(name) if name in SPARSE else build_hybrid(name)


@cache
def on_cpu(name: str) -> LoadedModel:
    return LoadedModel(build(name), name=name)


def on_device(name: str) -> LoadedModel:
    """The same on the fake device, which is installed. It is not checked against transformers once more."""
    return LoadedModel(build(name).to("cuda"), name=name, check=False)


@contextmanager
def watched(cuda: FakeCuda) -> Iterator[None]:
    """What launches do is noted."""
    launch = ModelRunner.launch

    def noted(runner: ModelRunner, step: Step, previous: LaunchedForward | None) -> LaunchedForward:
        with cuda.watched():
            return launch(runner, step, previous)

    with patch.object(ModelRunner, "launch", noted):
        yield


def cores(name: str, **settings: Any) -> Iterator[EngineCore]:
    settings = {"page_size": 4, "max_num_batched_tokens": 50, "max_running_requests": 8, **settings}
    yield core_for(on_cpu(name), device="cpu", **settings)
    yield core_for(on_device(name), device="cuda", attention_backend="torch", **settings)


def ours(cuda: FakeCuda) -> list[str]:
    """What was noted in Quire's own code."""
    return sorted({str(noted) for noted in cuda.noted if " in modeling_" not in noted.place})


def check_family(name: str) -> None:
    """The tokens of the CPU, cold and from cached pages, and no wait between a launch and its readback."""
    found = []
    cuda = FakeCuda()
    with cuda.installed(), watched(cuda):
        for core in cores(name):
            found.append([run(core, PROMPTS, GREEDY, when) for when in ("cold", "warm")])
        assert core.loop.overlaps and core.device.type == "cuda"
    assert found[0] == found[1]
    assert ours(cuda) == []


@pytest.mark.parametrize("name", in_turns(FAMILIES, 3, *DEVICE, "tests/fake_cuda.py"))
def test_same_tokens_and_no_wait(name: str) -> None:
    check_family(name)


def check_sampling() -> None:
    """Every kind of sampling, with log-probabilities, in one batch."""
    prompts = [PROMPTS[i % 2][: 20 + i] for i in range(len(MIXED))]
    cuda, found = FakeCuda(), []
    with cuda.installed(), watched(cuda):
        found += [reports(core, prompts) for core in cores("llama_gqa")]
    for (token, reported), (other, others) in zip(*found, strict=True):
        assert token == other
        assert [(each.rank, each.top_ids) for each in reported] == [(each.rank, each.top_ids) for each in others]
        assert [each.logprob for each in reported] == pytest.approx([each.logprob for each in others], abs=1e-5)
    assert ours(cuda) == []


def reports(core: EngineCore, prompts: Sequence[Sequence[int]]) -> list[tuple[list[int], list[TokenLogprobs]]]:
    """The tokens and log-probabilities of each request."""
    found: list[tuple[list[int], list[TokenLogprobs]]] = [([], []) for _ in prompts]
    for at, (prompt, params) in enumerate(zip(prompts, MIXED, strict=True)):
        core.add(EngineRequest(request_id=str(at), prompt=np.array(prompt, dtype=np.int32).tobytes(), params=params))
    while core.has_work():
        for output in core.step():
            tokens, logprobs = found[int(output.request_id)]
            tokens.extend(output.token_ids)
            logprobs.extend(output.logprobs or ())
    return found


def test_sampling_waits_for_nothing() -> None:
    check_sampling()


def check_flat() -> None:
    """A distribution that is flatter than the candidates reach is cut where a whole sort cuts it."""
    logits, flat = torch.linspace(0.01, 0, 2500).repeat(3, 1), {"seed": 2, "temperature": 0.9}
    many = [SamplingParams(**flat, top_p=0.9), SamplingParams(**flat, top_k=1500), SamplingParams(**flat, top_k=5)]
    terms = [request(params) for params in many]
    cuda, found = FakeCuda(), []
    with cuda.installed():
        for device in ("cpu", "cuda"):
            there = logits.clone().to(device)
            with cuda.watched():
                scores = Sampler([]).scores(there, places(terms))
            found.append((scores.cpu() > float("-inf")).sum(-1).tolist())
    assert found[0] == found[1] == [found[0][0], 1500, 5] and found[0][0] > 1024
    assert ours(cuda) == []


def test_flat_distributions_are_cut_alike() -> None:
    check_flat()


def check_readback() -> None:
    """A step is waited for while the next one is in flight, whose draws have not arrived then."""
    cuda, overlapping = FakeCuda(), 0
    wait = LaunchedForward.wait
    with cuda.installed():
        *_, core = cores("llama_gqa")

        def waits(launched: LaunchedForward) -> Any:
            nonlocal overlapping
            tokens = wait(launched)
            assert not (tokens.astype(np.int64).view(np.uint8) == POISON).all(), "read before it arrived"
            following = pending.pop(0) if len(pending) > 1 else None
            if following is not None and pending[0].drawn is not None:
                overlapping += 1
                assert (pending[0].readback._drawn.tokens.view(torch.uint8) == POISON).all(), "waited for a later step"
            return tokens

        pending: list[LaunchedForward] = []
        launch = core.runner.launch

        def noted(step: Step, previous: LaunchedForward | None) -> LaunchedForward:
            pending.append(launch(step, previous))
            return pending[-1]

        with patch.object(core.runner, "launch", noted), patch.object(LaunchedForward, "wait", waits):
            run(core, PROMPTS, GREEDY)
    assert overlapping > 2


def test_a_step_waits_for_itself_alone() -> None:
    check_readback()


def check_copies() -> None:
    """A decode step sends its arrays in one copy, what attention derives of the batch among them."""
    cuda = FakeCuda()
    with cuda.installed(), watched(cuda):
        *_, core = cores("llama_gqa", page_size=16)
        core.add(EngineRequest(request_id="a", prompt=np.arange(1, 20, dtype=np.int32).tobytes(), params=LONG))
        counts = []
        while core.has_work():
            before = cuda.num_copies
            core.step()
            counts.append(cuda.num_copies - before)
    assert sorted(counts)[len(counts) // 2] <= 2, counts


def test_a_step_sends_its_arrays_together() -> None:
    check_copies()


WAITS: dict[str, Callable[[Tensor], object]] = {
    "item": lambda x: x[0].item(),
    "bool": lambda x: bool(x.any()),
    "float": lambda x: float(x[0]),
    "tolist": lambda x: x.tolist(),
    "cpu": lambda x: x.cpu(),
    "nonzero": lambda x: x.nonzero(),
    "where": lambda x: torch.where(x > 1),
    "boolean index": lambda x: x[x > 1],
    "boolean write": lambda x: x.__setitem__(x > 1, x[:1]),
    "unique": lambda x: x.unique(),
    "select": lambda x: x.masked_select(x > 1),
    "an index on the host": lambda x: x[torch.tensor([0, 1])],
    "an index on the device as a number": lambda x: x[torch.arange(1, device=CUDA)[0]],
    "from_numpy": lambda x: torch.from_numpy(np.arange(3)).to(CUDA, non_blocking=True),
    "tensor": lambda x: torch.tensor([1, 2], device=CUDA),
    "copy_": lambda x: x.copy_(torch.zeros(4)),
    "pinned and blocking": lambda x: x.copy_(torch.empty(4, pin_memory=True)),
    "to memory that is not pinned": lambda x: torch.empty(4).copy_(x, non_blocking=True),
    "synchronize": lambda x: torch.cuda.synchronize(),
    "an event": lambda x: torch.cuda.current_stream().record_event().synchronize(),
    "a list": lambda x: x[[0, 1]],
}
RUNS_ON: dict[str, Callable[[Tensor], object]] = {
    "arithmetic": lambda x: (x + 1).softmax(-1).sum(),
    "where of three": lambda x: torch.where(x > 1, x, 0.0),
    "gather": lambda x: x.gather(0, torch.arange(2, device=CUDA)),
    "masked_fill": lambda x: x.masked_fill(x > 1, 0.0),
    "a number": lambda x: x.__setitem__(slice(0, 2), 3.0),
    "pinned": lambda x: x.copy_(torch.empty(4, pin_memory=True), non_blocking=True),
    "to pinned memory": lambda x: torch.empty(4, pin_memory=True).copy_(x, non_blocking=True),
    "topk": lambda x: x.topk(2),
    "an event of a stream": lambda x: torch.cuda.current_stream().wait_event(
        torch.cuda.current_stream().record_event()
    ),
}


@pytest.mark.parametrize("kind", WAITS)
def test_what_waits_is_noted(kind: str) -> None:
    with FakeCuda().installed() as cuda, torch.inference_mode():
        x = torch.arange(4, dtype=torch.float32, device=CUDA)
        with cuda.watched():
            WAITS[kind](x)
    assert cuda.noted


@pytest.mark.parametrize("kind", RUNS_ON)
def test_what_does_not_wait_is_not(kind: str) -> None:
    with FakeCuda().installed() as cuda, torch.inference_mode():
        x = torch.arange(4, dtype=torch.float32, device=CUDA)
        with cuda.watched():
            RUNS_ON[kind](x)
    assert cuda.noted == []


def test_pinned_memory_that_a_copy_still_reads_is_noted() -> None:
    with FakeCuda().installed() as cuda:
        pinned = torch.zeros(4, pin_memory=True)
        torch.zeros(4, device=CUDA).copy_(pinned, non_blocking=True)
        pinned += 1
        torch.cuda.synchronize()
    assert [noted.what for noted in cuda.noted] == ["pinned memory was written while a copy to the device read it"]


def test_who_waits_late_waits_on_the_device_that_was() -> None:
    """A test that fails leaves copies in flight, and what is collected later waits for them."""
    cuda = FakeCuda()
    with cuda.installed():
        found, event = torch.zeros(4, pin_memory=True), torch.cuda.Event()
        found.copy_(torch.arange(4.0, device=CUDA), non_blocking=True)
        event.record()
        stream = torch.cuda.current_stream()
    event.synchronize()
    assert found.tolist() == [0, 1, 2, 3]
    stream.synchronize()
