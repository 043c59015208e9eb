"""Model types whose configurations follow conventions that are known, so that a field they leave out has a meaning."""

from __future__ import annotations

_TYPES = """
    afmoe apertus aquila arcee aria_text axk1 axk2 baichuan bailing_hybrid bailing_moe bailing_moe_v2 bamba beam
    biogpt bitnet bloom blt chatglm chatglm3 codegen cohere cohere2 cohere2_moe cohere_compass_text cpmant ctrl cwm
    dbrx decilm deepseek deepseek_ref deepseek_v2 deepseek_v3 deepseek_v32 deepseek_v4 deepseek_vl_v2 diffllama doge
    dots1 dots3_note dots3_note_text emu3 ernie4_5 ernie4_5_moe exaone exaone4 exaone_moe falcon falcon_h1
    falcon_mamba flex_olmo flint fuyu gemma gemma2 gemma3 gemma3_text gemma3n gemma3n_text gemma4 gemma4_assistant
    gemma4_text gemma4_unified gemma4_unified_assistant gemma4_unified_text git glm glm4 glm4_moe glm4_moe_lite
    glm_moe_dsa got_ocr2 gpt-sw3 gpt2 gpt_bigcode gpt_neo gpt_neox gpt_neox_japanese gpt_oss gptj granite
    granite_swa granitemoe granitemoe_swa granitemoehybrid granitemoeshared helium hrm_text hunyuan hunyuan_moe
    hunyuan_v1_dense hunyuan_v1_moe hy_v3 hy_v4 hyperclovax inkling2_text inkling_text internlm internlm2 internlm3
    internvl_chat iquestcoder jais jais2 jamba jetmoe kimi_k2 kimi_k25 kimi_k3 kimi_linear kimi_vl kolibri1 laguna
    lfm2 lfm2_moe lfm3 ling llama llama4 llama4_text longcat_flash mamba mamba2 mellum mimo mimo_v2_flash minicpm
    minicpm3 minicpmv minimax minimax_m1 minimax_m2 minimax_m3 minimax_m3_vl_text ministral ministral3 mistral
    mixtral mllama mosaic moshi moss_transcribe_diarize mpt nanochat nemotron nemotron-nas nemotron_h olmo olmo2
    olmo3 olmo_hybrid olmoe openai-gpt opt orion pangu persimmon phi phi-msft phi3 phi3_v phi3small phi4
    phi4_multimodal phimoe qwen qwen2 qwen2_moe qwen3 qwen3_5 qwen3_5_moe qwen3_5_moe_text qwen3_5_text qwen3_moe
    qwen3_next qwen3_vl qwen3_vl_text qwen4_exp qwen4_exp_text recurrent_gemma reformer rwkv seed_oss skywork
    smollm3 solar solar_open stablelm starcoder2 step3 step3_text step3p7 telechat vaultgemma xglm xlm xlnet xlstm
    xverse yi youtu zamba zamba2 zaya
"""

KNOWN = frozenset(_TYPES.split())
"""Decoder-only types. Of another type only what its fields say is believed, and no field may be left out."""

_ENCODERS = """
    albert bart bert big_bird blenderbot camembert data2vec deberta electra ernie_m marian mbart mpnet mvp pegasus
    plbart prophetnet rembert roberta roformer t5 xmod
"""


def is_encoder(kind: str) -> bool:
    """Whether a model type is an encoder, or an encoder and a decoder: it generates nothing token by token."""
    return any(kind.endswith(name) or kind.startswith(f"{name}-") for name in _ENCODERS.split())
