"""The demo's hybrids: what becomes of frames where a cache has a pool for each kind of memory.

The engine runs in this process, and its pool of windows or states is too small for what the requests would like to
keep. Conversations over one system prompt take turns. Then an engine that keeps no prefixes answers the same prompts,
and has to say the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from quire.cli.demo_script import RULES, SUBJECTS, question

if TYPE_CHECKING:
    from quire.engine.llm import LLM
    from quire.engine.output import RequestOutput
    from quire.scheduler.sampling_params import SamplingParams

NUM_TALKS = 3
NUM_TURNS = 3
ANSWER_TOKENS = 32
SETTINGS: Mapping[str, Any] = {"device": "cpu", "dtype": "float32", "max_model_len": 1024, "show_plan": False}
AMPLE = "64MiB"  # all prompts at once, sharing nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class Hybrid:
    """An edition of the bundled model, and pools of which the one of group `short` is too small."""

    model: str
    layers: str
    short: str
    frames: str  # what its frames hold, in the plural
    settings: Mapping[str, Any]


HYBRIDS = {
    "window": Hybrid(
        model="quire-bundled-window",
        layers="three layers read the last 64 tokens, one reads all",
        short="window",
        frames="windows",
        settings={"kv_memory": "1MiB", "swa_full_tokens_ratio": 0.2, "max_num_batched_tokens": 128},
    ),
    "recurrent": Hybrid(
        model="quire-bundled-recurrent",
        layers="three layers keep a state, one reads all tokens",
        short="state",
        frames="states",
        settings={"kv_memory": "1280KiB", "max_mamba_cache_size": 9},
    ),
}


@dataclass(frozen=True, slots=True)
class Tick:
    """Something that the demo has to show: whether it did, and the numbers."""

    name: str
    passed: bool
    numbers: str = ""


def show_pools(hybrid: Hybrid) -> dict[str, Any]:
    """Hold the conversations and answer their prompts again; the findings. Raises AuditFailure."""
    from quire.engine.llm import LLM
    from quire.scheduler.sampling_params import SamplingParams

    greedy = SamplingParams(temperature=0, max_tokens=ANSWER_TOKENS)
    llm = LLM(hybrid.model, **SETTINGS, **hybrid.settings)
    turns = _converse(llm, greedy)
    llm.engine.audit()
    after = llm.statistics()
    forgetful = LLM(hybrid.model, **SETTINGS, enable_prefix_caching=False, kv_memory=AMPLE)
    warm = [output for turn in turns for output in turn]
    cold = forgetful.generate([{"prompt_token_ids": output.prompt_token_ids} for output in warm], greedy)
    found = {
        "model": hybrid.model,
        "prompt_tokens": after["prompt_tokens"],
        "reused_tokens": after["hit_tokens"],
        "reused_by_turn": [
            {
                "prompt_tokens": sum(len(output.prompt_token_ids) for output in turn),
                "cached_tokens": sum(output.num_cached_tokens for output in turn),
            }
            for turn in turns
        ],
        "evicted_pages": after["evicted_pages"],
        "pools": {
            pool["name"]: after["frames"][pool["name"]] | {"bytes": pool["bytes"]} for pool in after["plan"]["pools"]
        },
        "answers": len(warm),
        "equal_answers": sum(
            one.outputs[0].token_ids == other.outputs[0].token_ids for one, other in zip(warm, cold, strict=True)
        ),
    }
    return found | {"checks": {tick.name: tick.passed for tick in ticks(hybrid, found)}}


def _converse(llm: LLM, params: SamplingParams) -> list[Sequence[RequestOutput]]:
    """All conversations to their ends: the outputs of each turn."""
    talks = [[{"role": "system", "content": " ".join(RULES)}] for _ in range(NUM_TALKS)]
    turns: list[Sequence[RequestOutput]] = []
    for number in range(NUM_TURNS):
        for seed, messages in enumerate(talks):
            messages.append({"role": "user", "content": question(SUBJECTS[seed], number, seed)})
        turns.append(llm.chat(talks, params))
        for messages, output in zip(talks, turns[-1], strict=True):
            messages.append({"role": "assistant", "content": output.outputs[0].text})
    return turns


def ticks(hybrid: Hybrid, found: Mapping[str, Any]) -> list[Tick]:
    """What the findings of `show_pools` have to show."""
    short, evicted = found["pools"][hybrid.short], found["evicted_pages"]
    private = sum(frames["private"] for frames in found["pools"].values())
    shown = [
        Tick(
            "prefixes were reused",
            found["reused_tokens"] > 0,
            f"{found['reused_tokens']:,} of {found['prompt_tokens']:,} prompt tokens",
        )
    ]
    if hybrid.short == "state":
        shown.append(Tick("states were left for others to begin on", short["left"] > 0, f"{short['left']}"))
    shown += [
        Tick(
            f"{hybrid.frames} were dropped while their pages stayed",
            short["dropped"] > 0 and evicted == 0,
            f"{short['dropped']} frames; {evicted} pages were evicted",
        ),
        Tick(
            "without a cache the answers are the same",
            found["equal_answers"] == found["answers"],
            f"{found['equal_answers']} of {found['answers']}",
        ),
        Tick("no frame leaked", private == 0),
    ]
    return shown
