"""Every layout there is: those of all families and of the catalogue, in every KV format, at several page sizes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

from quire.errors import InvalidInput, UnsupportedModel
from quire.models.hf import LoadedModel
from quire.spec.catalogue import CATALOGUE
from quire.spec.kv_format import KV_FORMATS
from quire.spec.layout import PageLayout
from quire.spec.model import ModelSpec
from tests.tiny_hybrids import HYBRIDS, published
from tests.tiny_latents import LATENTS, build_latent
from tests.tiny_models import _SIZES, ARCHITECTURES, build_tiny

PAGE_SIZES = (1, 16, 64, 256)

NOT_BY_ARITHMETIC = ("diffllama", "longcat_flash")
"""Families whose layout is found by running the model."""


def configurations() -> Mapping[str, Mapping[str, Any]]:
    """The tiny models of the tests and the models of the catalogue, by name."""
    tiny = {name: published(name) for name in {**ARCHITECTURES, **HYBRIDS} if name not in NOT_BY_ARITHMETIC}
    latent = {f"latent {name}": _SIZES | made for name, made in LATENTS.items() if name not in NOT_BY_ARITHMETIC}
    return {**tiny, **latent, **{f"catalogue {name}": model.config for name, model in CATALOGUE.items()}}


@cache
def specs() -> Mapping[str, ModelSpec]:
    """What each of them asks of the cache."""
    found = {}
    for name, config in configurations().items():
        try:
            found[name] = ModelSpec.from_config(config)
        except UnsupportedModel:
            assert name.startswith("catalogue")
    for name, model in zip(NOT_BY_ARITHMETIC, (build_tiny("diffllama"), build_latent("longcat_flash")), strict=True):
        found[name] = LoadedModel(model, name=name).spec
    return found


def layouts(page_size: int, most: int) -> Iterator[tuple[str, PageLayout]]:
    """Different layouts with pages of that size whose frames take at most `most` bytes, each with its model."""
    seen = set()
    for name, spec in specs().items():
        for kv_format in (None, *KV_FORMATS.values()):
            try:
                groups = spec.groups(page_size, kv_format)
            except InvalidInput:
                continue  # no such page of compressed entries, or vectors that blocks of the format do not fill
            for group in groups:
                mark = group.layout.fingerprint()
                if mark not in seen and group.layout.bytes_per_frame <= most:
                    seen.add(mark)
                    stored = kv_format.name if kv_format is not None else "auto"
                    yield f"{name}, {group.name}, {stored}, {page_size}", group.layout
