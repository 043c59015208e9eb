// Products of tiles of bfloat16, where the CPU has them (AMX) and the system lets this process use them.
#pragma once

#if defined(__AMX_BF16__)
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "products.h"

namespace tiles {

constexpr int64_t ROWS = 16, DEPTH = 32;  // rows of a tile, and its numbers of each
constexpr int64_t GROUP = 32;  // outputs of two tiles of weights, which lie side by side in a panel

inline bool are_allowed() {
    constexpr long request = 0x1023, tile_data = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    static const bool found = syscall(SYS_arch_prctl, request, tile_data) == 0;
    return found;
}

inline bool fit(const Panels& of) {
    bool pairs = of.format == BF16 && of.rows_format == BF16;
    return pairs && of.width % GROUP == 0 && of.inputs % DEPTH == 0 && of.depth % DEPTH == 0 && are_allowed();
}

struct Held {  // the tiles of a thread while it lives: 0 to 3 have sums, 4 and 5 have rows, 5 to 7 have weights
    explicit Held(int64_t rows) {
        struct alignas(64) {
            uint8_t palette = 1, start = 0, reserved[14] = {};
            uint16_t bytes[16] = {};
            uint8_t rows[16] = {};
        } shapes;
        for (int i = 0; i < 8; i++) shapes.bytes[i] = 64, shapes.rows[i] = uint8_t(i < 5 ? rows : ROWS);
        asm volatile("" ::: "memory");  // compilers do not see what the instructions of tiles read
        _tile_loadconfig(&shapes);
    }
    ~Held() { _tile_release(); }
};

// `sums` [16, 64] of up to 16 rows with two groups of outputs.
inline void some_rows(const uint8_t* rows, int64_t row, const uint8_t* first, const uint8_t* second, const Panels& of, float* sums) {
    int64_t pair = 4 * of.width, to = 4 * 2 * GROUP;  // bytes
    _tile_zero(0); _tile_zero(1); _tile_zero(2); _tile_zero(3);
    for (int64_t k = 0; k < of.inputs; k += DEPTH, rows += 2 * DEPTH, first += pair * DEPTH / 2, second += pair * DEPTH / 2) {
        _tile_loadd(4, rows, row);
        _tile_loadd(5, first, pair);
        _tile_dpbf16ps(0, 4, 5);
        _tile_loadd(6, first + 64, pair);
        _tile_dpbf16ps(1, 4, 6);
        _tile_loadd(7, second, pair);
        _tile_dpbf16ps(2, 4, 7);
        _tile_loadd(5, second + 64, pair);
        _tile_dpbf16ps(3, 4, 5);
    }
    _tile_stored(0, sums, to); _tile_stored(1, sums + 16, to); _tile_stored(2, sums + 32, to); _tile_stored(3, sums + 48, to);
}

// `sums` [32, 64], of which this are 32 columns, of 32 rows with one group of outputs.
inline void many_rows(const uint8_t* rows, int64_t row, const uint8_t* group, const Panels& of, float* sums) {
    int64_t pair = 4 * of.width, to = 4 * 2 * GROUP;
    float* below = sums + ROWS * 2 * GROUP;
    _tile_zero(0); _tile_zero(1); _tile_zero(2); _tile_zero(3);
    for (int64_t k = 0; k < of.inputs; k += DEPTH, rows += 2 * DEPTH, group += pair * DEPTH / 2) {
        _tile_loadd(6, group, pair);
        _tile_loadd(4, rows, row);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(5, rows + ROWS * row, row);
        _tile_dpbf16ps(1, 5, 6);
        _tile_loadd(7, group + 64, pair);
        _tile_dpbf16ps(2, 4, 7);
        _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, sums, to); _tile_stored(1, below, to); _tile_stored(2, sums + 16, to); _tile_stored(3, below + 16, to);
}

// C [m, columns] = A [m, depth] * B [depth / 2, columns] of pairs, or added to C. All are whole tiles, two by two; rows in bytes.
template <bool ADD> void product(int m, const float* a, int64_t lda, const float* b, int64_t ldb, int depth, int columns, float* c, int64_t ldc) {
    constexpr int SIDE = 2 * ROWS;
    for (int j = 0; j < columns; j += SIDE)
        for (int i = 0; i < m; i += SIDE) {
            const uint8_t *left = (const uint8_t*)a + i * lda, *right = (const uint8_t*)(b + j);
            uint8_t *to = (uint8_t*)(c + j) + i * ldc, *below = to + ROWS * ldc;
            if (ADD) {
                _tile_loadd(0, to, ldc); _tile_loadd(1, to + 64, ldc); _tile_loadd(2, below, ldc); _tile_loadd(3, below + 64, ldc);
            } else {
                _tile_zero(0); _tile_zero(1); _tile_zero(2); _tile_zero(3);
            }
            for (int k = 0; k < depth; k += DEPTH, left += 2 * DEPTH, right += ROWS * ldb) {
                _tile_loadd(4, left, lda);
                _tile_loadd(6, right, ldb);
                _tile_dpbf16ps(0, 4, 6);
                _tile_loadd(7, right + 64, ldb);
                _tile_dpbf16ps(1, 4, 7);
                _tile_loadd(5, left + ROWS * lda, lda);
                _tile_dpbf16ps(2, 5, 6);
                _tile_dpbf16ps(3, 5, 7);
            }
            _tile_stored(0, to, ldc); _tile_stored(1, to + 64, ldc); _tile_stored(2, below, ldc); _tile_stored(3, below + 64, ldc);
        }
}

// Outputs of `rows` [count, inputs]; `finish` gets sums [rows, 64], the first output and the first row of them.
template <class Finish> void multiply(const Panels& of, const uint8_t* rows, int64_t count, int threads, Finish finish) {
    constexpr int64_t BLOCK = 256;  // rows that stay in the cache while all weights pass
    int64_t groups = (of.outputs + GROUP - 1) / GROUP, row = 2 * of.inputs, shape = count < ROWS ? count : ROWS;
    auto weights = [&](int64_t group) {
        int64_t begin = group * GROUP, inside = begin % of.width;
        return of.weights + 2 * (begin - inside) * of.depth + 4 * inside;
    };
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        alignas(64) float sums[2 * ROWS * 2 * GROUP];
        Held held(shape);
        for (int64_t begin = 0; begin < count; begin += BLOCK) {
            const int64_t end = begin + BLOCK < count ? begin + BLOCK : count;
#pragma omp for schedule(static) nowait  // a thread has the same outputs of all rows
            for (int64_t group = 0; group < groups; group += 2) {
                const uint8_t *first = weights(group), *second = weights(group + 1 < groups ? group + 1 : group);
                for (int64_t done = begin; done < end;) {
                    bool many = count >= 2 * ROWS && end - done > ROWS;
                    int64_t some = many ? 2 * ROWS : shape, from = done < end - some ? done : end - some;
                    const uint8_t* left = rows + from * row;
                    if (many)  // rows at the end are computed twice: tiles have one shape
                        many_rows(left, row, first, of, sums), many_rows(left, row, second, of, sums + GROUP);
                    else
                        some_rows(left, row, first, second, of, sums);
                    finish(sums, group * GROUP, from, some);
                    done = from + some;
                }
            }
        }
    }
}

}  // namespace tiles
#endif
