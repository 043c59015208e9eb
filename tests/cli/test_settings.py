"""Settings: one declaration for options, environment, files and Python; and the names that users of others type."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from quire.engine.before_load import check_model
from quire.engine.config import EngineConfig, engine_config
from quire.engine.core import EngineCore
from quire.errors import InvalidInput, ModelLoadError
from quire.models.tokenizer import load_tokenizer
from quire.serve.config import ServerConfig
from quire.settings.setting import group_of, option_names
from tests.cli.conftest import Run

TEMPLATE = "{% for message in messages %}{{ message['content'] }}!{% endfor %}"


@pytest.fixture
def served(run: Run, monkeypatch: pytest.MonkeyPatch) -> Any:
    """What `quire serve` with these arguments would serve."""
    found: list[tuple[EngineConfig, ServerConfig]] = []
    monkeypatch.setattr("quire.serve.server.serve", lambda engine, server, **_: found.append((engine, server)))

    def serve(*arguments: object, **env: str) -> tuple[EngineConfig, ServerConfig]:
        done = run("serve", *arguments, env=env)
        assert done.exit_code == 0, done.stderr
        return found[-1]

    return serve


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("quire.yaml", "page-size: 32\nkv_memory: 4MiB\nmax_num_seqs: 7\nport: 1234\nprefix_caching: false\n"),
        ("quire.toml", 'page-size = 32\nkv_memory = "4MiB"\nmax_num_seqs = 7\nport = 1234\nprefix_caching = false\n'),
    ],
)
def test_options_beat_the_environment_and_it_beats_the_file(served: Any, tmp_path: Path, name: str, text: str) -> None:
    path = tmp_path / name
    path.write_text(text)
    engine, server = served("--config", path)
    assert (engine.page_size, engine.kv_memory, engine.max_running_requests) == (32, 4 * 2**20, 7)
    assert (server.port, engine.enable_prefix_caching) == (1234, False)
    engine, server = served("--config", path, "--kv-memory", "5MiB", QUIRE_PAGE_SIZE="64", QUIRE_KV_MEMORY="6MiB")
    assert (engine.page_size, engine.kv_memory, server.port) == (64, 5 * 2**20, 1234)
    engine, _ = served("--config", path, "--prefix-caching")
    assert engine.enable_prefix_caching


@pytest.mark.parametrize(
    ("text", "said", "fix"),
    [
        ("kv_memry: 1GiB\n", "'kv_memry' is not a setting", "'kv_memory'"),
        ("gpu_memory_utilization: 0.9\n", "share of the GPU", "--kv-memory"),
        ("max_num_seqs: 3\nmax_running_requests: 4\n", "given twice", "once"),
        ("page_size: 0\n", "page_size", ""),
        ("- page_size\n", "holds no settings", "page_size: 16"),
        ("a: [\n", "is no YAML", ""),
    ],
)
def test_a_file_that_is_wrong_is_refused(run: Run, tmp_path: Path, text: str, said: str, fix: str) -> None:
    path = tmp_path / "quire.yaml"
    path.write_text(text)
    done = run("serve", "--config", path, "--json")
    assert done.exit_code == 2
    error = json.loads(done.stderr)["error"]
    assert said in error["message"]
    assert fix in error["fix"]
    assert "cannot be read" in run("serve", "--config", tmp_path / "absent.toml").stderr


def test_python_takes_the_same_names() -> None:
    found = engine_config(max_num_seqs=3, block_size=32, max_model_len="1k", kv_cache_dtype="fp8", dtype="half")
    assert (found.max_running_requests, found.page_size, found.max_model_len) == (3, 32, 1024)
    assert (found.kv_dtype, found.dtype) == ("fp8_e4m3", "float16")
    for given, said in (({"kv_memry": 1}, "kv_memory"), ({"gpu_memory_utilization": 0.9}, "--kv-memory")):
        with pytest.raises(InvalidInput) as caught:
            engine_config(**given)
        assert said in caught.value.fix


FAMILIAR = [
    (("MODEL",), "model", "MODEL"),
    (("--model-path", "MODEL"), "model", "MODEL"),
    (("--max-model-len", "1k"), "max_model_len", 1024),
    (("--context-length", "512"), "max_model_len", 512),
    (("--block-size", "32"), "page_size", 32),
    (("--page-size=64",), "page_size", 64),
    (("--max-num-seqs", "8"), "max_running_requests", 8),
    (("--max-num-batched-tokens", "4k"), "max_num_batched_tokens", 4096),
    (("--served-model-name", "emma"), "model_name", "emma"),
    (("--revision", "v2"), "revision", "v2"),
    (("--tensor-parallel-size", "1"), "tensor_parallel_size", 1),
    (("-tp", "1"), "tensor_parallel_size", 1),
    (("--kv-cache-dtype", "fp8_e5m2"), "kv_dtype", "fp8_e5m2"),
    (("--enable-prefix-caching",), "enable_prefix_caching", True),
    (("--no-enable-prefix-caching",), "enable_prefix_caching", False),
    (("--dtype", "bf16"), "dtype", "bfloat16"),
]


@pytest.mark.parametrize(("arguments", "name", "value"), FAMILIAR)
def test_what_users_of_others_type_works(
    served: Any, tiny_model: Path, arguments: tuple[str, ...], name: str, value: object
) -> None:
    given = [str(tiny_model) if word == "MODEL" else word for word in arguments]
    engine, _ = served(*given)
    assert getattr(engine, name) == (str(tiny_model) if value == "MODEL" else value)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--gpu-memory-utilization", "0.9"), "--kv-memory 40GiB"),
        (("--mem-fraction-static=0.8",), "--kv-memory 40GiB"),
        (("--tensor-parallel-size", "2"), "one device"),
        (("--trust-remote-code",), "never runs code"),
        (("--disable-radix-cache",), "--no-prefix-caching"),
        (("--hicache-size", "10"), "--host-memory"),
        (("--max-model-len", "long"), "number of tokens"),
        (("MODEL", "--model", "other"), "given twice"),
    ],
)
def test_or_says_what_to_type(run: Run, arguments: tuple[str, ...], said: str) -> None:
    done = run("serve", *arguments, "--json")
    assert done.exit_code == 2
    error = json.loads(done.stderr)["error"]
    assert said in error["message"] + error["fix"]


def test_the_value_of_an_option_is_any_text(run: Run, served: Any, tiny_model: Path) -> None:
    done = run(
        "generate", "--model", tiny_model, "--kv-memory", "1MiB", "--max-tokens", 1, "--stop", "--swap-space", "Hi"
    )
    assert done.exit_code == 0, done.stderr
    engine, server = served("--served-model-name", "-m", f"-m{tiny_model}", "--api-key", "--block-size")
    assert (engine.served_model_name, engine.model, server.api_key) == ("-m", str(tiny_model), "--block-size")


def test_what_kubernetes_sets_is_no_port(run: Run, served: Any) -> None:
    assert served(QUIRE_PORT="tcp://10.0.0.1:8000")[1].port == 8000
    assert served("--port", "9000", QUIRE_PORT="tcp://10.0.0.1:8000")[1].port == 9000
    assert served(QUIRE_PORT="8001")[1].port == 8001
    assert "is ignored" in run("serve", "--page-size", "0", env={"QUIRE_PORT": "tcp://10.0.0.1:8000"}).stderr
    assert "QUIRE_PORT: " in run("serve", env={"QUIRE_PORT": "http"}).stderr


def test_an_empty_variable_is_unset(served: Any) -> None:
    engine, server = served(QUIRE_PORT="", QUIRE_KV_MEMORY="", QUIRE_STORAGE="", QUIRE_MODEL="")
    assert (server.port, engine.kv_memory, engine.storage, engine.model) == (8000, None, None, "quire-bundled")


def test_a_variable_may_do_nothing(run: Run, served: Any, tmp_path: Path) -> None:
    idle = {"QUIRE_STORAGE_SIZE": "8GiB", "QUIRE_PREFETCH": "timeout", "QUIRE_PREFETCH_SECONDS": "3"}
    engine, _ = served(**idle)
    assert (engine.storage_size, engine.prefetch, engine.prefetch_seconds) == (None, "break_even", 2.0)
    engine, _ = served("--storage", tmp_path / "store", **idle)
    assert (engine.storage_size, engine.prefetch, engine.prefetch_seconds) == (8 * 2**30, "timeout", 3.0)
    path = tmp_path / "quire.yaml"
    path.write_text("storage_size: 1GiB\n")
    for given in (("--storage-size", "1GiB"), ("--config", path)):
        assert "does nothing without storage" in run("serve", *given, env=idle).stderr


@pytest.mark.parametrize(
    "text",
    [
        "api_key: 123456789\n",
        "storage: [valkey://user:123456789@host]\n",
        "api_key: [123456789\n",
        "storage: file://user:123456789@host/store\n",
        "storage: file://user:12345/123456789@host/store\n",
    ],
)
def test_no_message_has_a_secret(run: Run, tmp_path: Path, text: str) -> None:
    path = tmp_path / "quire.yaml"
    path.write_text(text)
    words = ("generate", "Hi") if "file:" in text else ("serve",)
    done = run(*words, "--config", path, "--debug")
    assert (done.exit_code, "123456789" in done.stdout + done.stderr) == (2, False), done.stderr


def test_one_file_serves_all_commands(
    run: Run, tiny_model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "quire.yaml"
    path.write_text(f"port: 8001\nmodel: {tiny_model}\nkv_memory: 1MiB\n")
    done = run("generate", "Hi", "--max-tokens", 1, "--config", path)
    assert done.exit_code == 0, done.stderr
    assert f"{path}: 'port' is a setting of another command, and is skipped" in caplog.text
    assert "kv_memory" not in caplog.text


def test_debug_logs_everything(served: Any) -> None:
    assert served("--debug")[1].log_level == "debug"


def test_the_log_level_is_a_setting(served: Any) -> None:
    assert served()[1].log_level == "warning"
    assert served("--log-level", "debug")[1].log_level == "debug"
    assert served(QUIRE_LOG_LEVEL="error")[1].log_level == "error"


EARLY = """
import resource, sys
sys.argv = ["quire", *{arguments!r}]
from quire.cli import main
try:
    main()
except SystemExit as end:
    assert end.code == 2, end.code
assert "torch" not in sys.modules and "transformers" not in sys.modules
print(resource.getrusage(resource.RUSAGE_SELF).ru_utime)
"""


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("serve", "--model", "/nonexistent"), "no folder"),
        (("serve", "--kv-memory", "2"), "cannot hold one page"),
        (("generate", "Hello", "--kv-memory", "2"), "cannot hold one page"),
        (("serve", "llama-3.1-8b"), "meta-llama/"),
        (("serve", "TOKENLESS"), "--skip-tokenizer-init"),
    ],
)
def test_what_cannot_be_served_is_refused_before_torch(
    tiny_model: Path, tmp_path: Path, arguments: tuple[str, ...], said: str
) -> None:
    shutil.copytree(tiny_model, tmp_path / "tokenless", ignore=shutil.ignore_patterns("*token*"))
    given = [str(tmp_path / "tokenless") if word == "TOKENLESS" else word for word in arguments]
    done = subprocess.run([sys.executable, "-c", EARLY.format(arguments=given)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert said in done.stderr.replace("│\n│ ", "")
    assert float(done.stdout) < 2, "CPU seconds; 0.5 on an idle machine"


def test_a_folder_without_a_tokenizer_gets_advice(tiny_model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "tokenless"
    shutil.copytree(tiny_model, folder, ignore=shutil.ignore_patterns("*token*"))
    with pytest.raises(ModelLoadError, match="--tokenizer"):
        load_tokenizer(str(folder))
    for allowed in ({"skip_tokenizer_init": True}, {"tokenizer": str(tiny_model)}):
        check_model(engine_config(model=str(folder), **allowed))


def test_a_local_folder_comes_before_the_catalogue(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(tiny_model, "llama-3.1-8b", ignore=shutil.ignore_patterns("*token*"))
    Path("llama-3.1-8b/tekken.json").write_text("{}")
    plans = [check_model(engine_config(model=name, kv_memory="1MiB")) for name in ("llama-3.1-8b", str(tiny_model))]
    assert plans[0] and plans[1] and plans[0].spec == plans[1].spec


def test_a_chat_template_from_a_file(run: Run, tiny_model: Path, tmp_path: Path) -> None:
    path = tmp_path / "template.jinja"
    path.write_text(TEMPLATE)
    options = ("--model", tiny_model, "--kv-memory", "1MiB", "--max-tokens", 1, "--chat", "--json")
    done = run("generate", "Hello", *options, "--chat-template", path)
    assert len(json.loads(done.stdout)["prompt_token_ids"]) == len("Hello!")
    refused = run("generate", "Hello", *options, "--chat-template", tmp_path / "absent")
    assert "there is no file" in json.loads(refused.stderr)["error"]["message"]


@pytest.mark.parametrize("kv_memory", ["100KiB", "400KiB", "1MiB"])
def test_plan_and_serve_have_one_rule(run: Run, tiny_model: Path, kv_memory: str) -> None:
    done = run("plan", tiny_model, "--kv-memory", kv_memory, "--json")
    planned = json.loads(done.stdout)
    config = engine_config(model=str(tiny_model), kv_memory=kv_memory)
    core, early = EngineCore(config), check_model(config)
    assert early is not None
    plans = (core.capacity, early)
    assert {plan.fits for plan in plans} == {planned["fits"]} == {done.exit_code == 0}
    assert {plan.largest_request for plan in plans} == {planned["largest_request"]}
    assert {plan.config.max_total_num_tokens for plan in plans} == {planned["max_total_num_tokens"]}


def test_every_setting_is_declared_in_full() -> None:
    for model in (EngineConfig, ServerConfig):
        for name, field in model.model_fields.items():
            assert field.description and field.description.endswith("."), name
            assert group_of(model, name)
            assert all(option.startswith("-") for option in option_names(model, name))


def test_the_shell_completes_options_and_values() -> None:
    def completed(words: str) -> list[str]:
        env = os.environ | {
            "_QUIRE_COMPLETE": "complete_bash",
            "COMP_WORDS": words,
            "COMP_CWORD": str(words.count(" ")),
        }
        code = "import sys; sys.argv = ['quire']; from quire.cli import main; main()"
        done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
        return done.stdout.split()

    assert "--kv-memory" in completed("quire serve --kv-m")
    assert completed("quire serve --policy l") == ["lpm"]
