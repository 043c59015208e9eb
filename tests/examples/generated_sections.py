"""Parts of documents that are generated from the code. `python -m tests.examples.generated_sections` rewrites them."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import typer.main

from quire import errors
from quire.cli.app import app
from quire.engine.config import EngineConfig
from quire.models.registry import support_table
from tests.examples import generated_reference

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = sorted((*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").glob("*.md")))

MEANINGS = {
    "model": "a bundled model's name, a folder or a hub name; `quire-bundled` if left out",
    "tokenizer": "another folder or hub name for the tokenizer",
    "served_model_name": "the name clients use",
    "skip_tokenizer_init": "token ids in, token ids out",
    "device": "`cpu`, `cuda`, `cuda:N`; `auto` is the first GPU, else the CPU",
    "dtype": "`float32`, `float16`, `bfloat16`; `auto` is the model's own",
    "kv_dtype": "how keys and values are stored: `fp8_e4m3`, `fp8_e5m2`, `mxfp8`, `nvfp4`, `fp4_e2m1`, or a plain "
    "dtype; `auto` is what the model computes in",
    "page_size": "tokens in a page, and the shortest prefix that can be shared; by default 16, or what compressed "
    "entries need",
    "kv_memory": "bytes of the KV pools (`2GiB`); by default a quarter of the free memory, at most 4 GiB, on a CPU, "
    "and 80 % of what is free after loading on a GPU",
    "window_pool": "windows have a pool of their own, and free what they have passed",
    "swa_full_tokens_ratio": "tokens of window pools per token of full ones; by default what the load asks for",
    "mamba_full_memory_ratio": "bytes of states per byte of the other pools; by default what the load asks for",
    "max_mamba_cache_size": "states; by default what the load asks for",
    "checkpoint_interval": "tokens between states that a request leaves on its way, where frames are to spare",
    "max_model_len": "longest sequence, prompt and output; by default the model's context",
    "max_running_requests": "sequences that hold memory at once",
    "max_num_batched_tokens": "tokens in one step; longer prompts are computed in chunks",
    "policy": "`fcfs`, or `lpm`: longest cached prefix first",
    "eviction": "`density`, `lru`, `lfu`, `slru`, `fifo`, `mru`, `filo`, `priority`, `gdsf`, `s3fifo`",
    "enable_prefix_caching": "share the pages of common prefixes",
    "enable_kv_events": "record pages stored and removed (`engine.events`)",
    "host_memory": "host memory for pages that leave the device, in all (`8GiB`), or `auto`; by default none, and "
    "`auto` with storage",
    "storage": "where pages outlive the engine: a directory or a URL",
    "storage_size": "what may be kept there (`100GiB`); by default as the store is, and of a new directory half of the "
    "free disk, at most 32 GiB",
    "write_policy": "when a page is copied to the host: `write_through`, `write_through_selective`, `write_back`",
    "load": "`break_even` loads what is sooner loaded than computed, as measured; `always` loads all",
    "prefetch": "how long a request waits for storage: `break_even`, `best_effort`, `wait_complete`, `timeout`",
    "prefetch_seconds": "how long that is with `timeout`",
    "weights_epoch": "how often weights were replaced under the same name; pages of another epoch are never found",
    "retain_share": "what of the pool callers may ask to keep (`POST /v1/cache/retain`); 0 for nothing",
    "explain": "keep why prompts of the last requests were not cached, and count prompt tokens by cause",
    "overlap": "schedule a step while one is in flight; by default where the device is not the CPU",
    "threads": "CPU threads of torch in the engine's process; by default 1 for a tiny model, else what torch takes",
    "seed": "seed of requests that have none",
}
FLAGS = {"max_running_requests": "max_running", "max_num_batched_tokens": "max_batched"}
FLAGS |= {"enable_prefix_caching": "prefix_caching"}
"""Settings whose parameter of `quire serve` has another name."""


def models() -> str:
    """Model types by status, from the table that loading refuses by."""
    from tests.engine.test_hybrid_tokens import SERVED  # these load transformers
    from tests.tiny_hybrids import HYBRIDS
    from tests.tiny_latents import LATENTS
    from tests.tiny_models import ARCHITECTURES

    rows = support_table()
    verified = [row.model_type for row in rows if row.status == "verified"]
    hybrids = [{**HYBRIDS, **LATENTS}[name] for name in SERVED]
    compared = {settings["model_type"] for settings in (*ARCHITECTURES.values(), *LATENTS.values(), *hybrids)}
    assert compared <= set(verified), compared - set(verified)
    others = [name for name in verified if name not in compared]
    lines = [
        f"**Compared with transformers' `generate` in every `make test`:** {_names(sorted(compared))}.",
        "",
        f"**Passed the check at load as tiny random models, when the list was made:** {_names(others)}.",
        "",
        "| refused, because it ... | types |",
        "|---|---|",
    ]
    reasons = dict.fromkeys(row.reason for row in rows if row.status == "refused")
    lines += [f"| {reason} | {_names([r.model_type for r in rows if r.reason == reason])} |" for reason in reasons]
    return "\n".join(lines)


def hybrids() -> str:
    """Tiny models of hybrid architectures: their pools, what is reused, and the measured difference of logits."""
    from tests.engine.logit_differences import table  # loads transformers

    return table()


def error_codes() -> str:
    """Every error class with its code, HTTP status and exit code."""
    lines = ["| code | raised as | HTTP | exit | what it is |", "|---|---|---|---|---|"]
    for error in _error_classes():
        first = inspect.cleandoc(error.__doc__ or "").split("\n\n")[0].replace("\n", " ")
        lines.append(f"| `{error.code}` | `{error.__name__}` | {error.status} | {error.exit_code} | {first} |")
    return "\n".join(lines)


def settings() -> str:
    """Every field of `EngineConfig`: the keyword of `LLM`, the flag of `quire serve` and the default."""
    serve = typer.main.get_command(app).commands["serve"]  # type: ignore[attr-defined]
    flags = {parameter.name: parameter for parameter in serve.params}
    lines = ["| `LLM(...)` | `quire serve` | default | meaning |", "|---|---|---|---|"]
    for name, field in EngineConfig.model_fields.items():
        parameter = flags.get(FLAGS.get(name, name))
        flag = f"`{'/'.join((parameter.opts[0], *parameter.secondary_opts[:1]))}`" if parameter else "-"
        default = "-" if field.default is None or name == "model" else f"`{field.default}`"
        lines.append(f"| `{name}` | {flag} | {default} | {MEANINGS[name]} |")
    return "\n".join(lines)


def mutants() -> str:
    """Every mistake that fuzzing can inject: on which level it is met, and what it does to a user."""
    from tests.mutants import MUTANTS

    lines = ["| mutant | met on | what goes wrong |", "|---|---|---|"]
    lines += [f"| `{made.name}` | {made.level} | {made.wrong} |" for made in MUTANTS.values()]
    return "\n".join(lines)


SECTIONS: dict[str, Callable[[], str]] = {
    "models": models,
    "hybrids": hybrids,
    "errors": error_codes,
    "settings": settings,
    "names": generated_reference.names,
    "options": generated_reference.options,
    "routes": generated_reference.routes,
    "bodies": generated_reference.bodies,
    "metrics": generated_reference.metrics,
    "mutants": mutants,
}


def document_with(mark: str) -> Path:
    """The one document that has the mark `<!-- MARK -->`."""
    found = [path for path in DOCUMENTS if f"<!-- {mark} -->" in path.read_text(encoding="utf-8")]
    assert len(found) == 1, f"{len(found)} documents have the mark '{mark}'"
    return found[0]


def generated(name: str, text: str) -> str:
    """`text` with the section `name` between its two marks replaced by what the code says now."""
    marks = re.compile(rf"<!-- {name}: generated -->\n.*?<!-- {name}: end -->", re.DOTALL)
    before, *found = marks.split(text)
    assert len(found) == 1, f"the document has {len(found)} sections '{name}'"
    return f"{before}<!-- {name}: generated -->\n{SECTIONS[name]()}\n<!-- {name}: end -->{found[0]}"


def _names(names: list[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _error_classes() -> Iterator[type[errors.QuireError]]:
    for member in vars(errors).values():
        if isinstance(member, type) and issubclass(member, errors.QuireError):
            yield member


if __name__ == "__main__":
    for section in SECTIONS:
        document = document_with(f"{section}: generated")
        document.write_text(generated(section, document.read_text(encoding="utf-8")), encoding="utf-8")
