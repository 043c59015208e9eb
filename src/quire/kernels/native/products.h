// Products whose sums stay in registers: of float32, and of pairs of bfloat16 where the CPU has such products.
#pragma once

#include <algorithm>

#include "vectors.h"

struct Singles {  // a vector of B has W numbers of one row of it
    using Number = float;
    using Vector = vf;
    static constexpr int DEPTH = 1;
    INLINE vf add(vf sum, const float* a, vf b) { return sum + *a * b; }
};
#if defined(__AVX512BF16__)
struct Doubles {  // a vector of B has W pairs: the numbers of two rows of it
    using Number = uint16_t;
    using Vector = vu;
    static constexpr int DEPTH = 2;
    INLINE vf add(vf sum, const uint16_t* a, vu b) { return dot_pairs(sum, vu{} + load_as<uint32_t>(a), b); }
};
#endif

// C [M, N * W] = A [M, depth] * B [depth, N * W], or added to C times a factor per row. For each step of the depth, LINES of 64 bytes of
// what is read next are fetched, a row of B apart.
template <class P, int M, int N, bool ADD, int LINES>
void tile(const typename P::Number* a, int64_t lda, const typename P::Number* b, int64_t ldb, int depth, float* c, int64_t ldc, const float* factors, const uint8_t* next) {
    vf sum[M][N];
    UNROLL for (int i = 0; i < M; i++)
        UNROLL for (int j = 0; j < N; j++) sum[i][j] = ADD ? load(c + i * ldc + j * W) * factors[i] : vf{};
    for (int k = 0; k < depth; k += P::DEPTH) {
        UNROLL for (int line = 0; line < LINES; line++) __builtin_prefetch(next + (k / P::DEPTH * LINES + line) * 64, 0, 2);
        typename P::Vector right[N];
        UNROLL for (int j = 0; j < N; j++) right[j] = load_as<typename P::Vector>(b + k * ldb + j * W * P::DEPTH);
        UNROLL for (int i = 0; i < M; i++)
            UNROLL for (int j = 0; j < N; j++) sum[i][j] = P::add(sum[i][j], a + i * lda + k, right[j]);
    }
    UNROLL for (int i = 0; i < M; i++)
        UNROLL for (int j = 0; j < N; j++) store(c + i * ldc + j * W, sum[i][j]);
}
// The same for m rows, at most M.
template <class P, int M, int N, bool ADD, int LINES>
void rows(int m, const typename P::Number* a, int64_t lda, const typename P::Number* b, int64_t ldb, int depth, float* c, int64_t ldc, const float* factors, const uint8_t* next) {
    if constexpr (M > 1)
        if (m < M) return rows<P, M - 1, N, ADD, LINES>(m, a, lda, b, ldb, depth, c, ldc, factors, next);
    tile<P, M, N, ADD, LINES>(a, lda, b, ldb, depth, c, ldc, factors, next);
}
template <class P, bool ADD, int N = NV>
void product(int m, const typename P::Number* a, int64_t lda, const typename P::Number* b, int64_t ldb, int depth, int columns, float* c, int64_t ldc, const float* factors) {
    for (; columns >= N * W; columns -= N * W, b += N * W * P::DEPTH, c += N * W)
        for (int i = 0; i < m; i += MR) rows<P, MR, N, ADD, 0>(std::min(m - i, MR), a + i * lda, lda, b, ldb, depth, c + i * ldc, ldc, ADD ? factors + i : nullptr, nullptr);
    if constexpr (N > 1)
        if (columns) product<P, ADD, N - 1>(m, a, lda, b, ldb, depth, columns, c, ldc, factors);
}

// C [m, NV * W], whose rows are `ldc` apart, of a panel B [depth, NV * W], in tiles of up to M rows and N vectors. Passes over the last rows fetch the panel that follows: a
// pass that does not would leave memory idle.
template <class P, int M, int N> void many_rows(int m, const typename P::Number* a, int depth, const typename P::Number* b, float* c, int64_t ldc, bool are_last) {
    constexpr int wide = NV * W, parts = NV / N, lines = wide * P::DEPTH * sizeof(*b) / 64;
    const int tiles = (m + M - 1) / M, most = (m + tiles - 1) / tiles, share = (lines + parts * tiles - 1) / (parts * tiles);
    const auto next = (const uint8_t*)(b + int64_t(depth) * wide);
    for (int part = 0, line = are_last ? 0 : lines; part < parts; part++, b += N * W * P::DEPTH, c += N * W)
        for (int i = 0; i < m; i += most, line += share) {
            auto some = line >= lines ? rows<P, M, N, false, 0> : share > 1 ? rows<P, M, N, false, 2> : rows<P, M, N, false, 1>;
            some(std::min(most, m - i), a + i * int64_t(depth), depth, b, wide, depth, c + i * ldc, ldc, nullptr, next + line * (depth / P::DEPTH) * 64);
        }
}

struct Panels {  // weights as oneDNN packs them: a panel has `depth` inputs of `width` outputs, in bfloat16 by pairs of inputs
    const uint8_t *weights, *bias;  // bias: null, or [outputs] in the format of weights
    int64_t inputs, outputs, depth, width;
    int32_t format, rows_format;  // of weights, of rows and outputs
};

// `out` [count, outputs] of `rows` [count, inputs].
void multiply(const Panels& panels, const uint8_t* rows, uint8_t* out, int64_t count, int threads);
