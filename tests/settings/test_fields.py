"""Each setting is declared once, whatever part has it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from importlib import import_module
from pkgutil import iter_modules

import pytest

import quire.cli
from quire.engine.config import EngineConfig, engine_config
from quire.engine.planning import plan_settings
from quire.errors import InvalidInput
from quire.plan.settings import PlanSettings
from quire.settings.fields import PoolFields
from quire.settings.setting import Settings, exact_bytes, option_names, parse_bytes, parse_tokens


def parts(model: type[Settings] = Settings) -> Iterator[type[Settings]]:
    """Every class of settings of Quire."""
    for each in model.__subclasses__():
        if each.__module__.startswith("quire."):
            yield each
        yield from parts(each)


def declared_twice() -> list[str]:
    for module in iter_modules(quire.cli.__path__):  # all commands, and with them all parts that have settings
        import_module(f"quire.cli.{module.name}")
    classes = set(parts())
    own = Counter(name for model in classes for name in vars(model).get("__annotations__", ()) if name.islower())
    return [name for name, count in own.items() if count > 1]


def test_a_setting_is_declared_in_one_class() -> None:
    assert PlanSettings in set(parts()) and len(EngineConfig.model_fields) > 50
    assert declared_twice() == []


def test_a_second_declaration_is_found() -> None:
    class Doubled(Settings):
        page_size: int = 16

    Doubled.__module__ = "quire.doubled"
    try:
        assert declared_twice() == ["page_size"]
    finally:
        Doubled.__module__ = __name__


def test_a_plan_has_the_settings_of_its_engine() -> None:
    given = {
        "kv_memory": "1GiB", "kv_dtype": "fp8_e4m3", "page_size": 32, "max_model_len": "2k", "max_running_requests": 7,
        "max_num_batched_tokens": 64, "enable_prefix_caching": False, "window_pool": False, "max_mamba_cache_size": 9,
        "arena": True,
        "swa_full_tokens_ratio": 0.1, "mamba_full_memory_ratio": "0.3",
        "speculative_config": {"method": "ngram", "num_steps": 2},
    }  # fmt: skip
    config = engine_config(**given)
    settings = plan_settings(config)
    for name in PoolFields.model_fields:
        assert getattr(settings, name) == getattr(config, name), name
    assert given.keys() | {"hisparse", "kv_memory_least"} == PoolFields.model_fields.keys()
    assert str(settings.swa_full_tokens_ratio) == "1/10", "as it was written"


def test_bounds_options_and_messages_are_those_of_the_declaration() -> None:
    for model in (EngineConfig, PlanSettings):
        assert option_names(model, "max_running_requests") == [
            "--max-running-requests", "--max-num-seqs", "--max-running",
        ]  # fmt: skip
        with pytest.raises(InvalidInput, match="max_running_requests: Input should be greater than or equal to 1"):
            model(max_running_requests=0)
        with pytest.raises(InvalidInput, match="a ratio of 0"):
            model(swa_full_tokens_ratio=0)
    assert parse_tokens("2k") == 2048


def test_a_range_that_is_none_is_quoted() -> None:
    with pytest.raises(InvalidInput, match=r"--kv-memory 9GiB..3GiB: the least is more than the most"):
        engine_config(model="tiny", kv_memory="9GiB..3GiB")


@pytest.mark.parametrize("text", ["20MiB", "4GB", "1001B", "1536MiB", "3TiB", "1KB"])
def test_a_size_is_told_as_it_was_written(text: str) -> None:
    assert exact_bytes(parse_bytes(text)) == text
