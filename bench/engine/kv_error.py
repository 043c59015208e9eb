"""What it costs a model to keep its cache in a KV dtype, measured on a prompt: call by call, and at the end.

    python -m bench.engine.kv_error                                            the bundled model, fp8_e4m3
    python -m bench.engine.kv_error Qwen/Qwen3-0.6B --kv-dtype fp8_e4m3,nvfp4

A plain pass over the prompt stores every key, value and latent plainly, and beside that in each format, and computes
each call on both from the same inputs: the error of a call is its own, not one that earlier layers handed on. A second
pass computes on what the format kept alone, as a server would: its logits have the errors of all layers, and those of
tokens that a layer no longer selects. Exits with 4 where a layer is above `--max-error`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import typer
from pydantic import field_validator
from rich.console import Console, Group
from rich.panel import Panel
from rich.progress import Progress
from rich.table import Table
from rich.text import Text
from torch import Tensor

from quire.cli.command import command
from quire.engine.config import EngineConfig
from quire.engine.device.device import resolve_device
from quire.errors import InvalidInput, ModelLoadError
from quire.kernels.batch import PagedBatch
from quire.kernels.state import StateBatch
from quire.memory.pool import Pool, torch_dtype
from quire.models.forward import RunningForward, paged_field
from quire.models.hf import LoadedModel, load_model
from quire.models.tokenizer import load_tokenizer
from quire.settings.setting import Settings, setting
from quire.spec.dtype import DType
from quire.spec.group import GroupSpec
from quire.spec.ids import Ids
from quire.spec.kv_format import KVFormat, kv_format, plain_format
from quire.spec.layout import Field
from quire.spec.pages import pages_for

EXIT_ABOVE = 4  # found to be wrong, as an audit that fails
MAX_ERROR = 0.25
"""Rounding to four bits costs a tenth of any vector, and attention in a sound layer up to twice that."""

_TITLES = {"k": "keys", "v": "values", "latent": "latents", "rope": "rotary keys", "index_k": "index keys"}
_SAMPLE = Path(__file__).with_name("kv_error_prompt.txt")  # prose, code, numbers and other scripts
_RANDOM_TOKENS = 256


_PAGE_SIZE = 16  # or more, where a page must hold a block of tokens that share an entry
_CHUNK = 256  # tokens of one step, whose logits are held twice


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldError:
    """What one field of one call lost: `relative` is the norm of all differences over the norm of the numbers.

    `largest` is the largest difference of one number, `magnitude` the largest number. `saturated` numbers were beyond
    what the format holds, `zeroed` ones became zero, `nan` ones NaN, of `count`.
    """

    name: str
    relative: float
    largest: float
    magnitude: float
    saturated: int
    zeroed: int
    nan: int
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CallError:
    """One call, `ordinal` of the forward pass, in `layer`: its fields, and its output relative to that from plain ones.

    The output tells what the fields cannot: keys with a few large channels lose little of their norm and much of what
    tells one from another.
    """

    ordinal: int
    layer: int
    fields: tuple[FieldError, ...]
    output: float

    @property
    def worst(self) -> float:
        """The largest relative error, of a field or of the output; NaN where any is."""
        return float(np.max([self.output, *(field.relative for field in self.fields)]))


@dataclass(frozen=True, slots=True, kw_only=True)
class KVError:
    """One format. `logits` is the relative error of all logits, `kept_share` the share of positions whose most likely
    token stays the same, `same_next_token` whether the one after the prompt does. Bytes are those of one token.
    """

    kv_format: KVFormat
    num_tokens: int
    bytes_per_token: float
    plain_bytes_per_token: float
    calls: tuple[CallError, ...]
    logits: float
    kept_share: float
    same_next_token: bool

    def above(self, most: float) -> tuple[CallError, ...]:
        """The calls with an error above `most`, or NaN."""
        return tuple(call for call in self.calls if not call.worst <= most)


@torch.inference_mode()
def measure_kv_errors(
    model: LoadedModel,
    formats: Sequence[KVFormat],
    token_ids: Ids,
    *,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> tuple[KVError, ...]:
    """One error per format, from `token_ids` int32 `[n]`. `on_progress(steps done, steps in all)` is called as it goes.

    Holds the prompt's pools once plainly and twice in every format. Raises InvalidInput where the prompt has no token
    or more than the context, or a format does not fit the model's widths; then nothing was computed.
    """
    if not 0 < len(token_ids) <= model.spec.context_length:
        raise InvalidInput(
            f"the prompt has {len(token_ids):,} tokens; errors are measured on 1 to {model.spec.context_length:,}, the "
            "model's context.",
            fix="give another prompt.",
        )
    if not 0 <= int(token_ids.min()) <= int(token_ids.max()) < model.spec.vocab_size:
        raise InvalidInput(
            f"the prompt has token ids outside the vocabulary of {model.spec.vocab_size:,}.", fix="check the tokenizer."
        )
    plain = _Prompt(model, plain_format(model.spec.dtype), len(token_ids))
    beside = [_Prompt(model, kv_format, len(token_ids)) for kv_format in formats]
    alone = [_Prompt(model, kv_format, len(token_ids)) for kv_format in formats]
    outputs = [_Ratios() for _ in formats]
    logits = [_Logits() for _ in formats]
    done, total = 0, -(-len(token_ids) // _CHUNK) * (1 + len(formats))

    def on_outputs(ordinal: int, out: Tensor, others: Sequence[Tensor]) -> None:
        for ratios, other in zip(outputs, others, strict=True):
            ratios.add(ordinal, other, out)

    for start in range(0, len(token_ids), _CHUNK):
        stop = min(start + _CHUNK, len(token_ids))
        tokens = torch.from_numpy(token_ids[start:stop].astype(np.int64)).to(model.device)
        positions = torch.arange(start, stop, device=model.device)
        rows = torch.arange(stop - start, device=model.device)
        others = [RunningForward(prompt.pools, prompt.batches(start, stop)) for prompt in beside]
        running = _ComparingForward(plain.pools, plain.batches(start, stop), others, on_outputs)
        wanted = model.run(running, tokens, positions, rows)
        on_progress(done := done + 1, total)
        for prompt, found in zip(alone, logits, strict=True):
            own = RunningForward(prompt.pools, prompt.batches(start, stop))
            found.add(model.run(own, tokens, positions, rows), wanted)
            on_progress(done := done + 1, total)
    return tuple(
        KVError(
            kv_format=kv_format,
            num_tokens=len(token_ids),
            bytes_per_token=prompt.bytes_per_token,
            plain_bytes_per_token=plain.bytes_per_token,
            calls=tuple(_call_errors(model, plain, prompt, ratios)),
            logits=found.ratio,
            kept_share=found.kept / len(token_ids),
            same_next_token=found.last_kept,
        )
        for kv_format, prompt, ratios, found in zip(formats, beside, outputs, logits, strict=True)
    )


class _ComparingForward(RunningForward):
    """A forward pass that computes every attention call on other pools too, from the same inputs, and reports both.

    `others` have pools of the same calls, in other formats; what a call keeps of this pass it keeps there too, and what
    it gives there goes to `on_outputs(ordinal, output, outputs of the others)` and nowhere else. A call that keeps
    nothing, of a layer that reads another's, is not reported.
    """

    def __init__(
        self,
        pools: Sequence[Pool],
        batches: Sequence[PagedBatch | StateBatch],
        others: Sequence[RunningForward],
        on_outputs: Callable[[int, Tensor, Sequence[Tensor]], None],
    ) -> None:
        super().__init__(pools, batches)
        self.others = tuple(others)
        self._on_outputs = on_outputs

    def attend(self, attention: Callable[[RunningForward], Tensor]) -> Tensor:
        """The output on these pools; those on the others are reported."""
        ordinal = self.ordinal
        out = attention(self)
        found = []
        for other in self.others:
            other.ordinal = ordinal
            found.append(attention(other))
        if self.ordinal > ordinal:
            self._on_outputs(ordinal, out, found)
        return out


class _Prompt:
    """Pools in one format, as large as a prompt, whose pages are frames 1, 2, 3 and so on."""

    def __init__(self, model: LoadedModel, kv_format: KVFormat, num_tokens: int) -> None:
        self.num_tokens = num_tokens
        self.page_size = model.spec.page_size(_PAGE_SIZE)
        self.groups: tuple[GroupSpec, ...] = model.spec.groups(self.page_size, kv_format)
        num_pages = pages_for(num_tokens, self.page_size)
        self.pools = tuple(Pool(group.layout, num_pages, device=model.device) for group in self.groups)
        grows = [group.layout for group in self.groups if not group.reach.in_place]
        self.bytes_per_token = sum(layout.bytes_per_frame for layout in grows) / self.page_size

    def batches(self, start: int, stop: int) -> list[PagedBatch | StateBatch]:
        """A step that computes positions `start:stop`."""
        rows = np.array([0, stop - start], dtype=np.int32)
        frames = np.arange(1, pages_for(stop, self.page_size) + 1, dtype=np.int32)[None]
        paged = PagedBatch.of(frames, np.array([start]), np.array([stop]), self.page_size)
        one = np.ones(1, dtype=np.int32)
        states = StateBatch(rows, one if start else 0 * one, one)
        return [states if group.reach.in_place else paged for group in self.groups]

    def fields_of(self, ordinal: int) -> dict[str, tuple[Pool, Field]]:
        """What a call keeps, by name."""
        return {
            field.name: (pool, field) for pool in self.pools for field in pool.layout.fields if ordinal in field.layers
        }

    def rows(self, pool: Pool, field: Field, ordinal: int, dtype: torch.dtype) -> Tensor:
        """All rows of a field of a call, `[rows, *shape]` as attention reads them in `dtype`."""
        slots = torch.arange(*self._slots(field))
        return paged_field(pool, field.name, ordinal).gather(slots, dtype, f"{field.name} of a call")

    def fill(self, pool: Pool, field: Field, ordinal: int, rows: Tensor) -> None:
        """Store `rows` as all those of a field of a call."""
        slots = torch.arange(*self._slots(field), device=rows.device)
        paged_field(pool, field.name, ordinal).write(slots, rows)

    def _slots(self, field: Field) -> tuple[int, int]:
        """The first slot of a field and the one after its last: consecutive, since the frames are."""
        entries = field.entries(self.page_size)
        return entries, entries - (-self.num_tokens * entries // self.page_size)


class _Ratios:
    """Norms of differences over norms, by ordinal."""

    def __init__(self) -> None:
        self._sums: dict[int, tuple[Tensor, Tensor]] = {}

    def add(self, ordinal: int, found: Tensor, wanted: Tensor) -> None:
        difference, norm = (found.double() - wanted.double()).square().sum(), wanted.double().square().sum()
        if ordinal in self._sums:
            before = self._sums[ordinal]
            difference, norm = difference + before[0], norm + before[1]
        self._sums[ordinal] = difference, norm

    def of(self, ordinal: int) -> float:
        """The ratio; 0 for a call that was not compared."""
        difference, norm = self._sums.get(ordinal, (torch.zeros(()), torch.ones(())))
        return _ratio(float(difference), float(norm))


class _Logits:
    """What a format's logits have in common with the plain ones."""

    def __init__(self) -> None:
        self._ratios = _Ratios()
        self.kept = 0
        self.last_kept = False

    def add(self, found: Tensor, wanted: Tensor) -> None:
        self._ratios.add(0, found, wanted)
        same = found.argmax(-1) == wanted.argmax(-1)
        self.kept += int(same.sum())
        self.last_kept = bool(same[-1])

    @property
    def ratio(self) -> float:
        return self._ratios.of(0)


def _call_errors(model: LoadedModel, plain: _Prompt, kept: _Prompt, outputs: _Ratios) -> Iterator[CallError]:
    """The calls that keep something in another way than the plain pools do."""
    dtype = torch_dtype(model.spec.dtype)
    layers = [layer for layer, calls in enumerate(model.spec.layers) for _ in calls]
    for ordinal, layer in enumerate(layers):
        wanted = plain.fields_of(ordinal)
        found = []
        for name, (pool, field) in kept.fields_of(ordinal).items():
            if name in wanted and _encoding(field) != _encoding(wanted[name][1]):
                given = plain.rows(*wanted[name], ordinal, dtype)
                kept.fill(pool, field, ordinal, given)  # not all of it passes through attention
                found.append(_field_error(field, given, kept.rows(pool, field, ordinal, dtype)))
        if found:
            yield CallError(ordinal=ordinal, layer=layer, fields=tuple(found), output=outputs.of(ordinal))


def _encoding(field: Field) -> KVFormat:
    return field.kv_format if field.kv_format is not None else plain_format(field.dtype)


def _field_error(field: Field, given: Tensor, kept: Tensor) -> FieldError:
    given, kept = given.double(), kept.double()
    difference = (kept - given).abs()
    return FieldError(
        name=field.name,
        relative=_ratio(float(difference.square().sum()), float(given.square().sum())),
        largest=float(difference.max()),
        magnitude=float(given.abs().max()),
        saturated=int((given.abs() > _largest_of(_encoding(field))).sum()),
        zeroed=int(((given != 0) & (kept == 0)).sum()),
        nan=int(kept.isnan().sum()),
        count=given.numel(),
    )


def _largest_of(kv_format: KVFormat) -> float:
    """The largest number of a format: larger ones are stored as this."""
    if kv_format.scale not in (None, DType.FLOAT8_E4M3):
        return torch.finfo(torch.float32).max
    largest = {DType.FLOAT8_E4M3: 448.0, DType.FLOAT8_E5M2: 57344.0, DType.UINT8: 6.0 * 448.0}  # the last is NVFP4
    return largest.get(kv_format.element) or torch.finfo(getattr(torch, kv_format.element.value)).max


def _ratio(difference: float, norm: float) -> float:
    """The root of two sums of squares' ratio; of nothing, 0 where nothing differs."""
    return math.sqrt(difference / norm) if norm else math.inf if difference else 0.0


# -- the command


class KVErrorSettings(Settings):
    """What is measured, on which prompt, and what is too much."""

    kv_dtype: list[str] = setting(
        ["fp8_e4m3"],
        "KV dtypes: fp8_e4m3, fp8_e5m2, mxfp8, nvfp4, fp4_e2m1; several with commas, or given again.",
        aliases=("--kv-cache-dtype",),
    )
    prompt_file: Path | None = setting(None, "The text to measure on.", otherwise="a sample of several kinds")
    max_error: float = setting(
        MAX_ERROR,
        "The relative error of keys, values, latents or attention above which a layer is refused, with exit code 4. "
        "Rounding to four bits costs 0.1 of a vector, and attention up to twice that; more is a sign of large "
        "channels, or of numbers out of range.",
    )

    @field_validator("max_error")
    @classmethod
    def _above_zero(cls, value: float) -> float:
        if not value > 0:
            raise InvalidInput(f"{value} is no share.", fix="give a share above zero, such as 0.2 for 20%.")
        return value


app = typer.Typer(add_completion=False, rich_markup_mode="rich", pretty_exceptions_enable=False)


@command(app, positional="model")
def main(settings: KVErrorSettings, engine: EngineConfig, *, as_json: bool) -> None:
    """Measure what KV dtypes cost a model: layer by layer, and at the logits.

    [dim]Example:[/dim] python -m bench.engine.kv_error Qwen/Qwen3-0.6B --kv-dtype fp8_e4m3,nvfp4
    """
    names = [name.strip() for names in settings.kv_dtype for name in names.split(",")]
    prompt_file, max_error = settings.prompt_file, settings.max_error
    text = _read(prompt_file) if prompt_file is not None else None
    console = Console(stderr=True)
    with console.status(f"Loading {engine.model_name} ..."):
        loaded = load_model(engine.model, dtype=engine.dtype, device=resolve_device(engine.device))
        formats = [kv_format(name, loaded.spec.dtype) for name in dict.fromkeys(names)]
        token_ids, prompt = _prompt(engine.model, loaded, text)
    with Progress(console=console, transient=True, disable=as_json) as bar:
        task = bar.add_task("Measuring", total=None)
        found = measure_kv_errors(
            loaded, formats, token_ids, on_progress=lambda done, total: bar.update(task, completed=done, total=total)
        )
    data = {
        "model": engine.model_name,
        "architecture": loaded.spec.architecture,
        "dtype": loaded.spec.dtype.value,
        "device": str(loaded.device),
        "prompt": prompt if prompt_file is None else str(prompt_file),
        "prompt_tokens": len(token_ids),
        "max_error": max_error,
        "passed": not any(error.above(max_error) for error in found),
        "kv_dtypes": [_as_dict(error, max_error) for error in found],
    }
    if as_json:
        print(json.dumps(data))
    else:
        _print(data, found, max_error)
    if not data["passed"]:
        raise typer.Exit(EXIT_ABOVE)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInput(f"the prompt file '{path}' cannot be read: {error}.", fix="give a UTF-8 text.") from error


def _prompt(name: str, model: LoadedModel, text: str | None) -> tuple[Ids, str]:
    """Token ids to measure on, and what they are. The sample is cut to the model's context, a given text is not."""
    if text is not None:
        return load_tokenizer(name).encode(text), ""
    try:
        sample = load_tokenizer(name).encode(_SAMPLE.read_text(encoding="utf-8"))
    except ModelLoadError:
        sample = np.empty(0, dtype=np.int32)
    if len(sample):
        return sample[: model.spec.context_length], "the sample"
    # There is no tokenizer, or, as transformers makes one up for some types of models, an empty one.
    count = min(_RANDOM_TOKENS, model.spec.context_length)
    ids = np.random.default_rng(0).integers(0, model.spec.vocab_size, count).astype(np.int32)
    return ids, "random tokens, because the model has no tokenizer"


# -- data


def _as_dict(error: KVError, most: float) -> dict[str, Any]:
    return {
        "kv_dtype": error.kv_format.name,
        "bytes_per_token": error.bytes_per_token,
        "plain_bytes_per_token": error.plain_bytes_per_token,
        "logits_error": _finite(error.logits),
        "kept_share": error.kept_share,
        "same_next_token": error.same_next_token,
        "layers_above": sorted({call.layer for call in error.above(most)}),
        "calls": [
            {
                "layer": call.layer,
                "ordinal": call.ordinal,
                "attention_error": _finite(call.output),
                "fields": [
                    {
                        "name": field.name,
                        "relative_error": _finite(field.relative),
                        "largest_error": _finite(field.largest),
                        "largest_number": _finite(field.magnitude),
                        "numbers": field.count,
                        "saturated": field.saturated,
                        "zeroed": field.zeroed,
                        "nan": field.nan,
                    }
                    for field in call.fields
                ],
            }
            for call in error.calls
        ],
    }


def _finite(number: float) -> float | None:
    """JSON has no NaN and no infinity."""
    return number if math.isfinite(number) else None


# -- tables


def _print(data: dict[str, Any], found: Sequence[KVError], most: float) -> None:
    console = Console(highlight=False)
    console.print(
        f"{data['model']} ({data['architecture']}, {data['dtype']}, {data['device']}), {data['prompt_tokens']:,} "
        f"tokens ({data['prompt']}); an error is the norm of what changed over the norm of what was.",
        style="dim",
    )
    for error in found:
        console.print(_panel(error, most))
    if len(found) > 1:
        console.print(_summary(found, most))
    for error in found:
        if above := error.above(most):
            console.print(
                f"[bold red]Refused:[/bold red] {error.kv_format.name} costs {_layers(above)} more than {most:.0%}. "
                "Use a format that costs less there, keep the model's dtype (auto), or raise --max-error."
            )


def _panel(error: KVError, most: float) -> Panel:
    above = error.above(most)
    verdict = f"{_layers(above)} above {most:.0%}" if above else f"every layer is within {most:.0%}"
    rows = _calls(error, most) if error.calls else Text("Nothing that this model keeps is stored in another way.")
    return Panel(
        Group(rows, Text(""), _totals(error)),
        title=f"[bold]{error.kv_format.name}[/bold]: {verdict}",
        title_align="left",
        border_style="red" if above else "green",
        expand=False,
    )


def _layers(calls: Sequence[CallError]) -> str:
    layers = sorted({call.layer for call in calls})
    return f"layer{'s' if len(layers) > 1 else ''} {', '.join(map(str, layers))}"


def _calls(error: KVError, most: float) -> Table:
    names = list(dict.fromkeys(field.name for call in error.calls for field in call.fields))
    table = Table.grid(padding=(0, 2))
    for title in ("layer", *(_TITLES.get(name, name) for name in names), "largest error", "attention", ""):
        table.add_column(title, justify="left" if title == "" else "right")
    table.add_row(*(f"[bold]{column.header}[/bold]" for column in table.columns))
    for call in error.calls:
        fields = {field.name: field.relative for field in call.fields}
        table.add_row(
            str(call.layer),
            *(_share(fields[name], most) if name in fields else Text("-") for name in names),
            _largest(call),
            _share(call.output, most),
            _remark(call),
        )
    return table


def _share(error: float, most: float) -> Text:
    return Text(f"{error:.2%}" if math.isfinite(error) else str(error), style="" if error <= most else "bold red")


def _largest(call: CallError) -> str:
    """The largest error of one number, and the largest number of the same field."""
    field = max(call.fields, key=lambda field: field.largest if math.isfinite(field.largest) else math.inf)
    return f"{field.largest:.3g} of {field.magnitude:.3g}"


def _remark(call: CallError) -> str:
    counts = {"saturated": sum(f.saturated for f in call.fields), "NaN": sum(f.nan for f in call.fields)}
    return ", ".join(f"{count:,} {what}" for what, count in counts.items() if count)


def _totals(error: KVError) -> Table:
    table = Table.grid(padding=(0, 2))
    next_one = "does too" if error.same_next_token else "does not"
    table.add_row(
        Text("Logits", style="bold"),
        f"{error.logits:.2%} off; {error.kept_share:.1%} of {error.num_tokens:,} positions keep their most likely "
        f"token, the last one {next_one}",
    )
    table.add_row(
        Text("Bytes", style="bold"), f"{error.bytes_per_token:,g} a token; {error.plain_bytes_per_token:,g} as auto"
    )
    return table


def _summary(found: Sequence[KVError], most: float) -> Table:
    table = Table.grid(padding=(0, 2))
    for title in ("KV dtype", "bytes a token", "worst layer", "logits", "kept", "next token"):
        table.add_column(title, justify="left" if title == "KV dtype" else "right")
    table.add_row(*(f"[bold]{column.header}[/bold]" for column in table.columns))
    for error in found:
        worst = max((call.worst for call in error.calls), key=lambda worst: (math.isnan(worst), worst), default=0.0)
        table.add_row(
            error.kv_format.name,
            f"{error.bytes_per_token:,g}",
            _share(worst, most),
            f"{error.logits:.2%}",
            f"{error.kept_share:.1%}",
            "same" if error.same_next_token else "another",
        )
    return table


if __name__ == "__main__":
    app()
