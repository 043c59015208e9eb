"""`quire replay`: JSON with every number, tables, pictures, lists, and how it refuses."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from bench.sparse.drawn import drifting_selections

from quire.cache.running import RunningTables
from quire.prefix.evict import POLICIES
from quire.sim.workloads import WORKLOADS
from tests.changes import SIMULATOR, TIERS, TRANSFER, slow_unless_changed
from tests.cli.conftest import Run

KEYS = {
    "policy", "page_size", "pool_tokens", "requests", "prompt_tokens", "hit_tokens", "hit_rate", "ideal_hit_rate",
    "optimal_hit_rate", "evicted_tokens", "preemptions", "manager_seconds", "digest", "refused", "model", "trace",
}  # fmt: skip
SHORT = ("chat", "--limit", 8, "--seed", 3)


def runs(run: Run, *arguments: object) -> list[dict[str, Any]]:
    done = run("replay", *arguments, "--json")
    assert done.exit_code == 0, done.stderr
    found: list[dict[str, Any]] = json.loads(done.stdout)
    return found


def test_json_has_a_run_for_every_combination(run: Run) -> None:
    found = runs(
        run, *SHORT, "--policy", "lru,fifo", "--pool-tokens", "1/2,20k", "--page-size", "4,16", "--check", "all"
    )
    assert len(found) == 8
    for one in found:
        assert set(one) >= KEYS
        assert one["requests"] == 8
        assert one["hit_rate"] == one["hit_tokens"] / one["prompt_tokens"]
        assert 0 <= one["hit_rate"] <= one["ideal_hit_rate"] <= 1
        assert one["hit_rate"] <= one["optimal_hit_rate"] <= one["ideal_hit_rate"]
        assert one["gap_closed"] == 0.0 or one["policy"] == "fifo" or one["hit_rate"] == one["optimal_hit_rate"]
    assert {(one["page_size"], one["pool_tokens"]) for one in found if one["pool_tokens"] == 20480} == {
        (4, 20480),
        (16, 20480),
    }
    (half,) = {one["pool_tokens"] for one in found if one["page_size"] == 4} - {20480}
    assert half == found[0]["working_set_tokens"] // 8 * 4


def test_speculation_is_replayed(run: Run) -> None:
    """With a chance of all drafts. A trace that records none, and a text that is no number, are refused."""
    plain, drafted = (
        runs(run, *SHORT, "--policy", "lru", "--check", "reads", *more)[0] for more in ((), ("--speculate", "4,0.7"))
    )
    assert plain["speculation"] is None
    found = drafted["speculation"]
    assert 0 < found["accepted_tokens"] < found["draft_tokens"]
    assert drafted["output_tokens"] == plain["output_tokens"] and drafted["steps"] < plain["steps"]
    shown = run("replay", *SHORT, "--policy", "lru", "--speculate", "4,0.7")
    assert f"{found['accepted_tokens']:,} of {found['draft_tokens']:,} drafts accepted" in " ".join(
        shown.stdout.split()
    )
    for wrong, why in (("4", "records no acceptance"), ("x", "no number of drafts"), ("4,2", "an acceptance of 2")):
        refused = run("replay", *SHORT, "--speculate", wrong)
        assert refused.exit_code == 2 and why in " ".join(refused.stderr.split()), refused.stderr


HALF = ("chat:requests=60", "--seed", 3, "--policy", "density", "--pool-tokens", "1/4", "--check", "all")


@pytest.mark.parametrize("more", [(), ("--host-tokens", "200k"), ("-m", "gemma-3-27b", "--arena")])
def test_pools_get_smaller_and_larger_at_times(run: Run, more: tuple[object, ...]) -> None:
    """A plain pool, one above a tier, and an arena."""
    whole = runs(run, *HALF, *more)[-1]
    found = runs(run, *HALF, *more, "--resizes", "20s:1,5:1/2, 12.5s:1")[-1]
    assert {size for _, size in whole["sizes"]} == {1.0} and len(whole["sizes"]) == len(whole["occupancy"])
    sizes = {at: [size for time, size in found["sizes"] if at <= time < at + 4] for at in (0, 8, 16)}
    assert set(sizes[0] + sizes[16]) == {1.0} and sizes[8] and max(sizes[8]) < 0.52 and min(sizes[8]) > 0.4
    shares = [held + cached for _, held, cached in found["occupancy"]]
    assert all(share <= size + 0.02 for share, (_, size) in zip(shares, found["sizes"], strict=True))
    assert found["digest"] != whole["digest"] and found["requests"] == whole["requests"] == 60


def test_an_arena_is_told_or_that_there_is_none(run: Run) -> None:
    both = (*SHORT, "--policy", "lru", "-m", "plain", "-m", "gemma-3-27b", "--arena")
    assert [(each["arena"], each["pool_note"][:30]) for each in runs(run, *both)] == [
        (False, "--arena has no effect on plain"),
        (True, ""),
    ]
    shown = " ".join(run("replay", *both).stdout.split())
    assert shown.count("tokens in one arena") == 1 and "--arena has no effect on plain" in shown


def test_smaller_pools_are_told(run: Run) -> None:
    shown = " ".join(run("replay", *HALF, "--resizes", "5s:1/2").stdout.split())
    assert "the pool had 50% of its size at times" in shown
    (tiny,) = runs(run, *HALF, "--resizes", "5s:1/50")
    assert tiny["refused"] > 0, "requests that are larger than the pool is then"


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (("--resizes", "1/2"), "'1/2' is not a time and a part of the pool"),
        (("--resizes", "5s:2"), "write --resizes 60s:1/2,120s:1"),
        (("--resizes", "5s:1/2,x:1"), "'x:1' is not a time"),
        (("--resizes", "5s:1/0"), "'5s:1/0' is not a time"),
        (("--resizes", "5s:1/2", "--replicas", 2), "not yet with several engines"),
        (("--resizes", "5s:1/2", "--prefill", 1), "not yet with several engines"),
        (("--resizes", "5s:1/2", "-m", "deepseek-v3.2", "--hisparse", "{}"), "hot buffers have one size"),
        (("--resizes", "5s:1/999999"), "holds no page of each group"),
        (("--resizes", "5s:1/999999", "-m", "gemma-3-27b"), "holds no page of each group"),
    ],
)
def test_sizes_that_cannot_be_replayed_are_refused(run: Run, given: tuple[object, ...], why: str) -> None:
    refused = run("replay", *SHORT, *given)
    assert refused.exit_code == 2 and why in " ".join(refused.stderr.replace("│", " ").split()), refused.stderr


HOT = ("chat", "--limit", 6, "-m", "deepseek-v3.2", "--policy", "lru", "--pool-tokens", "64k", "--hisparse", "{}")


@slow_unless_changed(*SIMULATOR, "src/quire/sparse/", "src/quire/cli/")
def test_latents_in_host_memory_are_replayed(run: Run, tmp_path: Path) -> None:
    """Beside latents on the device. Drawn selections follow the drift and the seed, recorded ones the file."""
    resident, hot = runs(run, *HOT, "--check", "reads")
    assert resident["hisparse"] is None
    found = hot["hisparse"]
    assert (found["source"], found["device_buffer_size"], found["top_k"]) == ("drift 0.95", 4096, 2048)
    assert 0 < found["hit_rate"] <= found["optimal_hit_rate"] < 1
    assert found["resident_most_running"] == resident["most_running"]
    assert found["loses"] and found["swapped_bytes_per_step"] > 0
    still = runs(run, *HOT, "--selection-drift", 1)[1]["hisparse"]
    assert still["source"] == "drift 1" and still["hit_rate"] > found["hit_rate"]
    slow = runs(run, *HOT, "--host-bandwidth", 1)[1]["hisparse"]
    assert slow["swap_s_per_step"] > 2 * found["swap_s_per_step"]
    path = tmp_path / "selections.npz"
    drifting_selections(0.5, context=12288, top_k=2048, steps=8).save(path)
    recorded = runs(run, *HOT, "--selections", path)[1]["hisparse"]
    assert recorded["source"] == "selections.npz" and recorded["hit_rate"] < found["hit_rate"]
    shown = " ".join(run("replay", *HOT).stdout.split())
    for part in ("hot buffers", "+ hot", "buffers of 4,096 tokens", "hisparse loses", "selections: drift 0.95"):
        assert part in shown, part


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (("--selection-drift", "0.9"), "add --hisparse"),
        (("--selections", "some.npz"), "add --hisparse"),
        (("--hisparse", "{}"), "the plain model selects no tokens"),
        (("--hisparse", "{}", "-m", "llama-3.1-8b"), "no layer of LlamaForCausalLM selects latents"),
        ((*HOT[3:], "--selections", "missing.npz"), "missing.npz has no selections"),
        ((*HOT[3:], "--selections", "narrow.npz"), "selections of 8 tokens, and the model selects 2,048"),
        ((*HOT[3:], "--selections", "narrow.npz", "--selection-drift", 0.9), "either recorded or drawn"),
        ((*HOT[3:], "--selection-drift", 2), "less than or equal to 1"),
        ((*HOT[3:], "--speculate", "4,0.7"), "not yet with --speculate"),
        ((*HOT[3:], "--host-tokens", "64k"), "not yet with tiers"),
        ((*HOT[3:], "--prefill", 1), "not yet with roles"),
        ((*HOT[3:-1], '{"selection": "page_bounds", "top_k": 64}'), "page_bounds are not simulated"),
        ((*HOT[3:-1], '{"device_buffer_size": 2}'), "a device_buffer_size of 2"),
    ],
)
def test_hot_buffers_that_cannot_be_replayed_are_refused(
    run: Run, given: tuple[object, ...], why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    drifting_selections(0.9, context=40, top_k=8, steps=3).save(tmp_path / "narrow.npz")
    refused = run("replay", "chat", "--limit", 2, *given)
    assert refused.exit_code == 2 and why in " ".join(refused.stderr.split()), refused.stderr


def test_the_same_words_give_the_same_digest(run: Run) -> None:
    first, second = runs(run, *SHORT)[0], runs(run, *SHORT, "--check", "reads")[0]
    assert first["digest"] == second["digest"]
    assert runs(run, "chat", "--limit", 8, "--seed", 4)[0]["digest"] != first["digest"]


@slow_unless_changed(*SIMULATOR, "src/quire/cli/")
@pytest.mark.parametrize(
    "model", ["gemma-3-1b", "qwen3-next-80b-a3b", "quire-bundled-window", "quire-bundled-recurrent"]
)
def test_models_with_windows_and_states(run: Run, model: str) -> None:
    (found,) = runs(run, *SHORT, "--model", model, "--pool-tokens", "1/2", "--policy", "density", "--check", "all")
    assert found["model"] == model
    assert found["requests"] == 8
    assert found["prompt_tokens"] == 15_093


def test_tables_name_refusals(run: Run) -> None:
    done = run("replay", *SHORT, "--pool-tokens", "1/8,2k", "--policy", "lru,lfu", env={"COLUMNS": "80"})
    assert done.exit_code == 0, done.stderr
    for word in (
        "workload chat, seed 3: 8 requests",
        "optimum",
        "ideal",
        "of gap",
        "lfu",
        "requests were refused",
        "; 7 refused",
        "; 5 refused",
    ):
        assert word in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80
    assert done.stdout.count("requests were refused") == 2 and "KV memory" not in done.stdout


def test_every_rate_is_of_all_requests_that_could_run(run: Run) -> None:
    found = runs(run, *SHORT, "--policy", "lru,density", "--pool-tokens", "2k,1000k")
    assert [one["refused"] > 0 for one in found] == [True, True, False, False]
    assert len({(one["prompt_tokens"], one["ideal_hit_rate"]) for one in found}) == 1
    assert all(one["hit_rate"] <= one["optimal_hit_rate"] <= one["ideal_hit_rate"] for one in found)
    (left,) = runs(run, "abort-storm", "--limit", 40, "--policy", "lru", "--pool-tokens", "1")
    assert left["refused"] and left["prompt_tokens"] == left["refused_tokens"]


def test_a_small_trace_gets_a_pool_that_holds_it(run: Run) -> None:
    asked = ("chat", "--limit", 2)
    (found,) = runs(run, *asked, "--policy", "lru")
    assert not found["refused"] and str(f"{found['pool_tokens']:,} tokens") in found["pool_note"]
    assert runs(run, *asked, "--policy", "lru", "--pool-tokens", found["pool_tokens"] - 16)[0]["refused"] == 1
    assert runs(run, *asked, "--policy", "lru", "--pool-tokens", "1/8")[0]["refused"] == 2
    assert "smallest that holds" in run("replay", *asked).stdout.replace("\n", " ")
    assert "smallest that holds" in run("explain", *asked).stdout.replace("\n", " ")


def test_a_policy_named_twice_is_replayed_once(run: Run) -> None:
    found = runs(run, *SHORT, "--policy", "lru,LRU,Lfu", "--pool-tokens", "1/4,1/4", "--page-size", "16,16")
    assert [one["policy"] for one in found] == ["lru", "lfu"]


def test_a_device_that_is_unknown_gets_advice_for_a_replay(run: Run) -> None:
    fix = json.loads(run("replay", *SHORT, "--gpu", "foo", "--json").stderr)["error"]["fix"]
    assert "--prefill-rate" in fix and "--device-memory" not in fix


def test_the_lists_are_what_there_is(run: Run) -> None:
    found = json.loads(run("replay", "--list", "--json").stdout)
    assert set(found["workloads"]) == set(WORKLOADS) and all(found["workloads"].values())
    assert found["policies"] == list(POLICIES)
    assert "Mooncake" in found["formats"]
    shown = run("replay", "--list", env={"COLUMNS": "200"}).stdout
    assert all(name in shown for name in WORKLOADS)


BAD = [
    ((), "no trace is named"),
    (("nothing-like-it",), "no trace file or workload"),
    (("noisy:-1,quiet:1",), "the part of tenant 'noisy' is '-1'"),
    (("noisy:9,loud:0",), "the part of tenant 'loud' is '0'"),
    (("chat", "--policy", "lru,best"), "unknown eviction policy 'best'"),
    (("chat", "--pool-tokens", "1/0"), "not a pool size"),
    (("chat", "--pool-tokens", "many"), "is not a pool size"),
    (("chat", "--pool-tokens", "0.25"), "no whole number of tokens"),
    (("chat", "--page-size", "16,big"), "not page sizes"),
    (("chat", "--page-size", "0"), "not page sizes"),
    (("chat", "--max-running", "0"), "--max-running-requests: Input should be greater"),
    (("chat", "--max-num-batched-tokens", "0"), "a number of tokens must be above zero"),
    (("chat", "--gpu", "abacus"), "not a device"),
    (("chat", "--tp", "0"), "--tensor-parallel-size: Input should be greater"),
    (("chat", "--prefill-rate", "100"), "is missing"),
    (("chat", "--check", "everything"), "not something to check"),
    (("chat", "--order", "random"), "unknown scheduling policy"),
    (("chat", "--model", "no-such-model"), "not in the catalogue"),
]


@pytest.mark.parametrize(("arguments", "text"), BAD)
def test_bad_input_says_what_and_how(run: Run, arguments: tuple[str, ...], text: str) -> None:
    done = run("replay", *arguments, "--json")
    assert done.exit_code == 2, done.stderr
    error = json.loads(done.stderr)["error"]
    assert text in error["message"]
    assert error["fix"]


def test_a_page_that_is_wrong_ends_it(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    original = RunningTables.page_table

    def broken(self: RunningTables, *arguments: Any) -> Any:
        table = original(self, *arguments)
        table[0, 0] = table[0, -1]
        return table

    monkeypatch.setattr(RunningTables, "page_table", broken)
    assert run("replay", *SHORT).exit_code == 0
    done = run("replay", *SHORT, "--check", "reads")
    assert done.exit_code == 4
    assert "QUIRE-AUDIT-02" in done.stderr


TIERED = ("alternating:tokens=2000,turns=3", "--pool-tokens", "3k", "--policy", "lru", "--host-tokens", "64k")


def test_tiers_stand_beside_the_same_replay_without_them(run: Run) -> None:
    without, beside = runs(run, *TIERED, "--storage-tokens", "1m", "--check", "all")
    assert without["tiers"] is None
    tiers = beside["tiers"]
    assert tiers["device_hit_tokens"] + tiers["host_hit_tokens"] == beside["hit_tokens"] > without["hit_tokens"]
    assert tiers["loaded_bytes"] >= tiers["host_hit_tokens"] * 128 * 1024 > 0
    assert (tiers["host_tokens"], tiers["storage_tokens"]) == (65536, 1048576)
    assert tiers["host_bandwidth"] == pytest.approx(51.2e9)
    assert tiers["archived_bytes"] > 0
    assert beside["ttft_p50_s"] < without["ttft_p50_s"]
    assert beside["ttft_mean_s"] < without["ttft_mean_s"]
    (same,) = runs(run, *TIERED[:-2])
    assert (same["digest"], same["tiers"]) == (without["digest"], None)


@slow_unless_changed(*SIMULATOR, *TIERS, "src/quire/cli/")
def test_tables_say_what_tiers_were_worth_and_which_links_lost(run: Run) -> None:
    done = run("replay", *TIERED, "--storage-tokens", "8k", env={"COLUMNS": "120"})
    assert done.exit_code == 0, done.stderr
    for word in (
        "+ tiers",
        "hits by tier",
        "declined",
        "fetched",
        " -> ",
        "A host of 65,536 tokens at 51.2 GB/s; storage",
    ):
        assert word in done.stdout
    losing = (
        "chat",
        "--limit",
        60,
        "--pool-tokens",
        "20k",
        "--host-tokens",
        "1m",
        "--host-bandwidth",
        1,
        "--policy",
        "lru",
    )
    done = run("replay", *losing, env={"COLUMNS": "160"})
    assert "save turned itself off: recompute is cheaper below" in done.stdout
    assert "; measured " in done.stdout


@slow_unless_changed(*SIMULATOR, *TIERS, "src/quire/cli/")
def test_a_host_of_so_many_bytes_and_a_model_with_a_window(run: Run) -> None:
    _, beside = runs(
        run, *SHORT, "--model", "gemma-3-1b", "--pool-tokens", "1/2", "--policy", "lru", "--host-memory", "256MiB",
        "--write-policy", "write_back", "--prefetch-policy", "timeout", "--load", "always", "--check", "all",
    )  # fmt: skip
    assert 0 < beside["tiers"]["host_tokens"] < 256 * 2**20
    assert beside["tiers"]["saved_bytes"] > 0


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("--storage-tokens", "1m"), "no host tier is"),
        (("--host-tokens", "1k", "--host-memory", "1MiB"), "given twice"),
        (("--host-tokens", "1k", "--write-policy", "sometimes"), "--write-policy: Input should be"),
        (("--host-tokens", "1k", "--host-bandwidth", "0"), "--host-bandwidth: Input should be greater"),
        (("--host-tokens", "4"), "holds no page"),
    ],
)
def test_tiers_that_make_no_sense_are_refused(run: Run, arguments: tuple[str, ...], text: str) -> None:
    done = run("replay", *SHORT, *arguments, "--json")
    assert done.exit_code == 2, done.stderr
    error = json.loads(done.stderr)["error"]
    assert text in error["message"]
    assert error["fix"]


def test_a_replay_loads_no_torch() -> None:
    code = (
        "import sys; from quire.cli import main\n"
        "sys.argv = ['quire', 'replay', 'chat', '--limit', '3', '--check', 'all', '--host-tokens', '9k']\n"
        "try: main()\nexcept SystemExit as end: assert not end.code\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@slow_unless_changed(*SIMULATOR, *TRANSFER, "src/quire/cli/")
def test_roles_are_beside_as_many_engines_without(run: Run) -> None:
    arguments = ("chat", "--limit", 12, "--prefill", 1, "--decode", 2, "--link", "2GB/s", "--check", "reads")
    apart, same = runs(run, *arguments)
    assert (apart["prefill"], apart["decode"], same["prefill"], same["decode"]) == (1, 2, 0, 3)
    assert apart["received_tokens"] > 0 and same["received_tokens"] == 0 and not apart["fallbacks"]
    assert apart["output_tokens"] == same["output_tokens"] and apart["requests"] == same["requests"] == 12
    assert [one["digest"] for one in runs(run, *arguments)] == [apart["digest"], same["digest"]]
    broken, _ = runs(run, *arguments, "--link-failures", 1)
    assert broken["fallbacks"] == {"unsent": broken["asks"]} and broken["received_tokens"] == 0
    shown = run("replay", *arguments)
    assert "1 prefill, 2 decode" in shown.stdout and "3 engines" in shown.stdout
    assert "drafts accepted" not in shown.stdout
    assert run("replay", *arguments, "--speculate", "3,0.7").stdout.count("drafts accepted") == 2


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--decode", 2), "--prefill 1"),
        (("--prefill", 1, "--link", "fast"), "not a size"),
        (("--prefill", 1, "--link", "1GB/min"), "--link: '1GB/min' is no speed"),
        (("--prefill", 1, "--page-size", "4,16"), "2 replays"),
    ],
)
def test_roles_refuse_what_they_cannot_do(run: Run, arguments: tuple[object, ...], said: str) -> None:
    done = run("replay", "chat", "--limit", 4, *arguments)
    assert done.exit_code == 2 and said in done.stderr


ROUTED = ("chat:rate=20", "--limit", 30, "--pool-tokens", "20k", "--replicas", 3, "--event-loss", 0.2)


def test_routers_stand_beside_each_other(run: Run) -> None:
    found = runs(run, *ROUTED, "--restart-every", 0.5, "--check", "all")
    assert [one["router"] for one in found] == ["round-robin", "least-loaded", "prefix", "events"]
    for one in found:
        assert one["requests"] == 30 == sum(each["requests"] for each in one["engines"]) and one["restarts"] > 2
        assert one["hit_tokens"] + one["computed_tokens"] == one["prompt_tokens"]
        assert one["hit_tokens"] == sum(each["hit_tokens"] for each in one["engines"])
    assert found[-1]["events"]["lost"] > 0 and not found[0]["events"]
    one, flushed = (runs(run, *ROUTED, "--router", "events", *more)[0] for more in ((), ("--flush-every", 0.3)))
    assert one["hit_rate"] > flushed["hit_rate"] and one["restarts"] == 0
    shown = run("replay", *ROUTED, "--router", "events,prefix,events", "--restart-every", 0.5, env={"COLUMNS": "80"})
    for part in ("busiest", "prefix: ", "lost by restarts and flushes", "asked again"):
        assert part in shown.stdout, part
    assert shown.stdout.count("events  ") == 1 and max(map(len, shown.stdout.splitlines())) <= 80


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("--router", "events"), "no router in front of one engine"),
        (("--event-delay", "1"), "no router in front of one engine"),
        (("--replicas", "2", "--router", "magic"), "no router 'magic'"),
        (("--replicas", "0"), "--replicas: Input should be greater"),
        (("--replicas", "2", "--event-loss", "1"), "--event-loss: Input should be less"),
        (("--replicas", "2", "--prefill", "1"), "not yet with roles"),
        (("--replicas", "2", "--policy", "lru,fifo"), "2 replays, and one is wanted"),
    ],
)
def test_routers_that_make_no_sense_are_refused(run: Run, arguments: tuple[str, ...], text: str) -> None:
    done = run("replay", *SHORT, *arguments, "--json")
    assert done.exit_code == 2, done.stderr
    error = json.loads(done.stderr)["error"]
    assert text in error["message"] and error["fix"]
