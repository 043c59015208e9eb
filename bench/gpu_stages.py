"""The stages of `gpu_first.py`: what each computes and checks. A stage that finds something wrong raises."""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import shutil
import sysconfig
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

Found = dict[str, Any]
PAGE_SIZE = 16


@dataclass(frozen=True, slots=True)
class Sizes:
    """What stages compute."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    intermediate: int
    vocab: int
    requests: int
    prompt: int
    new: int
    copied_bytes: int
    contexts: tuple[tuple[int, int], ...]  # of decode attention: sequences, tokens of each
    many: int = 256  # requests of the steps whose host time is measured


TOY = Sizes(64, 2, 4, 2, 96, 256, 3, 40, 6, 1 << 20, ((2, 40),), many=3)
SMALL = Sizes(1024, 8, 16, 8, 2816, 32_000, 8, 600, 24, 1 << 28, ((8, 1024),))
LLAMA_8B = Sizes(4096, 32, 32, 8, 14_336, 128_256, 64, 1024, 64, 1 << 30, ((1, 8192), (16, 8192), (64, 8192)))


@dataclass(frozen=True, slots=True)
class Options:
    """Of one run. `large` are the sizes of stages that measure. `told` is the file of `tell`, and `lines` one that gets
    a line of JSON each time, marked as partial, of the stage that has this `name`."""

    device: str
    small: Sizes
    large: Sizes
    dtype: str
    told: Path | None = None
    lines: Path | None = None
    name: str = ""

    @property
    def is_cuda(self) -> bool:
        return self.device.startswith("cuda")

    def tell(self, found: Found) -> None:
        """Keep what a stage has found until now: it is printed also if the stage fails or has no time left."""
        if self.told is not None:
            part = self.told.with_suffix(".part")
            part.write_text(json.dumps(found, default=str))
            part.rename(self.told)
        if self.lines is not None:
            append(self.lines, json.dumps({"stage": self.name, "partial": True, "found": found}, default=str))


def append(file: Path, line: str) -> None:
    """Add a line to a file in one write: whenever this process is killed, the file has whole lines."""
    there = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(there, f"{line}\n".encode())
    finally:
        os.close(there)


# -- models and engines


def model_of(sizes: Sizes, dtype: str, device: str) -> Any:
    """A random Llama, made on the CPU and moved, or made on the device if it is large. The same for all devices."""
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    from quire.models.hf import LoadedModel

    config = LlamaConfig(
        vocab_size=sizes.vocab,
        hidden_size=sizes.hidden,
        intermediate_size=sizes.intermediate,
        num_hidden_layers=sizes.layers,
        num_attention_heads=sizes.heads,
        num_key_value_heads=sizes.kv_heads,
        max_position_embeddings=16_384,
        tie_word_embeddings=False,
        eos_token_id=0,
    )
    torch.manual_seed(0)
    with torch.device(device if sizes.hidden >= LLAMA_8B.hidden else "cpu"):
        model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 2:
                parameter.normal_(std=1.0 if "embed" in name else 2.0 * parameter.shape[1] ** -0.5)
    return LoadedModel(model.to(device), name="random", check=False)


def kv_bytes(model: Any, sizes: Sizes, requests: int) -> int:
    """Bytes of KV memory for so many requests at once, with two pages more for each."""
    pages = -(-(sizes.prompt + sizes.new) // PAGE_SIZE) + 2
    return int(requests * pages * sum(group.layout.bytes_per_frame for group in model.spec.groups(PAGE_SIZE)))


def engine_of(model: Any, options: Options, sizes: Sizes, device: str | None = None, **settings: Any) -> Any:
    """An engine with room for all requests of `sizes`."""
    from quire.engine.config import engine_config
    from quire.engine.core import EngineCore

    settings = {
        "page_size": PAGE_SIZE,
        "max_model_len": 2 * (sizes.prompt + sizes.new) + 32,
        "max_running_requests": sizes.requests,
        "target_itl_ms": "off",
        "kv_memory": kv_bytes(model, sizes, sizes.requests + 1),
        **settings,
    }
    return EngineCore(engine_config(model="random", device=device or options.device, **settings), model=model)


def prompts_of(sizes: Sizes, seed: int = 0) -> list[list[int]]:
    """Prompts that begin alike."""
    import numpy as np

    rng = np.random.default_rng(seed)
    shared = rng.integers(1, sizes.vocab, sizes.prompt // 2).tolist()
    return [shared + rng.integers(1, sizes.vocab, sizes.prompt // 2).tolist() for _ in range(sizes.requests)]


def generate(core: Any, prompts: Sequence[Sequence[int]], new: int, name: str = "r", **params: Any) -> list[list[int]]:
    """The tokens of each prompt."""
    import numpy as np

    from quire.engine.messages import EngineRequest
    from quire.scheduler.sampling_params import SamplingParams

    chosen = SamplingParams(**{"temperature": 0, "max_tokens": new, "ignore_eos": True, **params})
    found: dict[str, list[int]] = {}
    for at, prompt in enumerate(prompts):
        request = EngineRequest(
            request_id=f"{name}-{at}", prompt=np.array(prompt, dtype=np.int32).tobytes(), params=chosen
        )
        core.add(request)
        found[request.request_id] = []
    while core.has_work():
        for output in core.step():
            assert not output.error, output.error
            found[output.request_id].extend(output.token_ids)
    return list(found.values())


def finish(device: str) -> None:
    """Wait for the device."""
    import torch

    if device.startswith("cuda"):
        torch.cuda.synchronize()


def milliseconds(work: Callable[[], object], device: str, most_s: float = 1.0) -> float:
    """Of one call, at best, after one that is not counted."""
    work()
    finish(device)
    best, until = float("inf"), time.perf_counter() + most_s
    for _ in range(50):
        began = time.perf_counter()
        work()
        finish(device)
        best = min(best, time.perf_counter() - began)
        if time.perf_counter() > until:
            break
    return best * 1e3


def rate(num_bytes: int, work: Callable[[], object], options: Options) -> float:
    """GB per second of a call that moves so many bytes."""
    return round(num_bytes / milliseconds(work, options.device) / 1e6, 1)


# -- stages


def versions(options: Options) -> Found:
    """Everything is imported, and what is missing is named."""
    import numpy as np
    import torch
    import transformers

    wanted = ("msgspec", "pydantic", "xxhash", "prometheus_client", "fastapi", "uvicorn", "triton", "tokenizers")
    found: Found = {
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "numpy": np.__version__,
        "cuda": torch.version.cuda,
        "missing": [name for name in wanted if importlib.util.find_spec(name) is None],
    }
    if importlib.util.find_spec("triton") is not None:
        import triton

        found["triton"] = triton.__version__
        # It compiles what launches kernels, by these.
        found["compiler"] = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
        found["python_headers"] = (Path(sysconfig.get_path("include")) / "Python.h").exists()
    import quire.engine.core  # noqa: F401 (that it can be imported is the question)

    if options.is_cuda:
        properties = torch.cuda.get_device_properties(0)
        found["gpu"] = {
            "name": properties.name,
            "capability": list(torch.cuda.get_device_capability(0)),
            "gib": round(properties.total_memory / 2**30, 1),
            "processors": properties.multi_processor_count,
        }
        assert float(torch.ones(4, device="cuda").sum()) == 4.0
    return found


def pool(options: Options) -> Found:
    """Pools, uploads and page tables; rates of plain copies."""
    import numpy as np
    import torch

    from quire.engine.device.page_tables import DevicePageTables
    from quire.kernels.fields import PagedField
    from quire.memory.pool import Pool
    from quire.memory.residency import PageTableChanges
    from quire.spec.layout import DType, Field, PageLayout
    from quire.upload import Upload, to_device

    device = torch.device(options.device)
    layout = PageLayout(
        16, tuple(Field(name=name, shape=(2, 64), dtype=DType.BFLOAT16, layers=(0, 1)) for name in "kv")
    )
    made = Pool(layout, 64, device=device)
    slots, written = to_device(np.array([17, 900, 33]), device), made.layer("k", 1)
    PagedField(written).write(slots, torch.full((3, 2, 64), 2.0, dtype=torch.bfloat16, device=device))
    assert written[900 // 16, 900 % 16].float().mean().item() == 2.0 and made.layer("k", 0).abs().max().item() == 0
    upload = Upload(device, 4096)
    arrays = [np.arange(9, dtype=np.int32), np.linspace(0, 1, 7), np.zeros((2, 0)), np.array([[True, False]])]
    with upload:
        sent = [to_device(array, device) for array in arrays]
    assert all(np.array_equal(tensor.cpu().numpy(), array) for tensor, array in zip(sent, arrays, strict=True))
    tables = DevicePageTables(2, 4, 8, device=device)
    changes = PageTableChanges(np.array([3, 9], np.int32), np.array([[5, 6], [7, 8]], np.int32))
    tables.apply(tables.sent(changes))
    assert tables.tables[1, 1, 1].item() == 8 and tables.tables[0, 0, 3].item() == 5
    found: Found = {"upload_copies": upload.num_copies, "pool_bytes": made.num_bytes}
    size = options.large.copied_bytes
    there, other = (torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(2))
    found["device_gb_s"] = rate(2 * size, lambda: there.copy_(other), options)
    if options.is_cuda:
        host = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        found["to_device_gb_s"] = rate(size, lambda: there.copy_(host, non_blocking=True), options)
        found["to_host_gb_s"] = rate(size, lambda: host.copy_(there, non_blocking=True), options)
    return found


def kernels(options: Options) -> Found:
    """Attention of the chosen backend beside torch's operators on the CPU in float32, and the time of decodes."""
    import torch

    from quire.kernels.backend import AttentionBackend

    found: Found = {"cases": {}}
    device = torch.device(options.device)
    backend = AttentionBackend("auto", device)
    found["backend"] = backend.about()
    cases: dict[str, dict[str, Any]] = {
        "decodes": {"news": [1, 1, 1], "contexts": [37, 5, 130]},
        "chunk": {"news": [40], "contexts": [70]},
        "mixed": {"news": [1, 33, 1], "contexts": [64, 90, 200]},
        "drafts": {"news": [4, 3], "contexts": [50, 81]},
        "branches": {"news": [6, 1], "contexts": [50, 20], "parents": [-1, 0, 0, 1, 1, 2, -1]},
        "window": {"news": [1, 20], "contexts": [90, 60], "window": 24},
        "softcap": {"news": [1, 9], "contexts": [44, 30], "softcap": 20.0},
        "sinks": {"news": [1, 9], "contexts": [44, 30], "sinks": True},
    }
    wrong = []
    for dtype in ("float32", "bfloat16"):
        limit = 2e-5 if dtype == "float32" and not options.is_cuda else 2e-2
        for name, case in cases.items():
            errors = _attention_error(case, dtype, device, backend)
            found["cases"][f"{name} {dtype}"] = errors
            options.tell(found)
            if not errors <= limit:
                wrong.append(f"{name} in {dtype} is off by {errors}")
    found["calls"], found["fallbacks"] = dict(backend.calls), dict(backend.fallbacks)
    found["decode_ms"] = {}
    for sequences, context in options.large.contexts:
        elapsed, num_bytes = _decode_time(options.large, sequences, context, options, backend)
        rate = round(num_bytes / elapsed / 1e6, 1)
        found["decode_ms"][f"{sequences} x {context}"] = {"ms": round(elapsed, 4), "gb_s": rate}
        options.tell(found)
    assert not wrong, "; ".join(wrong)
    return found


def launches(options: Options) -> Found:
    """Microseconds of the host for attention of one layer; a step has as many of them as layers."""
    import torch
    from bench.kernels.launches import measure, silent_kernels

    if importlib.util.find_spec("triton") is None:
        return {"skipped": "triton is not installed"}
    sizes, device = options.large, torch.device(options.device)
    heads = (sizes.heads, sizes.kv_heads, sizes.hidden // sizes.heads)
    with nullcontext() if options.is_cuda else silent_kernels(), torch.inference_mode():
        found: Found = {"launches": "real" if options.is_cuda else "none"}
        found["us_per_layer"] = measure(
            device,
            getattr(torch, options.dtype),
            heads,
            most_s=1.0 if options.is_cuda else 0.05,
            wait=lambda: finish(options.device),
        )
    return found


def moves(options: Options) -> Found:
    """Page tables, frames, rows and tokens of host memory, moved by kernels: the same bits as by torch's operators."""
    import numpy as np
    import torch

    from quire.kernels.backend import AttentionBackend
    from quire.kernels.moves import TORCH, HostEntries, Pieces
    from quire.memory.host_pool import HostPool
    from quire.memory.pool import Pool
    from quire.spec.group import GroupSpec
    from quire.spec.layout import DType, Field, PageLayout

    device = torch.device(options.device)
    interprets = not options.is_cuda and os.environ.get("TRITON_INTERPRET") == "1"
    made = AttentionBackend("triton" if interprets else "auto", device).moves
    found: Found = {"moves": type(made).__name__}
    tables = torch.zeros(2, 257, 512, dtype=torch.int32, device=device)
    other = tables.clone()
    places = np.random.default_rng(1).permutation(2 * 257)[:300]
    changes = torch.from_numpy(np.stack((places, places + 1, places + 2)).astype(np.int32)).to(device)
    made.set_entries(tables, changes)
    TORCH.set_entries(other, changes)
    assert torch.equal(tables, other), "page tables differ"
    found["set_entries_us"] = round(milliseconds(lambda: made.set_entries(tables, changes), options.device) * 1e3, 1)
    options.tell(found)

    sizes = options.large
    piece = 16 * sizes.kv_heads * (sizes.hidden // sizes.heads) * 2  # of 16 tokens of one layer
    count = max(2, min(64, sizes.copied_bytes // (2 * sizes.layers * piece)))
    generator = torch.Generator().manual_seed(1)

    def random(*shape: int) -> Any:
        return torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)

    pool = random(count + 1, 2 * sizes.layers * piece).to(device)
    pieces = Pieces.of([(0, pool[None, :, None])], pool.shape[1])
    rows = torch.randperm(count, generator=generator).to(device) + 1
    records = [torch.empty(count, pieces.record_words, dtype=pieces.word, device=device) for _ in range(2)]
    for each, record in zip((made, TORCH), records, strict=True):
        each.gather(pieces, rows, record)
    assert torch.equal(*records), "records differ"
    before = pool.clone()
    made.move(pieces, rows.flip(0), rows)
    made.scatter(pieces, rows, records[0])
    assert torch.equal(pool, before), "frames differ"
    moved = 2 * records[0].nbytes
    found["gather_gb_s"] = rate(moved, lambda: made.gather(pieces, rows, records[0]), options)
    found["scatter_gb_s"] = rate(moved, lambda: made.scatter(pieces, rows, records[0]), options)
    options.tell(found)

    layer = torch.zeros(9, 1, 8, 16, 32, dtype=torch.bfloat16, device=device)
    states = torch.randn(4, 8, 16, 32, generator=generator).bfloat16().float().to(device)
    kept, sources = torch.tensor([7, 2, 5, 1], device=device), torch.tensor([5, 0, 7, 2], device=device)
    made.write_states(layer, kept, states)
    assert torch.equal(layer[kept, 0].float(), states), "states are stored as others"
    for wanted in (None, torch.float32):
        both = (each.read_states(layer, sources, wanted) for each in (made, TORCH))
        assert torch.equal(*both), "states differ"

    # DeepSeek's latents in FP8, of one layer, in records of host memory that is registered with CUDA.
    layout = PageLayout(64, (Field(name="latents", shape=(1, 656), dtype=DType.UINT8, layers=(0,)),))
    memory = HostPool([GroupSpec(name="hosted", layout=layout)], [64], pinned=options.is_cuda)
    host = Pool(layout, rows=torch.from_numpy(memory.payloads(0)), reader=device).layer("latents", 0)
    host.copy_(random(*host.shape))
    tokens = 64 if interprets else 2048
    frames, offsets = np.divmod(np.random.default_rng(1).permutation(65 * 64)[:tokens], 64)
    targets, hot = torch.arange(tokens, device=device), torch.zeros(tokens // 64, 64, 1, 656, dtype=torch.uint8)
    hots = [HostEntries([(host, hot.to(device).clone())]) for _ in range(2)]
    for each, entries in zip((made, TORCH), hots, strict=True):
        each.swap_in(entries, frames, offsets, targets)
    assert torch.equal(hots[0].parts[0][1], hots[1].parts[0][1]), "hot buffers differ"
    found["swap_in_aligned"] = hots[0].is_aligned
    found["swap_in_gb_s"] = rate(tokens * 656, lambda: made.swap_in(hots[0], frames, offsets, targets), options)
    memory.close()
    return found


def _paged(news: Sequence[int], contexts: Sequence[int], backend: Any, parents: Sequence[int] | None = None) -> Any:
    """A batch on scattered pages of 16 tokens, and how many frames it needs."""
    import numpy as np

    from quire.kernels.batch import PagedBatch

    width = -(-max(contexts) // 16)
    frames = 1 + np.random.default_rng(1).permutation(len(contexts) * width).astype(np.int32).reshape(-1, width)
    stops = np.array(contexts, dtype=np.int64)
    follows = None if parents is None else np.array(parents, dtype=np.int32)
    batch = PagedBatch.of(frames, stops - np.array(news), stops, 16, follows)
    batch.backend = backend
    return batch, int(frames.max())


def _attention_error(case: dict[str, Any], dtype: str, device: Any, backend: Any) -> float:
    import torch

    from quire.kernels.attention import paged_attention
    from quire.kernels.backend import AttentionBackend
    from quire.kernels.fields import KVFields, PagedField
    from quire.kernels.terms import AttentionTerms

    heads, kv_heads, dim = 8, 2, 64
    news, contexts = case["news"], case["contexts"]
    generator = torch.Generator().manual_seed(3)

    def random(*shape: int) -> Any:
        return torch.randn(*shape, generator=generator)

    outs = []
    query, new_key, new_value = (
        random(sum(news), heads, dim),
        random(sum(news), kv_heads, dim),
        random(sum(news), kv_heads, dim),
    )
    sinks = random(heads) if case.get("sinks") else None
    stored: list[Any] = []
    for where, kind, chosen in (
        ("cpu", torch.float32, AttentionBackend("torch")),
        (device, getattr(torch, dtype), backend),
    ):
        batch, most = _paged(news, contexts, chosen, case.get("parents"))
        if not stored:
            stored = [random(most + 1, 16, kv_heads, dim) for _ in range(2)]
        narrow = getattr(torch, dtype)
        fields = KVFields(*(PagedField(each.to(narrow).to(kind).to(where)) for each in stored))
        fields.write(
            batch.slots_on(torch.device(where)), *(each.to(narrow).to(kind).to(where) for each in (new_key, new_value))
        )
        out = paged_attention(
            query.to(narrow).to(kind).to(where),
            fields,
            batch,
            AttentionTerms(
                scale=dim**-0.5,
                window=case.get("window", 0),
                softcap=case.get("softcap"),
                sinks=None if sinks is None else sinks.to(where),
            ),
        )
        outs.append(out.float().cpu())
    return float((outs[0] - outs[1]).abs().max())  # NaN if one is


def formats(options: Options) -> Found:
    """Rows written in each format, with the bits of torch's operators on the CPU, and read again; latents, and selected
    tokens of these."""
    import torch

    from quire.kernels.backend import AttentionBackend
    from quire.spec.kv_format import KV_FORMATS

    device = torch.device(options.device)
    backend, found, wrong = AttentionBackend("auto", device), Found(), []
    for name, kv_format in KV_FORMATS.items():
        if kv_format.encodes:
            error, same = _format_error(kv_format, device, backend)
            found[name] = {"error": error, "same_bits": same}
            options.tell(found)
            if not (same and error <= 1e-4):
                wrong.append(f"{name} is off by {error}" + ("" if same else ", and has other bits"))
    found["latents"], found["selected"] = _latent_errors(device, backend)
    options.tell(found)
    wrong += [f"{name} are off by {found[name]}" for name in ("latents", "selected") if not found[name] <= 1e-4]
    found["calls"], found["fallbacks"] = dict(backend.calls), dict(backend.fallbacks)
    assert not wrong, "; ".join(wrong)
    return found


def _format_error(kv_format: Any, device: Any, backend: Any) -> tuple[float, bool]:
    """Of attention in float32 over stored rows, and whether these have the same bits."""
    import torch

    from quire.kernels.attention import paged_attention
    from quire.kernels.backend import AttentionBackend
    from quire.kernels.fields import KVFields, PagedField
    from quire.kernels.terms import AttentionTerms
    from quire.spec.layers import formatted

    heads, kv_heads, dim = 8, 2, 128
    outs, bits = [], []
    for where, chosen in ((torch.device("cpu"), AttentionBackend("torch")), (device, backend)):
        generator = torch.Generator().manual_seed(3)
        batch, most = _paged([1, 20], [90, 60], chosen)
        slots, made = torch.arange((most + 1) * 16, device=where), []
        for name in "kv":
            frames = [
                torch.zeros(most + 1, 16, *part.shape, dtype=getattr(torch, part.dtype.value), device=where)
                for part in formatted(name, (kv_heads, dim), kv_format, group="full")
            ]
            scales = frames[1] if len(frames) > 1 else None
            made.append(PagedField(frames[0], scales, kv_format, writer=chosen.writer))
            made[-1].write(slots, torch.randn(len(slots), kv_heads, dim, generator=generator).to(where) * 3)
            bits.append([each.cpu().view(torch.uint8) for each in frames])
        fields, own = KVFields(*made), batch.slots_on(where)
        query = torch.randn(len(own), heads, dim, generator=generator).to(where)
        outs.append(paged_attention(query, fields, batch, AttentionTerms(scale=dim**-0.5)).cpu())
    same = all(torch.equal(a, b) for at in (0, 1) for a, b in zip(bits[at], bits[at + 2], strict=True))
    return float((outs[0] - outs[1]).abs().max()), same


def _latent_errors(device: Any, backend: Any) -> tuple[float, float]:
    """Of attention in float32 over latents, all of them and selected ones."""
    import torch

    from quire.kernels.attention import attend_selected, paged_attention
    from quire.kernels.backend import AttentionBackend
    from quire.kernels.fields import LatentFields, PagedField
    from quire.kernels.terms import AttentionTerms

    heads, widths = 16, (128, 32)
    outs = []
    for where, chosen in ((torch.device("cpu"), AttentionBackend("torch")), (device, backend)):
        generator = torch.Generator().manual_seed(3)
        batch, most = _paged([1, 20], [700, 60], chosen)
        pools = [torch.randn(most + 1, 16, width, generator=generator).to(where) for width in widths]
        fields = LatentFields(*(PagedField(pool) for pool in pools))
        count = batch.num_rows
        query = torch.randn(count, heads, sum(widths), generator=generator).to(where)
        slots = torch.randint(0, (most + 1) * 16, (count, 600), generator=generator)
        hidden = torch.rand(slots.shape, generator=generator) < 0.3
        selected, _ = attend_selected(
            query, fields, slots.to(where), hidden.to(where), AttentionTerms(scale=0.1), chosen
        )
        outs.append((paged_attention(query, fields, batch, AttentionTerms(scale=0.1)).cpu(), selected.cpu()))
    latents, chosen_ones = (float((a - b).abs().max()) for a, b in zip(*outs, strict=True))
    return latents, chosen_ones


def _decode_time(sizes: Sizes, sequences: int, context: int, options: Options, backend: Any) -> tuple[float, int]:
    """Milliseconds of decode attention of one layer, and the bytes of keys and values that it reads."""
    import torch

    from quire.kernels.attention import paged_attention
    from quire.kernels.fields import KVFields, PagedField
    from quire.kernels.terms import AttentionTerms

    dim, device, dtype = sizes.hidden // sizes.heads, torch.device(options.device), getattr(torch, options.dtype)
    batch, most = _paged([1] * sequences, [context] * sequences, backend)
    fields = KVFields(
        *(PagedField(torch.randn(most + 1, 16, sizes.kv_heads, dim, dtype=dtype, device=device)) for _ in range(2))
    )
    query = torch.randn(sequences, sizes.heads, dim, dtype=dtype, device=device)
    calls = 10 if options.is_cuda else 1  # the host's part of one call would count

    def attend() -> None:
        for _ in range(calls):
            paged_attention(query, fields, batch, AttentionTerms(scale=dim**-0.5))

    elapsed = milliseconds(attend, options.device, most_s=2.0) / calls
    return elapsed, 2 * sequences * context * sizes.kv_heads * dim * dtype.itemsize


def model(options: Options) -> Found:
    """Greedy tokens of the CPU in float32, on the device in float32; cold and from cached pages."""
    sizes = options.small
    prompts = prompts_of(sizes)
    expected = generate(engine_of(model_of(sizes, "float32", "cpu"), options, sizes, "cpu"), prompts, sizes.new)
    found: Found = {"requests": len(prompts), "tokens": sizes.new}
    options.tell(found)
    core = engine_of(model_of(sizes, "float32", options.device), options, sizes)
    cold = generate(core, prompts, sizes.new, "cold")
    same = found["same"] = [_common(a, b) for a, b in zip(cold, expected, strict=True)]
    options.tell(found)
    found["warm_is_cold"] = generate(core, prompts, sizes.new, "warm") == cold
    core.audit()
    statistics = core.statistics()
    found |= {"hit_tokens": statistics["hit_tokens"], "attention": statistics["attention"]}
    assert found["hit_tokens"] > 0, "nothing was found in the cache"
    # Sums in another order may turn a near tie; a mistake turns most requests early.
    assert sum(same) >= 0.8 * sizes.new * len(prompts), f"tokens differ: {same}"
    return found


def _common(left: Sequence[int], right: Sequence[int]) -> int:
    """How many leading tokens are the same."""
    return next((at for at, pair in enumerate(zip(left, right, strict=True)) if pair[0] != pair[1]), len(left))


def sampler(options: Options) -> Found:
    """Every kind of sampling from the same logits; the noise must be the same bits."""
    import numpy as np
    import torch

    from quire.engine.device.sampler import Sampler
    from quire.scheduler.request import Request
    from quire.scheduler.sampling_params import SamplingParams
    from quire.scheduler.step import TERMS, Places, terms_of

    kinds: list[dict[str, Any]] = [
        {"temperature": 0},
        {"seed": 1},
        {"seed": 2, "top_k": 7},
        {"seed": 3, "top_p": 0.8},
        {"seed": 4, "min_p": 0.05, "logit_bias": {5: 2.0}},
        {"seed": 5, "top_p": 0.95, "temperature": 1.4, "repetition_penalty": 1.2, "presence_penalty": 0.5},
        {"seed": 6, "top_k": 1500},
        {"temperature": 0, "logprobs": 4},
    ]
    many = [kinds[at % len(kinds)] for at in range(8 * len(kinds))]
    requests = [
        Request(str(at), np.arange(1, 9, dtype=np.int32), SamplingParams(**kind), max_tokens=9)
        for at, kind in enumerate(many)
    ]
    places = Places(np.array(list(map(terms_of, requests)), dtype=TERMS), np.zeros(len(many), np.int64), requests)
    logits = torch.randn(len(many), options.large.vocab, generator=torch.Generator().manual_seed(1)) * 3
    drawn = {}
    for where in ("cpu", options.device):
        made, there = Sampler([2]), logits.to(where)
        drawn[where] = made.draw(there.clone(), places).tokens.cpu()
    same = int((drawn["cpu"] == drawn[options.device]).sum())
    elapsed = milliseconds(lambda: made.draw(there.clone(), places), options.device)
    assert same >= len(many) - 1, f"{same} of {len(many)} draws are the same"
    return {"draws": len(many), "same": same, "ms": round(elapsed, 3)}


@contextmanager
def _no_waits(options: Options, core: Any) -> Iterator[tuple[list[float], list[int]]]:
    """Launches raise if they wait for the device; their host seconds and requests."""
    import torch

    launch, seconds, requests = core.runner.launch, [], []

    def timed(step: Any, *given: Any) -> Any:
        requests.append(len(step))
        began = time.perf_counter()
        if options.is_cuda:
            torch.cuda.set_sync_debug_mode("error")
        try:
            return launch(step, *given)
        finally:
            if options.is_cuda:
                torch.cuda.set_sync_debug_mode("default")
            seconds.append(time.perf_counter() - began)

    core.runner.launch = timed
    try:
        yield seconds, requests
    finally:
        core.runner.launch = launch


def overlap(options: Options) -> Found:
    """No launch waits for the device; the host time of a launch; steps with and without overlap."""
    sizes = options.small
    loaded = model_of(sizes, options.dtype, options.device)
    found: Found = {}
    tokens = {}
    for overlaps in (True, False):
        core = engine_of(loaded, options, sizes, overlap=overlaps)
        generate(core, prompts_of(sizes), sizes.new, "first")
        with _no_waits(options, core) as (seconds, _):
            began = time.perf_counter()
            tokens[overlaps] = generate(core, prompts_of(sizes), sizes.new)
            elapsed = time.perf_counter() - began
        name = "overlap" if overlaps else "in turn"
        found[name] = {
            "launch_ms": round(sorted(seconds)[len(seconds) // 2] * 1e3, 3),
            "tokens_s": round(sizes.requests * sizes.new / elapsed, 1),
        }
        options.tell(found)
    assert tokens[True] == tokens[False], "overlap changes tokens"
    return found


def graphs(options: Options) -> Found:
    """Decode steps as CUDA graphs: the tokens of eager steps, the host time of a launch, tokens per second of both, and
    the memory of graphs beside what is planned."""
    sizes = options.small
    loaded = model_of(sizes, options.dtype, options.device)
    found: Found = {}
    tokens = {}
    for name, off in (("graphs", False), ("eager", True)):
        began = time.perf_counter()
        core = engine_of(loaded, options, sizes, disable_cuda_graph=off)
        start_s = time.perf_counter() - began
        generate(core, prompts_of(sizes), sizes.new, "first")
        with _no_waits(options, core) as (seconds, _):
            began = time.perf_counter()
            tokens[name] = generate(core, prompts_of(sizes), sizes.new)
            elapsed = time.perf_counter() - began
        found[name] = {
            "start_s": round(start_s, 2),
            "launch_ms": round(sorted(seconds)[len(seconds) // 2] * 1e3, 3),
            "tokens_s": round(sizes.requests * sizes.new / elapsed, 1),
            "statistics": core.statistics()["cuda_graphs"],
        }
        options.tell(found)
    same = [_common(a, b) for a, b in zip(tokens["graphs"], tokens["eager"], strict=True)]
    found["same"] = same
    options.tell(found)
    found["many"] = _host_of_many(options, loaded)
    # Sums of attention are merged in another order, which may turn a near tie.
    assert sum(same) >= 0.8 * sizes.new * sizes.requests, f"graphs change tokens: {same}"
    if options.is_cuda:
        statistics = found["graphs"]["statistics"]
        assert statistics["replays"] > 0, f"nothing was replayed: {statistics}"
    return found


def _host_of_many(options: Options, loaded: Any) -> Found:
    """Milliseconds of steps of many short requests: the median launch, which only the host computes, and the mean
    step, with what it waits for."""
    sizes = replace(options.small, requests=options.small.many, prompt=32)
    core = engine_of(loaded, options, sizes)
    generate(core, prompts_of(sizes), 2, "first")
    with _no_waits(options, core) as (seconds, requests):
        began = time.perf_counter()
        generate(core, prompts_of(sizes, 1), sizes.new)
        elapsed = time.perf_counter() - began
    launch, step = sorted(seconds)[len(seconds) // 2], elapsed / len(seconds)
    found = {"requests": sizes.requests, "largest_step": max(requests)}
    return found | {"launch_ms": round(launch * 1e3, 3), "step_ms": round(step * 1e3, 3)}


def tiers(options: Options) -> Found:
    """Frames to host memory and back, byte for byte, and their rates; an engine that loads what it has saved."""
    import numpy as np
    import torch

    from quire.engine.device.frame_staging import ComputeStream, FrameStaging
    from quire.memory.frame_copies import FrameCopies
    from quire.memory.host_pool import HostPool
    from quire.memory.pool import Pool
    from quire.spec.group import GroupSpec
    from quire.spec.layout import DType, Field, PageLayout

    sizes, device = options.large, torch.device(options.device)
    shape = (sizes.kv_heads, sizes.hidden // sizes.heads)
    fields = (Field(name=name, shape=shape, dtype=DType.BFLOAT16, layers=tuple(range(sizes.layers))) for name in "kv")
    layout = PageLayout(16, tuple(fields))
    count = max(4, sizes.copied_bytes // layout.bytes_per_frame)
    made = Pool(layout, count, device=device)
    for _, tensor in made.tensors:
        tensor.copy_(torch.randn(tensor.shape, dtype=tensor.dtype, device=device))
    group = GroupSpec(name="full", layout=layout)
    host = HostPool([group], [count], pinned=options.is_cuda)
    staged = FrameStaging(ComputeStream(device)).frames if options.is_cuda else None
    copies = FrameCopies([made], host, staged, queues=staged is not None)
    frames = np.arange(1, count + 1, dtype=np.int32)
    before = [tensor.clone() for _, tensor in made.tensors]
    found: Found = {"frame_bytes": layout.bytes_per_frame, "frames": count, "pinned": host.pinned}

    def load() -> None:
        queued = copies.to_device(0, frames, frames)
        if queued is not None:
            queued.wait()

    for name, work in (("to_host", lambda: copies.to_host(0, frames, frames)), ("to_device", load)):
        found[f"{name}_gb_s"] = rate(count * layout.bytes_per_frame, work, options)
        if name == "to_host":
            for _, tensor in made.tensors:
                tensor[:, 1:].zero_()
            finish(options.device)
    if options.is_cuda:
        began = time.perf_counter()
        queued = copies.to_device(0, frames, frames)
        found["queued_ms"] = round((time.perf_counter() - began) * 1e3, 3)
        queued.wait()
    options.tell(found)
    same = all(torch.equal(tensor[:, 1:], was[:, 1:]) for (_, tensor), was in zip(made.tensors, before, strict=True))
    assert same, "frames came back with other bytes"
    host.close()
    return found | _tiered_engine(options)


def _tiered_engine(options: Options) -> Found:
    """A starved engine gives the tokens of an ample one."""
    sizes = options.small
    loaded = model_of(sizes, "float32", options.device)
    many = [prompts_of(sizes, seed) for seed in (0, 1, 2, 3, 0)]
    ample = engine_of(loaded, options, sizes)
    expected = [generate(ample, prompts, sizes.new, str(at)) for at, prompts in enumerate(many)]
    tight = kv_bytes(loaded, sizes, 2)
    core = engine_of(loaded, options, sizes, kv_memory=tight, host_memory=16 * tight, load="always")
    try:
        assert core.plan.pool_bytes < ample.plan.pool_bytes, "it is not starved"
        found = [generate(core, prompts, sizes.new, str(at)) for at, prompts in enumerate(many)]
        while core.has_moves():
            core.step()
        statistics = core.statistics()["tiers"]
    finally:
        core.close()
    assert found == expected, "tokens differ with tiers"
    assert statistics["loaded_bytes"] > 0, "nothing was loaded"
    return {"saved_bytes": statistics["saved_bytes"], "loaded_bytes": statistics["loaded_bytes"]}


def throughput(options: Options) -> Found:
    """Tokens per second of an engine: a batch with new prompts, and the same again from cached pages."""
    sizes = options.large
    core = engine_of(model_of(sizes, options.dtype, options.device), options, sizes)
    prompts = prompts_of(sizes)
    generate(core, prompts[:1], 4, "first")
    found: Found = {"requests": sizes.requests, "prompt": sizes.prompt, "new": sizes.new}
    for name, some in (("cold", prompts), ("warm", prompts)):
        began = time.perf_counter()
        generate(core, some, sizes.new, name)
        elapsed = time.perf_counter() - began
        found[name] = {"seconds": round(elapsed, 3), "tokens_s": round(sizes.requests * sizes.new / elapsed, 1)}
        options.tell(found)
    return found | {"attention": core.statistics()["attention"]}


def profile(options: Options) -> Found:
    """Where the time of decode steps goes: operators of the host, kernels of the device."""
    import torch
    from torch.profiler import ProfilerActivity

    sizes = options.small
    core = engine_of(model_of(sizes, options.dtype, options.device), options, sizes)
    generate(core, prompts_of(sizes), 4, "first")
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if options.is_cuda else [])
    with torch.profiler.profile(activities=activities) as profiler:
        generate(core, prompts_of(sizes), sizes.new)
        finish(options.device)
    averages = profiler.key_averages()
    by = "self_device_time_total" if options.is_cuda else "self_cpu_time_total"
    rows = sorted(averages, key=lambda row: -getattr(row, by))[:25]
    return {
        "by": by,
        "rows": [[row.key[:80], row.count, round(row.self_cpu_time_total), round(getattr(row, by))] for row in rows],
    }


def mapped(options: Options) -> Found:
    """Memory that CUDA's driver maps piece by piece: what is given back is free, what comes again is zero, and an
    engine draws the same tokens before and after changes of its size. Elsewhere it is refused."""
    import torch

    from quire.engine.device.cuda_memory import cuda_backing
    from quire.engine.elastic import memory_of
    from quire.engine.messages import ResizeRequest
    from quire.errors import RefusedCombination

    whole, part = 1 << 28, 1 << 26
    try:
        backing = cuda_backing(whole, torch.device(options.device))
    except RefusedCombination as error:
        return {"refused": str(error)}
    backing.tensor.fill_(7)
    before = torch.cuda.mem_get_info()[0]
    found: Found = {"smaller_ms": milliseconds_of(lambda: backing.resize(part), options)}
    found["freed"] = torch.cuda.mem_get_info()[0] - before
    assert found["freed"] == whole - part, f"{found['freed']:,} bytes are free again"
    found["larger_ms"] = milliseconds_of(lambda: backing.resize(whole), options)
    assert bool(backing.tensor[:part].eq(7).all()) and not backing.tensor[part:].any()
    options.tell(found)
    sizes = options.small
    loaded, prompts = model_of(sizes, "float32", options.device), prompts_of(sizes)
    low, high = kv_bytes(loaded, sizes, 2), kv_bytes(loaded, sizes, sizes.requests + 1)
    core = engine_of(loaded, options, sizes, elastic_gpu=True, kv_memory=f"{low}..{high}")
    expected = generate(core, prompts, sizes.new, "first")
    for turn, size in enumerate((low, high)):
        core.resize(ResizeRequest(device_bytes=size))
        assert generate(core, prompts, sizes.new, f"turn-{turn}") == expected, f"with {size:,} bytes"
        assert memory_of(core).report().done
    core.audit()
    return found


def milliseconds_of(work: Callable[[], object], options: Options) -> float:
    """The time of one call, which is not repeated."""
    finish(options.device)
    began = time.perf_counter()
    work()
    finish(options.device)
    return round(1e3 * (time.perf_counter() - began), 2)


STAGES: dict[str, tuple[Callable[[Options], Found], float]] = {
    "versions": (versions, 60),
    "pool": (pool, 25),
    "kernels": (kernels, 90),
    "launches": (launches, 25),
    "model": (model, 70),
    "sampler": (sampler, 20),
    "moves": (moves, 20),
    "overlap": (overlap, 40),
    "graphs": (graphs, 60),
    "tiers": (tiers, 40),
    "throughput": (throughput, 90),
}
"""By name: what it does, and the seconds that it may take. In the order of what fails first, and of what others need;
together they end within one call of ten minutes, also if each takes all of its time."""

REST: dict[str, tuple[Callable[[Options], Found], float]] = {
    "formats": (formats, 120),
    "mapped": (mapped, 40),
    "profile": (profile, 60),
}
"""For another call."""

ALL = STAGES | REST
