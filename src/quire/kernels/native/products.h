// Products whose sums stay in registers: of float32, and of pairs of bfloat16 where the CPU has such products.
#pragma once

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

// C [m, columns] = A [m, depth] * B [depth, columns], or added to C times a factor per row.
template <class P, int M, int N, bool ADD>
void tile(const typename P::Number* a, int64_t lda, const typename P::Number* b, int64_t ldb, int depth, float* c, int64_t ldc, const float* factors) {
    vf sum[M][N];
    UNROLL for (int i = 0; i < M; i++)
        UNROLL for (int j = 0; j < N; j++) sum[i][j] = ADD ? load(c + i * ldc + j * W) * factors[i] : vf{};
    for (int k = 0; k < depth; k += P::DEPTH) {
        typename P::Vector right[N];
        UNROLL for (int j = 0; j < N; j++) right[j] = load_as<typename P::Vector>(b + k * ldb + j * W * P::DEPTH);
        UNROLL for (int i = 0; i < M; i++)
            UNROLL for (int j = 0; j < N; j++) sum[i][j] = P::add(sum[i][j], a + i * lda + k, right[j]);
    }
    UNROLL for (int i = 0; i < M; i++)
        UNROLL for (int j = 0; j < N; j++) store(c + i * ldc + j * W, sum[i][j]);
}
template <class P, bool ADD, int N = NV>
void product(int m, const typename P::Number* a, int64_t lda, const typename P::Number* b, int64_t ldb, int depth, int columns, float* c, int64_t ldc, const float* factors) {
    for (; columns >= N * W; columns -= N * W, b += N * W * P::DEPTH, c += N * W)
        for (int i = 0; i < m; i += MR) {
            const typename P::Number* left = a + i * lda;
            const float* by = ADD ? factors + i : nullptr;
            float* to = c + i * ldc;
            switch (m - i) {
            case 1: tile<P, 1, N, ADD>(left, lda, b, ldb, depth, to, ldc, by); break;
            case 2: tile<P, 2, N, ADD>(left, lda, b, ldb, depth, to, ldc, by); break;
            case 3: tile<P, 3, N, ADD>(left, lda, b, ldb, depth, to, ldc, by); break;
            case 4: tile<P, 4, N, ADD>(left, lda, b, ldb, depth, to, ldc, by); break;
            case 5: tile<P, 5, N, ADD>(left, lda, b, ldb, depth, to, ldc, by); break;
            default: tile<P, MR, N, ADD>(left, lda, b, ldb, depth, to, ldc, by);
            }
        }
    if constexpr (N > 1)
        if (columns) product<P, ADD, N - 1>(m, a, lda, b, ldb, depth, columns, c, ldc, factors);
}

struct Panels {  // weights as oneDNN packs them: a panel has `depth` inputs of `width` outputs, in bfloat16 by pairs of inputs
    const uint8_t *weights, *bias;  // bias: null, or [outputs] in the format of weights
    int64_t inputs, outputs, depth, width;
    int32_t format, rows_format;  // of weights, of rows and outputs
};

// `out` [count, outputs] of `rows` [count, inputs].
void multiply(const Panels& panels, const uint8_t* rows, uint8_t* out, int64_t count, int threads);
