"""Where the field had such bugs: reports, by class, of the engines and libraries that shipped them."""

from __future__ import annotations

from typing import Final

PINS: Final = "pins that do not match: SGLang #24153, #27147, #29291; mllm #656"
FREED_EARLY: Final = "memory reused while a step still uses it: vLLM #45357, #45704, #52360; SGLang #20611, #26380"
AHEAD: Final = "what is launched taken for what has settled: vllm-ascend #13501; vLLM #45357"
OFF_BY_ONE: Final = "off by a token or a page: SGLang #34870, #31616, #27789; transformers #47708"
LEAK: Final = "a leak on a side path: SGLang #16067, #9927, #10871"
TWICE: Final = "freed or counted twice: SGLang #13483, #6888, #22470"
EVICTED: Final = "read after it was evicted: SGLang #31427, #26728, #31668; TensorRT-LLM #13124"
STALE: Final = "a stale mapping: SGLang #18803, #23963, #26380; vLLM #54359"
PARTIAL: Final = "half an object is taken for a whole: SGLang #36121, #38161, #31108; LMCache #4991"
KEY: Final = "a key that does not cover what bytes depend on: SGLang #33268, #26747; LMCache #3301; vLLM #51899"
STUCK: Final = "stuck although there is room: vLLM #45388; vllm-ascend #16315; SGLang #37610, #39271"
ESTIMATE: Final = "an estimate that differs from the allocator: vLLM #40691, #52495; SGLang #30371"
DEAD: Final = "a feature that does nothing: SGLang #18843, #12092"
VIEW: Final = "a view where a copy was needed: SGLang #21624, #20271"
EVENTS: Final = "events that drift from what is cached: vLLM #55092; LMCache #5076"
DAMAGED: Final = "damage that no check looks for: LMCache #4385; TensorRT-LLM #8813, #8274; SGLang #32176"
SHORT: Final = "a row or a digest that ends too early: SGLang #38161, #36121"
VISIBLE: Final = "a failed store that is found: LMCache #4991"
DRAFTS: Final = "drafts that are not verified, or too late: lattice #243; openvino.genai #4190"
PADDING: Final = "padding that is not nothing: vLLM #57156, #57158"
