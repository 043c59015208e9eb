"""Models with recurrent layers: logits of a mixed schedule on pools of pages and of states are the plain model's."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForImageTextToText
from transformers.utils import logging as transformers_logging

from quire.errors import ModelCheckFailed
from quire.kernels.batch import PagedBatch
from quire.kernels.moves import Moves
from quire.kernels.state import StateBatch
from quire.memory.pool import Pool
from quire.models import mixers
from quire.models.forward import RunningForward
from quire.models.hf import LoadedModel, load_model
from quire.models.mixers import install_mixers
from quire.spec.layout import DType
from quire.spec.model import ModelSpec
from tests.changes import MODELS, unless_changed
from tests.covering import covering
from tests.tiny_hybrids import WITH_STATES, build_hybrid, published
from tests.tiny_models import VOCAB_SIZE, draw_weights

pytestmark = unless_changed(__name__, *MODELS)

LATENT = ("kimi_linear", "bailing_hybrid")
UNLIMITED: Mapping[str, Any] = {"time_step_min": 1e-9}
"""For `generate`, which leaves the lower limit of step sizes out for single tokens."""

PAGE_SIZE = 4
LENGTHS = {"a": 32, "b": 29, "c": 30}
SHARED = 8
"""Tokens that c has in common with a; it starts after them, on a's pages and the state a left there."""
CUTS = {"a": (SHARED,), "b": (12, 13, 16), "c": (SHARED,)}
"""Positions where a sequence leaves its state in a frame of its own and goes on from there."""
STEPS = (
    {"a": (0, 20)},
    {"a": (20, 21), "b": (0, 11)},
    {"c": (8, 15), "a": (21, 26), "b": (11, 27)},
    {"c": (15, 28), "b": (27, 28), "a": (26, 31)},
    {"a": (31, 32), "b": (28, 29), "c": (28, 29)},
    {"c": (29, 30)},
)

Step = Mapping[str, tuple[int, int]]


class ExpandedLatents(LoadedModel):
    """Planned as what was seen: attention that keeps its latents expanded, as keys and values."""

    def _read_spec(self) -> ModelSpec:
        return ModelSpec(
            architecture="",
            layers=tuple((call,) for call in self._calls),
            context_length=1,
            vocab_size=1,
            dtype=DType.FLOAT32,
        )


def load(name: str, *, check: bool = True, dtype: torch.dtype = torch.float32, **overrides: Any) -> LoadedModel:
    kind = ExpandedLatents if name in LATENT else LoadedModel
    return kind(build_hybrid(name, **overrides).to(dtype), name=name, check=check)


class Memory:
    """NaN-filled pools, the pages of three sequences, their own states and those they leave on the way."""

    def __init__(
        self, model: LoadedModel, tokens: Mapping[str, np.ndarray], cuts: Mapping[str, tuple[int, ...]]
    ) -> None:
        self.model, self.tokens, self.cuts = model, tokens, cuts
        order = iter(np.random.default_rng(7).permutation(np.arange(1, 48)).tolist())
        pages = -(-max(map(len, tokens.values())) // PAGE_SIZE)
        self.pages = {name: np.array([next(order) for _ in range(pages)]) for name in tokens}
        states = iter(np.random.default_rng(8).permutation(np.arange(1, 12)).tolist())
        self.own = {name: next(states) for name in tokens}
        self.left = {(name, cut): next(states) for name in tokens for cut in cuts.get(name, ())}
        self.groups = model.spec.groups(PAGE_SIZE)
        self.pools = [Pool(group.layout, 48) for group in self.groups]
        for pool in self.pools:
            for field in pool.layout.fields:
                for layer in field.layers:
                    pool.layer(field.name, layer).fill_(torch.nan)

    def run(self, step: Step) -> torch.Tensor:
        """Logits of every row of a step."""
        positions = np.concatenate([np.arange(start, stop) for start, stop in step.values()])
        ids = np.concatenate([self.tokens[name][start:stop] for name, (start, stop) in step.items()])
        paged, states = self._paged(step), self._states(step)
        batches = [states if group.reach.kind == "state" else paged for group in self.groups]
        running = RunningForward(self.pools, batches)
        return self.model.run(running, torch.from_numpy(ids), torch.from_numpy(positions), torch.arange(len(ids)))

    def _paged(self, step: Step) -> PagedBatch:
        starts, stops = np.array(list(step.values())).T
        return PagedBatch.of(np.stack([self.pages[name] for name in step]).astype(np.int32), starts, stops, PAGE_SIZE)

    def _states(self, step: Step) -> StateBatch:
        starts, sources, targets = [0], [], []
        for name, (start, stop) in step.items():
            inner = [cut for cut in self.cuts.get(name, ()) if start < cut < stop]
            for low, high in pairwise([start, *inner, stop]):
                starts.append(starts[-1] + high - low)
                sources.append(self.left.get((name, low), self.own[name]) if low else 0)
                targets.append(self.left.get((name, high), self.own[name]))
        return StateBatch(*(np.array(numbers, dtype=np.int32) for numbers in (starts, sources, targets)))


def share_prefix(memory: Memory) -> None:
    """c begins on a's pages and with the state that a left."""
    memory.pages["c"][: SHARED // PAGE_SIZE] = memory.pages["a"][: SHARED // PAGE_SIZE]
    memory.left["c", SHARED] = memory.left["a", SHARED]


def largest_error(model: LoadedModel, reference: torch.nn.Module) -> float:
    """Of the schedule's logits, in units of logits that spread as far as 5."""
    generator = np.random.default_rng(7)
    tokens = {name: generator.integers(0, VOCAB_SIZE - 1, length) for name, length in LENGTHS.items()}
    tokens["c"][:SHARED] = tokens["a"][:SHARED]
    with torch.inference_mode():
        plain = {name: reference(torch.from_numpy(t)[None], use_cache=False).logits[0] for name, t in tokens.items()}
    memory = Memory(model, tokens, CUTS)
    share_prefix(memory)
    errors = []
    for step in STEPS:
        logits = memory.run(step)
        wanted = torch.cat([plain[name][start:stop] for name, (start, stop) in step.items()])
        errors.append(float((logits - wanted.float()).abs().max()))
    scale = max(5.0, *(float(logits.abs().max()) for logits in plain.values()))
    return max(errors, key=lambda error: (np.isnan(error), error)) * 5 / scale


@pytest.fixture(autouse=True)
def _quiet():
    before = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    yield
    transformers_logging.set_verbosity(before)


@pytest.mark.parametrize("name", WITH_STATES)
def test_mixed_schedule_equals_the_plain_model(name):
    # Each of the two is up to 1.1e-4 from qwen3_5_moe_text in float64, so they may differ by twice that.
    assert largest_error(load(name), build_hybrid(name, attn_implementation="eager")) < 2e-4


def greedy(model: LoadedModel, prompts: Mapping[str, np.ndarray], count: int) -> dict[str, list[int]]:
    """The next `count` tokens of prompts that run packed: one step of both prompts, then decodes."""
    tokens = {name: np.concatenate((prompt, np.zeros(count, dtype=np.int64))) for name, prompt in prompts.items()}
    memory = Memory(model, tokens, {})
    step = {name: (0, len(prompt)) for name, prompt in prompts.items()}
    for _ in range(count):
        logits, row = memory.run(step), -1
        for name, (start, stop) in step.items():
            row += stop - start
            tokens[name][stop] = int(logits[row].argmax())
        step = {name: (stop, stop + 1) for name, (_, stop) in step.items()}
    return {name: tokens[name][len(prompt) :].tolist() for name, prompt in prompts.items()}


@pytest.mark.parametrize("name", WITH_STATES)
def test_packed_requests_get_the_tokens_of_generate(name):
    limits = UNLIMITED if name in ("nemotron_h", "zamba2") else {}
    count, generator = 10, np.random.default_rng(3)
    prompts = {key: generator.integers(0, VOCAB_SIZE - 1, length) for key, length in {"long": 37, "short": 12}.items()}
    reference = build_hybrid(name, attn_implementation="eager", eos_token_id=None, **limits)
    reference.generation_config.eos_token_id = None
    wanted = {}
    for key, prompt in prompts.items():
        ids = torch.from_numpy(prompt)[None]
        found = reference.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False, pad_token_id=0
        )
        wanted[key] = found[0, len(prompt) :].tolist()
    assert greedy(load(name, check=False, eos_token_id=None, **limits), prompts, count) == wanted


def test_only_the_frames_of_the_step_are_written():
    model = load("jamba", check=False)
    tokens = {"a": np.arange(9), "b": np.arange(9)}
    memory = Memory(model, tokens, {"a": (4,)})
    memory.run({"a": (0, 6), "b": (0, 1)})
    memory.run({"a": (6, 7), "b": (1, 3)})
    (pool,) = (pool for group, pool in zip(memory.groups, memory.pools, strict=True) if group.reach.kind == "state")
    for field in pool.layout.fields:
        for layer in field.layers:
            written = ~pool.layer(field.name, layer).flatten(1).isnan().any(dim=1)
            assert set(written.nonzero()[:, 0].tolist()) == {*memory.own.values(), *memory.left.values()}


@pytest.mark.parametrize("name", ["bamba", "jamba", "qwen3_next", "lfm2"])
def test_rows_of_no_request_get_logits_and_change_nothing(name):
    model = load(name, check=False)
    tokens = {"a": np.arange(9)}
    memory, padded = Memory(model, tokens, {}), Memory(model, tokens, {})
    paged, states = memory._paged({"a": (0, 5)}), memory._states({"a": (0, 5)})
    paged.slots = np.concatenate((paged.slots, np.zeros(2, dtype=np.int32)))
    batches = [states if group.reach.kind == "state" else paged for group in padded.groups]
    ids = torch.tensor([*range(5), 0, 0])
    logits = model.run(RunningForward(padded.pools, batches), ids, ids, torch.arange(7))
    assert (logits[:5] - memory.run({"a": (0, 5)})).abs().max() < 1e-3
    step = {"a": (5, 6)}
    assert (padded.run(step) - memory.run(step)).abs().max() < 1e-3


@covering(name=["falcon_h1", "jamba", "mamba2", "qwen3_next", "lfm2_moe"], dtype=[torch.bfloat16, torch.float16])
def test_half_precision_passes_its_check(name, dtype):
    model = load(name, dtype=dtype)
    dtypes = {field.name: str(field.dtype) for group in model.spec.groups(PAGE_SIZE) for field in group.layout.fields}
    assert dtypes.pop("ssm", "float32") == "float32"
    assert set(dtypes.values()) == {str(dtype).removeprefix("torch.")}


def test_states_in_the_type_that_the_configuration_asks_for():
    model = load("qwen3_5_text", mamba_ssm_dtype="bfloat16", check=False)
    (states,) = (group for group in model.spec.groups(PAGE_SIZE) if group.reach.kind == "state")
    assert {field.name: field.dtype for field in states.layout.fields}["ssm"] is DType.BFLOAT16


def test_models_without_attention_have_no_end():
    assert load("mamba2", check=False).spec.context_length == 2**20
    model = build_hybrid("mamba2")
    assert LoadedModel(model, name="mamba2", max_length=4096, check=False).spec.context_length == 4096


@pytest.mark.parametrize("name", ["bamba", "jamba"])
def test_installing_again_changes_nothing_and_plain_use_stays(name):
    model = build_hybrid(name)
    ids = torch.arange(9)[None]
    with torch.inference_mode():
        before = model(ids, use_cache=False).logits
        assert install_mixers(model) == sum("mamba" in kind or "linear" in kind for kind in model.config.layer_types)
        assert install_mixers(model) == 0
        assert torch.equal(model(ids, use_cache=False).logits, before)


@pytest.mark.parametrize("kind", ["qwen3_5", "qwen3_5_moe"])
def test_the_language_model_of_a_wrapper(kind, tmp_path):
    text = {field: value for field, value in published(f"{kind}_text").items() if value is not None}
    sizes = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 64}
    config = AutoConfig.for_model(kind, text_config=text, vision_config={**sizes, "num_position_embeddings": 16})
    transformers_logging.disable_progress_bar()
    try:
        wrapper = AutoModelForImageTextToText.from_config(config).eval()
        draw_weights(wrapper, 0)
        wrapper.save_pretrained(tmp_path)
    finally:
        transformers_logging.enable_progress_bar()
    ids = torch.arange(20)
    with torch.inference_mode():
        wanted = wrapper(input_ids=ids[None]).logits[0]
    assert (load_model(str(tmp_path)).plain_logits(ids) - wanted).abs().max() < 1e-4


BREAKS = {
    "no state is written": (
        "write_states",
        lambda original: lambda moves, layer, targets, states: None,
        "never written",
    ),
    "states begin from zeros": (
        "read_states",
        lambda original: lambda *given: torch.zeros_like(original(*given)),
        "differs by",
    ),
    "states are halved": (
        "write_states",
        lambda original: lambda moves, layer, targets, states: original(moves, layer, targets, states * 0.5),
        "differs by",
    ),
}


@covering(broken=BREAKS, name=["bamba", "mamba", "olmo_hybrid", "lfm2"])
def test_the_check_at_load_notices(broken, name, monkeypatch):
    function, change, said = BREAKS[broken]
    monkeypatch.setattr(Moves, function, change(getattr(Moves, function)))
    with pytest.raises(ModelCheckFailed, match=said):
        load(name)


def test_the_schedule_notices_pieces_that_do_not_wait(monkeypatch):
    monkeypatch.setattr(StateBatch, "_rounds", lambda batch: np.zeros(len(batch.sources), dtype=np.int32))
    assert np.isnan(largest_error(load("bamba", check=False), build_hybrid("bamba", attn_implementation="eager")))


def test_the_schedule_notices_steps_without_limits(monkeypatch):
    monkeypatch.setattr(mixers, "_with_limited_step", lambda layer: layer.forward)
    assert largest_error(load("zamba2", check=False), build_hybrid("zamba2", attn_implementation="eager")) > 1e-3
