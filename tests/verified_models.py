"""Model types that passed the check at load as tiny random models: paged, chunked, mixed steps against the plain pass.

Windows longer than the check's sequences are compared with the configuration instead.
"""

_NAMES = """
    afmoe apertus arcee aria_text axk1 axk2 bailing_hybrid bamba beam biogpt bitnet cohere cohere2 cohere2_moe ctrl
    cwm dbrx deepseek_v2 deepseek_v3 deepseek_v32 deepseek_v4 diffllama dots1 emu3 ernie4_5 ernie4_5_moe exaone4
    exaone_moe falcon_h1 falcon_mamba flex_olmo flint fuyu gemma gemma2 gemma3 gemma3_text gemma3n_text gemma4
    gemma4_text gemma4_unified_text glm glm4 glm4_moe glm4_moe_lite glm_moe_dsa gpt-sw3 gpt2 gpt_bigcode gpt_neox
    gpt_oss granite granite_swa granitemoe granitemoe_swa granitemoehybrid granitemoeshared helium hrm_text
    hunyuan_v1_dense hunyuan_v1_moe hy_v3 hy_v4 hyperclovax internlm3 iquestcoder jais2 jamba jetmoe kimi_linear
    kolibri1 laguna lfm2 lfm2_moe lfm3 llama llama4 llama4_text longcat_flash mamba mamba2 mellum mimo_v2_flash
    minicpm3 minimax minimax_m2 minimax_m3_vl_text ministral ministral3 mistral mixtral moshi nanochat nemotron
    nemotron_h olmo olmo2 olmo3 olmo_hybrid olmoe opt persimmon phi phi3 phimoe qwen2 qwen2_moe qwen3 qwen3_5
    qwen3_5_moe qwen3_5_moe_text qwen3_5_text qwen3_moe qwen3_next recurrent_gemma seed_oss smollm3 solar_open
    stablelm starcoder2 vaultgemma youtu zamba zamba2
"""

VERIFIED = frozenset(_NAMES.split())
