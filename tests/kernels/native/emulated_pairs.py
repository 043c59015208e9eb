"""Products of pairs of bfloat16 on CPUs without instructions for them: the sources with four functions replaced.

Each machine tests the path of a CPU with AVX512-BF16. Such a CPU tests the other path by `-march=haswell`.
"""

from __future__ import annotations

from collections.abc import Mapping

from quire.kernels.native.library import _cpu

HAS_PAIRS = any(" avx512_bf16" in line for line in _cpu())
_CONDITION = "#if defined(__AVX512BF16__)"
_FUNCTIONS = """
INLINE vf dot_pairs(vf sum, vu a, vu b) {
    return sum + widen(a) * widen(b) + as_float(a & 0xffff0000u) * as_float(b & 0xffff0000u);
}
INLINE vu narrowed(vf low, vf high) {
    uint16_t found[2 * W];
    for (int i = 0; i < W; i++) found[i] = to_bf16(low[i]), found[W + i] = to_bf16(high[i]);
    return load_as<vu>(found);
}
INLINE vf power_of_two(vf x) {
    vf found;
    for (int i = 0; i < W; i++) found[i] = std::exp2(x[i]);
    return found;
}
template <int HALF> INLINE vu paired(vu a, vu b) {
    typedef uint16_t vhh __attribute__((vector_size(W * 4)));
    vhh one = (vhh)a, two = (vhh)b, found;
    for (int i = 0; i < W; i++) found[2 * i] = one[HALF * W + i], found[2 * i + 1] = two[HALF * W + i];
    return (vu)found;
}
"""


def with_pairs(texts: Mapping[str, str]) -> dict[str, str]:
    """Sources whose kernel multiplies pairs of bfloat16 on this CPU."""
    if HAS_PAIRS:
        return dict(texts)
    found = {name: text.replace(_CONDITION, "#if 1") for name, text in texts.items()}
    before, functions, after = found["vectors.h"].partition("INLINE vf dot_pairs")
    _, end, rest = (functions + after).partition("#endif")
    assert functions and end, "the functions of pairs are not where they were"
    found["vectors.h"] = before + _FUNCTIONS + end + rest
    return found
