"""The part of `quire doctor` that says what a KV dtype costs a model: the run, its tables and its verdict."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console, Group
from rich.panel import Panel
from rich.progress import Progress
from rich.table import Table
from rich.text import Text

from quire.errors import InvalidInput, ModelLoadError

if TYPE_CHECKING:
    from quire.engine.kv_error import CallError, KVError
    from quire.models.hf import LoadedModel
    from quire.spec.ids import Ids

EXIT_ABOVE = 4  # found to be wrong, as an audit that fails
MAX_ERROR = 0.25
"""Rounding to four bits costs a tenth of any vector, and attention in a sound layer up to twice that."""

_TITLES = {"k": "keys", "v": "values", "latent": "latents", "rope": "rotary keys", "index_k": "index keys"}
_RANDOM_TOKENS = 256


def report_kv_error(
    names: Sequence[str],
    *,
    model: str | None,
    dtype: str | None,
    device: str | None,
    prompt_file: Path | None,
    max_error: float,
    as_json: bool,
) -> None:
    """Measure these KV dtypes on a model and print what was found. Exits with 1 where a layer is above `max_error`."""
    from quire.cli.options import make_config
    from quire.engine.core import resolve_device
    from quire.engine.kv_error import measure_kv_errors
    from quire.models.hf import load_model
    from quire.spec.kv_format import kv_format

    if not max_error > 0:
        raise InvalidInput(f"--max-error is {max_error}.", fix="give a share above zero, such as 0.2 for 20%.")
    config = make_config(model=model, dtype=dtype, device=device)
    text = _read(prompt_file) if prompt_file is not None else None
    console = Console(stderr=True)
    with console.status(f"Loading {config.model_name} ..."):
        loaded = load_model(config.model, dtype=config.dtype, device=resolve_device(config.device))
        formats = [kv_format(name, loaded.spec.dtype) for name in dict.fromkeys(names)]
        token_ids, prompt = _prompt(config.model, loaded, text)
    with Progress(console=console, transient=True, disable=as_json) as bar:
        task = bar.add_task("Measuring", total=None)
        found = measure_kv_errors(
            loaded, formats, token_ids, on_progress=lambda done, total: bar.update(task, completed=done, total=total)
        )
    data = {
        "model": config.model_name,
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
    import numpy as np

    from quire.engine.sample_prompt import SAMPLE_PROMPT
    from quire.models.tokenizer import load_tokenizer

    if text is not None:
        return load_tokenizer(name).encode(text), ""
    try:
        sample = load_tokenizer(name).encode(SAMPLE_PROMPT)
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
