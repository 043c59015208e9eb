"""Parts of documents that are generated from the code. `python -m tests.examples.generated_sections` rewrites them."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from pathlib import Path

from quire import errors
from quire.engine.config import EngineConfig
from quire.models.registry import ALIASES, REFUSED
from quire.serve.config import ServerConfig
from quire.settings.setting import default_of, help_of, option_names
from tests.examples import documented_fields, generated_reference
from tests.verified_models import VERIFIED

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = sorted((*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").glob("*.md")))


def models() -> str:
    """Model types by status, from the table that loading refuses by."""
    from tests.engine.test_hybrid_tokens import SERVED  # these load transformers
    from tests.tiny_hybrids import HYBRIDS
    from tests.tiny_latents import LATENTS
    from tests.tiny_models import ARCHITECTURES

    verified = sorted(VERIFIED | {alias for alias, kind in ALIASES.items() if kind in VERIFIED})
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
    refused = sorted(REFUSED)
    reasons = dict.fromkeys(REFUSED[kind] for kind in refused)
    lines += [f"| {reason} | {_names([kind for kind in refused if REFUSED[kind] == reason])} |" for reason in reasons]
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
    """Every setting of an engine and of a server: its name, its options, its default and its sentence."""
    lines = ["| setting | option | default | meaning |", "|---|---|---|---|"]
    for model in (EngineConfig, ServerConfig):
        for name, field in model.model_fields.items():
            options = ", ".join(f"`{option.partition('/')[0]}`" for option in option_names(model, name))
            lines.append(f"| `{name}` | {options or '-'} | {default_of(model, name) or '-'} | {help_of(field)} |")
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
    "documented": documented_fields.table,
    "metrics": generated_reference.metrics,
    "vllm": generated_reference.vllm_metrics,
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
