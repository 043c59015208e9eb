"""Products of tiles on CPUs without AMX: the sources with its instructions replaced."""

from __future__ import annotations

from collections.abc import Mapping

from quire.kernels.native.library import _cpu

HAS_TILES = any(" amx_bf16" in line for line in _cpu())
_CONDITION = "#if defined(__AMX_BF16__)"
_REQUEST = "syscall(SYS_arch_prctl, request, tile_data) == 0"
_INCLUDES = "#include <immintrin.h>\n#include <sys/syscall.h>\n#include <unistd.h>\n"
_INSTRUCTIONS = """
#include <cstdint>
#include <cstring>
static thread_local uint8_t kept[8][16][64], tile_rows[8];
inline void emulated_loadconfig(const void* shapes) {
    std::memcpy(tile_rows, (const uint8_t*)shapes + 48, 8);
    std::memset(kept, 0, sizeof kept);
}
inline void emulated_release() {}
inline void emulated_zero(int to) { std::memset(kept[to], 0, 1024); }
inline void emulated_loadd(int to, const void* from, int64_t row) {
    for (int i = 0; i < tile_rows[to]; i++) std::memcpy(kept[to][i], (const uint8_t*)from + i * row, 64);
}
inline void emulated_stored(int from, void* to, int64_t row) {
    for (int i = 0; i < tile_rows[from]; i++) std::memcpy((uint8_t*)to + i * row, kept[from][i], 64);
}
inline float tile_number(const uint8_t* from) {
    uint32_t bits = uint32_t(from[0]) << 16 | uint32_t(from[1]) << 24;
    float found;
    std::memcpy(&found, &bits, 4);
    return found;
}
inline void emulated_dpbf16ps(int sums, int rows, int weights) {
    for (int i = 0; i < tile_rows[sums]; i++)
        for (int j = 0; j < 16; j++) {
            float two[2] = {0, 0}, sum;
            for (int k = 0; k < 32; k++) {
                const uint8_t* weight = kept[weights][k / 2] + 4 * j + k % 2 * 2;
                two[k % 2] += tile_number(kept[rows][i] + 2 * k) * tile_number(weight);
            }
            std::memcpy(&sum, kept[sums][i] + 4 * j, 4);
            sum += two[0] + two[1];
            std::memcpy(kept[sums][i] + 4 * j, &sum, 4);
        }
}
"""


def with_tiles(texts: Mapping[str, str]) -> dict[str, str]:
    """Sources, of which some may be missing, whose products of pairs are those of tiles on this CPU."""
    if HAS_TILES:
        return dict(texts)
    own = texts["tiles.h"]
    assert _INCLUDES in own and _REQUEST in own, "the instructions of tiles are not where they were"
    own = own.replace(_INCLUDES, _INSTRUCTIONS).replace(_REQUEST, "request && tile_data").replace("_tile_", "emulated_")
    return {name: text.replace(_CONDITION, "#if 1") for name, text in {**texts, "tiles.h": own}.items()}
