"""What loading refuses, and what it says."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from quire.errors import InvalidInput, LayoutMismatch, ModelCheckFailed, ModelLoadError, UnsupportedModel
from quire.models import hf, source
from quire.models.hf import LoadedModel, load_model
from quire.models.registry import ALIASES, REFUSED
from quire.spec.layout import DType
from tests.tiny_models import ARCHITECTURES, build_tiny, save_tiny
from tests.verified_models import VERIFIED


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return save_tiny("llama_gqa", tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def folder(tiny, tmp_path):
    """A copy to break."""
    return shutil.copytree(tiny, tmp_path / "model")


def write_config(folder, config):
    (folder / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))


def edit_config(folder, **changes):
    config = json.loads((folder / "config.json").read_text())
    write_config(folder, {**config, **changes})


def refusal(folder, kind=ModelLoadError, **options):
    with pytest.raises(kind) as caught:
        load_model(str(folder), **options)
    message = str(caught.value)
    assert "Fix:" in message
    return message


def add_tensor(folder, name):
    path = folder / "model.safetensors"
    save_file({**load_file(path), name: torch.ones(1)}, path, metadata={"format": "pt"})


class TestLoaded:
    def test_facts(self, tiny):
        model = load_model(str(tiny))
        assert model.name == str(tiny)
        assert model.spec.architecture == "LlamaForCausalLM"
        assert model.spec.context_length == 512
        assert model.spec.vocab_size == 256
        assert model.spec.dtype is DType.FLOAT32
        assert model.eos_token_ids == (255,)
        assert model.config["model_type"] == "llama"

    def test_dtype_of_the_configuration_and_of_the_caller(self, folder):
        edit_config(folder, dtype="bfloat16")
        assert load_model(str(folder)).spec.dtype is DType.BFLOAT16
        assert load_model(str(folder), dtype="float16").spec.dtype is DType.FLOAT16

    def test_several_end_tokens(self, folder):
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 9]}))
        assert load_model(str(folder)).eos_token_ids == (7, 9)

    def test_loading_prints_nothing(self, tiny, capfd, recwarn):
        load_model(str(tiny))
        assert capfd.readouterr() == ("", "")
        assert not recwarn.list

    def test_unchecked(self, tiny, monkeypatch):
        monkeypatch.setattr(hf, "check_forward", None)
        assert load_model(str(tiny), check=False).spec.calls


class TestFiles:
    def test_no_folder(self, tmp_path):
        message = refusal(tmp_path / "absent")
        assert "there is no folder" in message
        assert "'owner/model'" in message

    def test_a_file(self, folder):
        assert "is a file; a model is a folder" in refusal(folder / "model.safetensors")

    def test_no_configuration(self, folder):
        (folder / "config.json").unlink()
        assert "has no config.json" in refusal(folder)

    @pytest.mark.parametrize(("text", "said"), [("{", "cannot be read"), ("[1]", "holds a JSON list")])
    def test_bad_configuration(self, folder, text, said):
        write_config(folder, text)
        assert said in refusal(folder)

    def test_no_weights(self, folder):
        (folder / "model.safetensors").unlink()
        message = refusal(folder)
        assert "the weights of" in message
        assert "model.safetensors" in message

    @pytest.mark.parametrize("size", [5, 300, 40_000])
    def test_cut_weights(self, folder, size):
        content = (folder / "model.safetensors").read_bytes()
        (folder / "model.safetensors").write_bytes(content[:size])
        assert "is corrupt" in refusal(folder)

    def test_absent_tensor(self, folder):
        edit_config(folder, num_hidden_layers=4)
        message = refusal(folder)
        assert "lack 9 tensors that LlamaForCausalLM needs, first 'model.layers.3." in message

    def test_tensor_of_another_shape(self, folder):
        edit_config(folder, intermediate_size=64)
        assert "the weights of" in refusal(folder)

    def test_hub_out_of_reach(self, monkeypatch):
        def offline(*_, **__):
            raise OSError("We couldn't connect to the hub.\nlong advice")

        monkeypatch.setattr(source.PreTrainedConfig, "get_config_dict", offline)
        message = refusal("owner/model")
        assert "config.json of 'owner/model' cannot be fetched from the hub: We couldn't connect to the hub." in message
        assert "long advice" not in message
        assert "pass a local folder" in message


class TestArguments:
    def test_dtype(self, tiny):
        assert "dtype 'int8' is not one of auto, float32, float16, bfloat16" in refusal(
            tiny, InvalidInput, dtype="int8"
        )

    def test_device(self, tiny):
        assert "cannot be moved to device 'cuda:77'" in refusal(tiny, device="cuda:77")
        assert "cannot be moved to device 'quantum'" in refusal(tiny, device="quantum")


class TestArchitectures:
    @pytest.mark.parametrize(
        ("kind", "reason"),
        [
            ("rwkv", "does not continue from a state held elsewhere"),
            ("zaya", "mixes keys and values of neighbouring tokens"),
            ("inkling_text", "adds a bias by distance"),
            ("bloom", "which transformers does not let another implementation replace"),
            ("dots3_note_text", "slides windows over latents"),
            ("bert", "is an encoder or encoder-decoder"),
        ],
    )
    def test_refused_by_name(self, folder, kind, reason):
        write_config(folder, {"model_type": kind})
        message = refusal(folder, UnsupportedModel)
        assert f"is of type '{kind}'" in message
        assert reason in message

    def test_refused_inside_a_wrapper(self, folder):
        write_config(folder, {"model_type": "llama", "text_config": {"model_type": "inkling_text"}})
        assert "is of type 'inkling_text', which adds a bias by distance" in refusal(folder, UnsupportedModel)

    def test_unknown_type(self, folder):
        edit_config(folder, model_type="llama9")
        message = refusal(folder, UnsupportedModel)
        assert f"transformers {transformers.__version__} does not know model type 'llama9'" in message

    def test_no_type(self, folder):
        write_config(folder, {"hidden_size": 4})
        assert "names no 'model_type'" in refusal(folder, UnsupportedModel)

    def test_no_language_model(self, folder):
        write_config(folder, {"model_type": "vit"})
        assert "'vit'" in (message := refusal(folder, UnsupportedModel))
        assert "has no causal language model" in message

    def test_quantised_weights(self, folder):
        edit_config(folder, quantization_config={"quant_method": "gptq", "bits": 4})
        assert "are quantised ('gptq')" in refusal(folder, UnsupportedModel)

    def test_a_quantisation_that_is_named_beside_the_configuration(self, folder):
        (folder / "hf_quant_config.json").write_text(json.dumps({"quantization": {"quant_algo": "FP8"}}))
        assert "are quantised ('FP8')" in refusal(folder, UnsupportedModel)

    def test_a_quantisation_of_the_cache_alone(self, folder):
        (folder / "hf_quant_config.json").write_text(json.dumps({"quantization": {"kv_cache_quant_algo": "FP8"}}))
        add_tensor(folder, "model.layers.0.self_attn.k_proj.k_scale")
        assert load_model(str(folder)).num_layers == 3

    @pytest.mark.parametrize("more", ["weight_scale", "bias"])
    def test_tensors_that_modules_do_not_read(self, folder, more):
        """Scales of a quantisation that nothing names, and biases that the configuration denies."""
        add_tensor(folder, f"model.layers.1.self_attn.q_proj.{more}")
        message = refusal(folder)
        assert (
            f"have 1 tensors that LlamaForCausalLM does not read, first 'model.layers.1.self_attn.q_proj.{more}'"
            in message
        )

    def test_tensors_of_a_checkpoint_that_leaves_out_the_name_of_the_model(self, folder):
        add_tensor(folder, "layers.1.self_attn.q_proj.bias")
        assert "does not read, first 'layers.1.self_attn.q_proj.bias'" in refusal(folder)

    def test_scales_of_experts_that_transformers_joins(self, tmp_path):
        build_tiny("qwen3_moe").save_pretrained(tmp_path)
        name = "model.layers.0.mlp.experts.0.gate_proj.weight_scale"
        add_tensor(tmp_path, name)
        assert f"does not read, first '{name}'" in refusal(tmp_path)

    def test_tensors_of_modules_that_it_does_not_have(self, folder):
        """Such as prediction layers and towers."""
        add_tensor(folder, "model.layers.3.self_attn.q_proj.weight")
        assert load_model(str(folder)).num_layers == 3

    def test_kv_heads_that_each_expert_has_anew(self):
        more = {"num_local_experts": 4, "num_experts_per_tok": 2, "kv_channels": 16}
        model = LoadedModel(build_tiny("llama", model_type="jetmoe", **more), name="jetmoe")
        assert {call.kv_heads for call in model.spec.calls} == {8}

    def test_a_package_that_is_not_installed(self, folder, monkeypatch):
        def absent(*_, **__):
            raise ImportError("`accelerate` is required")

        monkeypatch.setattr(hf.AutoModelForCausalLM, "from_pretrained", absent)
        assert "needs a package that is not installed: `accelerate` is required" in refusal(folder)

    def test_unsupported_dtype(self, folder):
        edit_config(folder, dtype="float64")
        assert "the configuration's dtype is 'float64'" in refusal(folder, UnsupportedModel)

    @pytest.mark.parametrize(
        ("kind", "settings"),
        [("bloom", {"n_head": 4, "n_layer": 2}), ("falcon", {"num_attention_heads": 4, "num_hidden_layers": 2})],
    )
    def test_models_that_ignore_the_interface_are_found_out(self, kind, settings):
        """Even where no list names them."""
        config = AutoConfig.for_model(
            kind, hidden_size=32, vocab_size=64, attn_implementation="eager", max_position_embeddings=64, **settings
        )
        with pytest.raises(UnsupportedModel, match="computes attention in code of its own"):
            LoadedModel(AutoModelForCausalLM.from_config(config), name="own")

    def test_a_window_the_model_does_not_pass_on(self):
        """phimoe's configuration promises windows; its attention calls have none."""
        config = AutoConfig.for_model(
            "phimoe",
            hidden_size=32,
            vocab_size=64,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            num_local_experts=2,
            max_position_embeddings=64,
            sliding_window=16,
        )
        with pytest.raises(
            LayoutMismatch, match="promises 2 calls that keep something and the model makes 2; call 0 should be"
        ):
            LoadedModel(AutoModelForCausalLM.from_config(config), name="windows")

    def test_a_model_that_cannot_run(self, tiny, monkeypatch):
        def broken(*_, **__):
            raise TypeError("no such thing\nlong story")

        monkeypatch.setattr(LoadedModel, "discover", broken)
        message = refusal(tiny, ModelCheckFailed)
        assert "cannot run a first step: TypeError: no such thing." in message


class TestSupportTable:
    def test_each_type_has_one_status(self):
        assert not VERIFIED & set(REFUSED)
        assert not set(ALIASES) & (VERIFIED | set(REFUSED))
        assert set(ALIASES.values()) <= VERIFIED

    def test_refusals_have_reasons(self):
        assert all(REFUSED.values())

    def test_what_the_sweep_runs_is_listed(self):
        assert {settings["model_type"] for settings in ARCHITECTURES.values()} <= VERIFIED


class TestLinear:
    def test_wide_weights_change_rounding_only(self, tmp_path):
        folder = str(save_tiny("llama_gqa", tmp_path))
        narrow = build_tiny("llama_gqa", attn_implementation="eager").to(torch.bfloat16)
        tokens = torch.arange(30)
        with torch.inference_mode():
            wanted = narrow(tokens[None], use_cache=False).logits[0].float()
        found = load_model(folder, dtype="bfloat16").plain_logits(tokens)
        exact = load_model(folder).plain_logits(tokens)
        assert (found - exact).norm() < 1.2 * (wanted - exact).norm()

    def test_a_tied_embedding_keeps_its_dtype(self, tmp_path):
        folder = str(save_tiny("gemma2", tmp_path))
        model = load_model(folder, dtype="bfloat16")
        assert model.spec.dtype is DType.BFLOAT16
