"""`quire plan`: tables that add up, JSON with every number, exit codes, sweeps, pictures and comparisons."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quire.cache import KVCache
from quire.errors import ModelLoadError, RequestTooLarge
from quire.plan.planner import make_plan
from quire.plan.settings import PlanSettings
from quire.plan.source import model_folder, read_model_config
from quire.settings.tenants import read_tenants
from quire.sim.replay import Replay, ReplaySettings
from quire.spec.catalogue import CATALOGUE
from quire.spec.events import Namespace
from quire.spec.model import ModelSpec
from tests.cli.conftest import Run
from tests.sim.replays import COST, requests

GIB = 2**30
WIDE = {"COLUMNS": "200"}
KEYS = (
    "kv_bytes", "page_size", "bytes_per_token", "bias_bytes", "max_total_num_tokens", "full_max_total_num_tokens",
    "swa_max_total_num_tokens", "max_running_requests", "state_slots", "pools", "ledger", "largest_request",
    "minimum_reusable_prefix",
)  # fmt: skip

TINY = {
    "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 100,
    "intermediate_size": 128, "num_key_value_heads": 2, "max_position_embeddings": 512, "torch_dtype": "bfloat16",
}  # fmt: skip


def data(run: Run, *arguments: Any, exit_code: int = 0) -> dict[str, Any]:
    done = run("plan", *arguments, "--json")
    assert done.exit_code == exit_code, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def error(run: Run, *arguments: Any) -> tuple[int, dict[str, Any]]:
    done = run("plan", *arguments, "--json")
    found: dict[str, Any] = json.loads(done.stderr)["error"]
    assert done.exit_code == found["exit_code"]
    return done.exit_code, found


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("llama-3.1-8b", ()),
        ("gemma-3-27b", ()),
        ("qwen3-next-80b-a3b", ("--speculative-num-steps", 3)),
        ("deepseek-v3.2", ("--kv-dtype", "fp8", "--tp", 8, "--dcp", 8)),
        ("deepseek-v4-flash", ("--kv-dtype", "fp8")),
        ("jamba-1.5-mini", ("--mamba-full-memory-ratio", 0.5)),
        ("gpt-oss-120b", ("--swa-full-tokens-ratio", 0.3, "--max-total-tokens", 50_000)),
    ],
)
def test_json_has_every_number_and_they_add_up(run: Run, name: str, options: tuple[Any, ...]) -> None:
    found = data(run, name, "--kv-memory", "40GiB", "--context", "4k", *options)
    assert set(KEYS) <= set(found)
    assert found["kv_bytes"] == 40 * GIB
    assert sum(line["bytes"] for line in found["ledger"] if line["where"] == "device") == found["kv_bytes"]
    assert sum(pool["bytes"] for pool in found["pools"]) <= found["kv_bytes"]
    for pool in found["pools"]:
        assert pool["bytes"] == pool["frames"] * pool["bytes_per_frame"]
        assert pool["bytes_per_frame"] == sum(field["bytes_per_frame"] for field in pool["fields"])
    assert not re.search(r'": -\d', json.dumps(found)), "a number is negative"


def test_the_configuration_of_speculation_is_that_of_the_engine(run: Run) -> None:
    """SGLang's names give the same plan. Weights and layers of a draft, and states after drafts, have rows."""
    given = ("qwen3-next-80b-a3b", "--gpu", "h100-80gb", "--tp", 4, "--context", "8k")
    mtp = ("--speculative-config", '{"method": "mtp", "num_speculative_tokens": 3}')
    found = data(run, *given, *mtp)
    assert found == data(run, *given, "--speculative-num-steps", 3)
    plain = data(run, *given)
    assert plain["speculation"] is None
    assert {pool["name"] for pool in found["pools"]} - {pool["name"] for pool in plain["pools"]} == {"state-draft"}
    draft = found["speculation"].pop("draft_bytes_per_token")
    (features,) = [line["bytes"] for line in found["ledger"] if line["name"] == "draft features"]
    assert 0 < found["speculation"].pop("draft_feature_bytes") <= features  # priced for all, and states limit requests
    assert found["speculation"] == {"method": "mtp", "draft_tokens": 3, "reserved_tokens": 8}
    assert found["bytes_per_token"] - plain["bytes_per_token"] > draft > 0, "the rest are states after drafts"
    assert not any("mtp" in note for note in found["notes"])
    assert not any("weights" in note for note in found["notes"]), "the layer is part of the model and of its ledger"
    undescribed = data(run, "kimi-k2.5", "--gpu", "h200-141gb", "--tp", 8, *mtp)["notes"]
    assert any("weights of the prediction layer, which the configuration does not" in note for note in undescribed)
    assert any(
        "does not draft with mtp here: " in note for note in data(run, "llama-3.1-8b", *given[1:], *mtp)["notes"]
    )
    shown = run("plan", *given, *mtp, env=WIDE).stdout
    assert f"3 in a step; a request reserves 8 tokens; draft layers take {draft:,.0f} bytes" in shown

    model = '{"method": "draft_model", "model": "llama-3.2-1b", "num_speculative_tokens": 3}'
    gpu = ("llama-3.1-8b", "--gpu", "h100-80gb")
    found, own = data(run, *gpu, "--speculative-config", model), data(run, "llama-3.2-1b", "--gpu", "h100-80gb")
    rows, own_rows = ({line["name"]: line["bytes"] for line in each["ledger"]} for each in (found, own))
    assert rows["draft weights"] == own_rows["weights"]
    assert found["speculation"]["draft_bytes_per_token"] == own["bytes_per_token"]
    code, refused = error(run, *gpu, "--speculative-config", model.replace("llama-3.2-1b", "gemma-3-1b"))
    assert code == 3 and "vocabulary" in refused["message"]

    ngram = data(run, *gpu, "--speculative-config", '{"method": "ngram", "num_speculative_tokens": 4}')
    assert ngram["speculation"]["draft_bytes_per_token"] == 0
    assert not any("engine of this version" in note or "draft" in note for note in ngram["notes"])
    assert error(run, *gpu, *mtp, "--speculative-topk", 1)[0] == 2
    both = run("plan", "--compare", "llama-3.1-8b", "llama-3.1-8b,page-size=1", *mtp)
    assert both.exit_code == 0, both.stderr


def test_the_table_of_a_gpu(run: Run) -> None:
    done = run("plan", "llama-3.1-70b", "--gpu", "h100-80gb", "--tp", 4, "--context", "32k", env=WIDE)
    assert done.exit_code == 0, done.stderr
    lines = dict(re.findall(r"│ (\S.*?)\s{2,}([\d,]+)\s", done.stdout))
    total = int(lines.pop("h100-80gb").replace(",", ""))
    device = {name: int(value.replace(",", "")) for name, value in lines.items() if not name.startswith("host")}
    names = ("weights", "driver", "activations", "graphs", "workspace", "reserve", "pool full", "padding", "unused")
    assert sum(device[name] for name in names) == total == 81_559 * 2**20


def test_why_gives_each_lines_formula(run: Run) -> None:
    done = run("plan", "gemma-3-27b", "--kv-memory", "40GiB", "--why", env=WIDE)
    assert "10 layers * 16 entries * 16 * 128 * 2 bytes (bfloat16) = 655,360" in done.stdout
    assert "52 layers * 16 entries * 16 * 128 * 2 bytes (bfloat16) = 3,407,872" in done.stdout
    found = data(run, "gemma-3-27b", "--kv-memory", "40GiB", "--why")
    assert {line["name"] for line in found["ledger"]} <= {line["name"] for line in found["why"]}


def test_what_does_not_fit_says_what_would(run: Run) -> None:
    wanted = ("qwen3-32b", "--gpu", "h100-80gb", "--context", "32k", "--concurrency")
    found = data(run, *wanted, 16, exit_code=2)
    assert not found["fits"]
    lower = re.search(r"context ([\d,]+)", " ".join(found["to_fit"]))
    assert lower is not None
    follow = ("qwen3-32b", "--gpu", "h100-80gb", "--concurrency", 16, "--context", lower[1].replace(",", ""))
    assert data(run, *follow)["fits"]
    assert data(run, *wanted, 1)["to_fit"] == []
    assert "To fit: " in run("plan", *wanted, 16).stdout


@pytest.mark.parametrize(
    ("arguments", "exit_code", "code", "said"),
    [
        ((), 2, "QUIRE-INPUT-01", "no model is named"),
        (("lama-3.1-70b",), 2, "QUIRE-MODEL-02", "llama-3.1-70b"),
        (("./absent.json",), 2, "QUIRE-MODEL-02", "no file or folder"),
        (("llama-3.1-8b", "--kv-memory", "much"), 2, "QUIRE-INPUT-01", "is not a size"),
        (("llama-3.1-8b", "--kv-memory", "1KiB"), 2, "QUIRE-PLAN-01", "cannot hold one page"),
        (("llama-3.1-405b", "--gpu", "h100-80gb"), 2, "QUIRE-PLAN-01", "leaves nothing for pools"),
        (("llama-3.1-405b", "--gpu", "h100-80gb"), 2, "QUIRE-PLAN-01", "for a context of 131,072 tokens"),
        (("llama-3.1-8b", "--gpu", "abacus"), 2, "QUIRE-INPUT-01", "not a device"),
        (("llama-3.1-8b", "--gpu", "h100", "--mem-fraction-static", "2"), 2, "QUIRE-INPUT-01", "between 0 and 1"),
        (("llama-3.1-8b", "--mem-fraction-static", "0.8"), 2, "QUIRE-INPUT-01", "share of a device"),
        (("llama-3.1-8b", "--kv-memory", "8GiB", "--context", "10m"), 2, "QUIRE-INPUT-01", "is beyond"),
        (("llama-3.1-8b", "--kv-memory", "8GiB", "--context", "long"), 2, "QUIRE-INPUT-01", "number of tokens"),
        (("llama-3.1-8b", "--kv-memory", "8GiB", "--tp", "3"), 2, "QUIRE-INPUT-01", "cannot be split"),
        (("llama-3.1-8b", "--kv-memory", "8GiB", "--kv-dtype", "int3"), 2, "QUIRE-INPUT-01", "not a KV dtype"),
        (("llama-3.1-8b", "--kv-memory", "8GiB", "--page-size", "0"), 2, "QUIRE-INPUT-01", "page-size"),
        (("llama-3.1-8b", "--kv-memory", "8GiB", "--sweep", "luck"), 2, "QUIRE-INPUT-01", "'page-size' or 'tp'"),
        (("llama-3.1-8b", "--speculative-topk", "4"), 2, "QUIRE-INPUT-01", "needs its depth"),
        (("gemma-3-27b", "--kv-memory", "8GiB", "--max-num-batched-tokens", "-30000"), 2, "QUIRE-INPUT-01", "-30000"),
        (("gemma-3-27b", "--kv-memory", "8GiB", "--swa-full-tokens-ratio", "nan"), 2, "QUIRE-INPUT-01", "ratio"),
        (("llama-3.1-8b", "--kv-memory", "8GiB", "--values", "1k"), 2, "QUIRE-INPUT-01", "belong to a sweep"),
        (("llama-3.1-8b", "--kv-memory", "8GiB", "--pp", "100000000"), 2, "QUIRE-INPUT-01", "stages"),
        (
            ("llama-3.1-8b", "--gpu", "h100", "--mem-fraction-static", "0.01"),
            2,
            "QUIRE-PLAN-01",
            "raise --mem",
        ),
        (("llama-3.1-8b", "--measure", "--tp", "2"), 2, "QUIRE-INPUT-01", "--measure"),
        (("nowhere/no-such-model",), 2, "QUIRE-MODEL-02", "cannot be fetched"),
        (("--compare", "llama-3.1-8b", "llama-3.1-8b,window-pool=maybe"), 2, "QUIRE-INPUT-01", "valid boolean"),
        (("--compare", "llama-3.1-8b", "llama-3.1-8b,luck=1"), 2, "QUIRE-INPUT-01", "is not a setting"),
    ],
)
def test_bad_input(run: Run, arguments: tuple[str, ...], exit_code: int, code: str, said: str) -> None:
    found_code, found = error(run, *arguments)
    assert (found_code, found["code"]) == (exit_code, code)
    assert said in found["message"] + found["fix"]
    assert found["fix"]


def test_a_refused_model_exits_with_3(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**TINY, "retention_heads": 4}))
    exit_code, found = error(run, path, "--kv-memory", "1GiB")
    assert (exit_code, found["code"]) == (3, "QUIRE-MODEL-01")
    assert "retention_heads" in found["message"]


@pytest.mark.parametrize("text", ["", "[]", "{", "null", "3", '{"model_type": "llama"}', "[" * 100_000])
def test_a_broken_configuration_is_an_error_and_no_trace(run: Run, tmp_path: Path, text: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    exit_code, found = error(run, path, "--kv-memory", "1GiB")
    assert exit_code in (2, 3)
    assert found["code"].startswith("QUIRE-MODEL")


def test_a_file_a_folder_and_a_name_are_the_same_model(run: Run, tmp_path: Path) -> None:
    config = dict(CATALOGUE["qwen3-8b"].config)
    (tmp_path / "config.json").write_text(json.dumps(config))
    named, file, folder, hub = (
        data(run, name, "--kv-memory", "8GiB")
        for name in ("qwen3-8b", tmp_path / "config.json", tmp_path, CATALOGUE["qwen3-8b"].hub)
    )
    for key in KEYS:
        assert named[key] == file[key] == folder[key] == hub[key], key


@pytest.mark.parametrize(("name", "memory"), [("gemma-3-27b", "12GiB"), ("qwen3-next-80b-a3b", "7GiB")])
def test_a_plan_with_an_arena_answers_for_the_arena(run: Run, name: str, memory: str) -> None:
    """No split of these pools has room for the context, and the arena does."""
    split = data(run, name, "--kv-memory", memory, exit_code=2)
    assert any(each.startswith("arena on (fits 1 of") for each in split["to_fit"])
    found = data(run, name, "--kv-memory", memory, "--arena")
    assert found["arena"]["is_planned"] and not split["arena"]["is_planned"]
    assert found["requests_at_context"] == 1 and found["max_total_num_tokens"] > split["max_total_num_tokens"]
    for each in (split, found):
        assert sum(line["bytes"] for line in each["ledger"] if line["where"] == "device") == each["kv_bytes"]
    assert [line["name"] for line in found["ledger"]][:2] == ["arena", "padding"]
    assert all(pool["bytes"] <= found["arena"]["bytes"] for pool in found["pools"])
    shown = run("plan", name, "--kv-memory", memory, "--arena", env=WIDE).stdout
    assert "in one arena" in shown and "pools are split for" not in shown


PAIR = ("--tp", "2", "--dp", "2")


@pytest.mark.parametrize(
    ("options", "requests", "running", "tokens"),
    [
        (("qwen3-next-80b-a3b", "--kv-memory", "3GiB", "--context", "8k"), 8, 13, None),  # a state each, not three
        (("qwen3-next-80b-a3b", "--kv-memory", "6400MiB"), 1, 28, None),  # the largest request, with one state
        (("qwen3-next-80b-a3b", "--kv-memory", "12GiB", "--tp", "8", "--dp", "8", "--context", "8k"), 256, 256, None),
        (("gemma-3-27b", "--kv-memory", "40GiB", "--context", "4k", *PAIR, "--concurrency", "5"), 5, 5, None),
        (("gemma-3-27b", "--kv-memory", "20GiB", "--max-total-tokens", "20k", "--context", "8k"), 2, 256, 39_344),
    ],
)  # fmt: skip
def test_what_runs_in_an_arena(
    run: Run, options: tuple[str, ...], requests: int, running: int, tokens: int | None
) -> None:
    found = data(run, *options, "--arena")
    assert (found["requests_at_context"], found["max_running_requests"]) == (requests, running)
    assert tokens is None or found["max_total_num_tokens"] == tokens


@pytest.mark.parametrize(
    ("name", "memory"), [("qwen3-next-80b-a3b", 1), ("qwen3-next-80b-a3b", 3), ("gemma-3-27b", 12)]
)
def test_as_many_run_in_an_arena_as_the_plan_says(name: str, memory: int) -> None:
    """A replay of requests that come at once, and share nothing."""
    spec = ModelSpec.from_config(CATALOGUE[name].config)
    plan = make_plan(spec, PlanSettings(kv_memory=memory * GIB, arena=True, max_model_len=8192))
    most = plan.requests_at(8192)
    replay = Replay(plan.memory, COST, ReplaySettings(check="off", chunk=8192))
    assert replay.run(requests([(7992, 200)] * (most + 4), seed=1)).most_running == most > 1


def test_an_arena_without_effect_is_told(run: Run) -> None:
    found = data(run, "llama-3.1-8b", "--kv-memory", "20GiB", "--arena")
    assert found["arena"] is None and any(note.endswith("This model has 1 group (full).") for note in found["notes"])


@pytest.mark.parametrize("arena", [(), ("--arena",)], ids=["pools", "arena"])
def test_tenants_have_what_a_server_gives_them(run: Run, tmp_path: Path, arena: tuple[str, ...]) -> None:
    """Windows count beside pages, so a share of the memory is not the same share of the tokens."""
    path = tmp_path / "tenants.json"
    path.write_text(json.dumps({"small": {"ceiling": "5%"}, "large": {"floor": "80%"}}))
    found = data(run, "gemma-3-27b", "--kv-memory", "20GiB", "--tenants", path, *arena)
    largest = {each["name"]: each["largest_request"] for each in found["tenants"]}
    settings = PlanSettings(kv_memory=20 * GIB, arena=bool(arena))
    plan = make_plan(ModelSpec.from_config(CATALOGUE["gemma-3-27b"].config), settings)
    admission = KVCache(plan.memory, tenants=read_tenants(path)).admission
    for name, tokens in largest.items():
        namespace = Namespace(salt=f"{name}/")
        admission.check(namespace, tokens - 1, 1)
        if tokens < found["largest_request"]:
            with pytest.raises(RequestTooLarge):
                admission.check(namespace, tokens + found["page_size"], 1)
    assert largest["small"] < 0.06 * found["max_total_num_tokens"] < largest["large"]
    path.write_text('{"none": {"ceiling": "1KiB"}}')
    assert (
        "ceiling of 1KiB," in error(run, "gemma-3-27b", "--kv-memory", "20GiB", "--tenants", path, *arena)[1]["message"]
    )


@pytest.mark.parametrize("read", [read_model_config, model_folder])
def test_a_wrong_name_in_a_models_folder_is_asked_of_no_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read: Callable[[str], object]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine").mkdir()
    Path("mine/config.json").write_text(json.dumps(TINY))
    with pytest.raises(ModelLoadError, match=r"there is no .*'mine/confg'"):
        read("mine/confg")


def test_a_folder_may_be_named_like_markup(run: Run, tmp_path: Path) -> None:
    folder = tmp_path / "m[" / "x]"  # [/x]
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(TINY))
    done = run("plan", folder, "--kv-memory", "1GiB", "--html", tmp_path / "page.html", env=WIDE)
    assert done.exit_code == 0 and "m[/x]" in done.stdout and "m[/x]" in (tmp_path / "page.html").read_text()


def test_without_a_budget_the_least_memory_is_found(run: Run) -> None:
    found = data(run, "llama-3.1-8b", "--context", "32k", "--concurrency", 8)
    assert found["requests_at_context"] == 8
    assert found["kv_bytes"] == pytest.approx(8 * 32_768 * 131_072, rel=0.001)


@pytest.mark.parametrize("what", ["context", "concurrency", "dtype", "page-size", "tp"])
def test_a_sweep_has_a_row_for_each_value(run: Run, what: str) -> None:
    done = run("plan", "gemma-3-27b", "--kv-memory", "40GiB", "--sweep", what, env=WIDE)
    assert done.exit_code == 0, done.stderr
    rows = data(run, "gemma-3-27b", "--kv-memory", "40GiB", "--sweep", what)["rows"]
    assert len(rows) >= 3
    for row in rows:
        assert str(row[what]) in done.stdout


def test_a_sweep_goes_on_where_a_value_is_refused(run: Run) -> None:
    rows = data(run, "llama-3.1-8b", "--kv-memory", "8GiB", "--sweep", "tp", "--values", "1,3,8")["rows"]
    assert [row["refused"] is None for row in rows] == [True, False, True]
    assert "cannot be split" in rows[1]["refused"]


def test_two_settings_side_by_side(run: Run) -> None:
    two = ("llama-3.1-8b", "llama-3.1-8b,kv-dtype=fp8,tp=2")
    shown = run("plan", "--compare", *two, "--kv-memory", "40GiB", env=WIDE).stdout
    assert "131,072" in shown and "32,768" in shown
    found = data(run, "--compare", *two, "--kv-memory", "40GiB")
    assert [found[name]["bytes_per_token"] for name in two] == [131_072, 32_768]


def test_switches_are_compared_too(run: Run) -> None:
    two = ("gemma-3-27b", "gemma-3-27b,window-pool=false,max-num-batched-tokens=4096")
    found = data(run, "--compare", *two, "--kv-memory", "40GiB")
    assert [len(found[name]["pools"]) for name in two] == [2, 1]


def test_without_prefix_caching_nothing_is_promised_to_be_reused(run: Run) -> None:
    arguments = ("llama-3.1-8b", "--kv-memory", "8GiB", "--context", "4k", "--no-prefix-caching")
    assert data(run, *arguments)["minimum_reusable_prefix"] is None
    assert "prefix caching is off" in run("plan", *arguments).stdout


def test_a_checkpoints_own_files_say_how_it_is_quantised(run: Run, tmp_path: Path) -> None:
    """A quantisation in a file of its own counts for the weights, and a declared FP8 cache is named."""
    sizes = []
    for quantised in (False, True):
        if quantised:
            found = {"quantization": {"quant_algo": "NVFP4", "exclude_modules": []}}
            (tmp_path / "hf_quant_config.json").write_text(json.dumps(found))
        (tmp_path / "config.json").write_text(json.dumps(dict(CATALOGUE["qwen3-8b"].config)))
        ledger = data(run, tmp_path, "--gpu", "h100")["ledger"]
        sizes.append(next(line["bytes"] for line in ledger if line["name"] == "weights"))
    assert sizes[1] < 0.5 * sizes[0]
    declared = {
        **TINY,
        "quantization_config": {"kv_cache_scheme": {"num_bits": 8, "type": "float"}, "quant_method": "fp8"},
    }
    (tmp_path / "config.json").write_text(json.dumps(declared))
    assert any("--kv-dtype fp8" in note for note in data(run, tmp_path, "--kv-memory", "1GiB")["notes"])


def test_the_catalogue_is_listed(run: Run) -> None:
    assert set(data(run, "--list")) == set(CATALOGUE)
    assert "llama-3.1-70b" in run("plan", "--list").stdout


def test_a_measured_ledger(run: Run, tiny_model: Path) -> None:
    """On this machine's own memory: the weights are those loaded, and a step was run."""
    found = data(run, tiny_model, "--measure", "--kv-memory", "1MiB")
    lines = {line["name"]: line for line in found["ledger"]}
    weights = sum(path.stat().st_size for path in tiny_model.glob("*.safetensors"))
    config = json.loads((tiny_model / "config.json").read_text())
    angles = config["max_position_embeddings"] * config["hidden_size"] // config["num_attention_heads"] * 2 * 4
    assert lines["weights"]["bytes"] == pytest.approx(weights + angles, rel=0.05)
    assert not lines["weights"]["estimated"] and not lines["activations"]["estimated"]
    assert sum(pool["bytes"] for pool in found["pools"]) <= 2**20


def test_roles_are_planned_for_a_rate(run: Run) -> None:
    arguments = ("llama-3.1-8b", "--gpu", "h100-80gb", "--requests-per-second", 20, "--input-tokens", "2k",
                 "--output-tokens", 200)  # fmt: skip
    done = run("plan", *arguments, "--json")
    assert done.exit_code == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["load"]["token_bytes"] == 131072 and found["load"]["prompt_tokens"] == 2048
    assert found["link_bytes_per_s"] == 20 * 2048 * 131072
    assert found["prefill"] >= 1 and found["decode"] >= 1 and found["load"]["prefill_rate"] > 1000
    given = run("plan", "llama-3.1-8b", "--kv-memory", "8GiB", *arguments[3:], "--prefill-rate", 40960,
                "--decode-rate", 4000, "--json")  # fmt: skip
    assert [json.loads(given.stdout)[name] for name in ("prefill", "decode")] == [2, 2]
    assert "Prefill" in run("plan", *arguments).stdout
    assert found["notes"] == []
    drafts = ("--speculative-config", '{"method": "ngram", "num_speculative_tokens": 4}')
    (note,) = json.loads(run("plan", *arguments, *drafts, "--json").stdout)["notes"]
    assert "without drafts" in note and "--decode-rate" in note
    assert "without drafts" in run("plan", *arguments, *drafts).stdout
    measured = run("plan", *arguments, *drafts, "--decode-rate", 9000, "--json")
    assert json.loads(measured.stdout)["notes"] == []


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--link", "1GB/s"), "--requests-per-second"),
        (("--requests-per-second", 5), "--input-tokens"),
        (("--requests-per-second", 5, "--input-tokens", 10, "--output-tokens", 10), "--prefill-rate"),
    ],
)
def test_roles_say_what_is_missing(run: Run, arguments: tuple[object, ...], said: str) -> None:
    done = run("plan", "llama-3.1-8b", "--kv-memory", "8GiB", *arguments)
    assert done.exit_code == 2 and said in done.stderr


# -- latents in host memory


def test_latents_in_host_memory_are_compared_with_resident_ones(run: Run) -> None:
    served = ("deepseek-v3.2", "--gpu", "h200-141gb", "--tp", 8, "--context", "128k", "--hisparse")
    found = data(run, *served, "{}")
    gain = found["hisparse"]["gain"]
    assert 0 < gain["resident_requests"] < gain["break_even"] <= gain["requests"] == found["requests_at_context"]
    assert found["hisparse"]["host_bytes"] == next(
        each["bytes"] for each in found["ledger"] if each["name"] == "pool full"
    )
    assert {pool["name"]: pool["where"] for pool in found["pools"]} == {
        "full": "host",
        "indexer": "device",
        "full-hot": "device",
    }
    slow = data(run, *served, "{}", "--host-bandwidth", 1, "--hit-rate", 0.5, exit_code=2)
    assert "slower than" in slow["hisparse"]["gain"]["loses"] and slow["fits"]
    fast = data(run, *served, '{"device_buffer_size": 2048}', "--decode-ms", 1000, "--host-memory", "300GiB")
    assert fast["hisparse"]["device_buffer_size"] == 2048 and fast["hisparse"]["host_bytes"] <= 300 * GIB
    assert fast["hisparse"]["gain"]["break_even"] == fast["hisparse"]["gain"]["resident_requests"] + 1


def test_a_losing_configuration_is_in_the_table(run: Run) -> None:
    done = run("plan", "deepseek-v3.2", "--kv-memory", "40GiB", "--context", "4k", "--hisparse", "{}", env=WIDE)
    assert done.exit_code == 2 and "loses: leave hisparse out" in done.stdout and "never:" in done.stdout
    done = run("plan", "deepseek-v3.2", "--kv-memory", "40GiB", "--context", "64k", "--hisparse", "{}", env=WIDE)
    assert done.exit_code == 0 and "not known: name the --gpu" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("llama-3.1-8b", "--hisparse", "{}"), "no layer of LlamaForCausalLM"),
        (("deepseek-v3.2", "--hisparse", '{"device_buffer_size": 64}'), "2,048 selected tokens"),
        (("deepseek-v3.2", "--hisparse", '{"buffer": 64}'), "'buffer' is not a setting of hisparse"),
    ],
)
def test_models_and_buffers_that_hisparse_is_not_for(run: Run, arguments: tuple[str, ...], said: str) -> None:
    exit_code, found = error(run, *arguments, "--kv-memory", "40GiB")
    assert exit_code == 2 and said in found["message"]
