// Products of a few queries with keys and values where they lie: scores, and values times weights.
#pragma once

#include <algorithm>

#include "vectors.h"

// Vectors that are read soon, fetched beside products, a line at a time: many at once would wait for each other.
struct Ahead {
    const uint8_t* const* at;
    int64_t offset;
};

// Numbers widened to float32, a vector of them at a time.
template <class S> struct Widened {
    using Stored = S;
    using Query = float;
    static constexpr int NUMBERS = W;  // numbers of a vector of keys
    static constexpr int TOKENS = 1;  // of a sum, added at once
    using Vector = vf;
    INLINE vf key(const S* from) { return load(from); }
    INLINE vf query(const float* from) { return load(from); }
    INLINE vf add(vf sum, vf query, vf key) { return sum + query * key; }
    using Weights = float;
    INLINE vf weight(const float* from) { return splat(*from); }
    template <int N> INLINE void read(const S* const* values, int at, vf* to) {
        UNROLL for (int j = 0; j < N; j++) to[j] = load(values[0] + at + j * W);
    }
};

#if defined(__AVX512BF16__)
// Pairs of bfloat16, multiplied and added in one instruction. Weights are rounded to bfloat16.
struct Paired {
    using Stored = bf16;
    using Query = bf16;
    static constexpr int NUMBERS = 2 * W;
    static constexpr int TOKENS = 2;
    using Vector = vu;
    INLINE vu key(const bf16* from) { return load_as<vu>(from); }
    INLINE vu query(const bf16* from) { return load_as<vu>(from); }
    INLINE vf add(vf sum, vu query, vu key) { return dot_pairs(sum, query, key); }
    using Weights = bf16;
    INLINE vu weight(const bf16* from) { return vu{} + load_as<uint32_t>(from); }
    template <int N> INLINE void read(const bf16* const* values, int at, vu* to) {
        UNROLL for (int j = 0; j < N; j += 2) {
            vu first = load_as<vu>(values[0] + at + j * W), second = load_as<vu>(values[1] + at + j * W);
            to[j] = paired<0>(first, second), to[j + 1] = paired<1>(first, second);
        }
    }
};
#endif

// Scores of Q queries with T tokens, the last of `left` in place of those that are missing.
template <class P, int Q, int T, bool FETCH>
void dots(const typename P::Query* query, int64_t ldq, const uint8_t* const* keys, int64_t offset, int left, int dim, float* scores, int64_t lds, const Ahead& ahead) {
    using S = typename P::Stored;
    vf sum[Q * T] = {};
    const S* key[T];
    const S* soon[T];
    UNROLL for (int j = 0; j < T; j++) {
        int which = std::min(j, left - 1);
        key[j] = (const S*)(keys[which] + offset);
        if (FETCH) soon[j] = (const S*)(ahead.at[which] + ahead.offset);
    }
    for (int d = 0; d < dim; d += P::NUMBERS) {
        typename P::Vector right[T];
        UNROLL for (int j = 0; j < T; j++) {
            if (FETCH && d * sizeof(S) % 64 == 0) __builtin_prefetch(soon[j] + d, 0, 2);
            right[j] = P::key(key[j] + d);
        }
        UNROLL for (int i = 0; i < Q; i++) {
            typename P::Vector left = P::query(query + i * ldq + d);
            UNROLL for (int j = 0; j < T; j++) sum[i * T + j] = P::add(sum[i * T + j], left, right[j]);
        }
    }
    vf found = reduced<Sum, W>(sum);
    UNROLL for (int i = 0; i < Q; i++) std::memcpy(scores + i * lds, (float*)&found + i * T, 4 * T);
}

constexpr int STEP = W / 2;  // tokens whose keys are read together, of all heads

// Scores of m queries with STEP tokens.
template <class P>
void all_dots(int m, const float* queries, int64_t ldq, const uint8_t* const* keys, int64_t offset, int left, int dim, float* scores, int64_t lds, const Ahead& ahead) {
    auto query = (const typename P::Query*)queries;
    ldq *= sizeof(float) / sizeof(*query);
    int i = 0;
    for (; m - i > 2; i += 4)
        for (int t = 0; t < std::min(STEP, left); t += W / 4) {
            Ahead these{ahead.at + t, ahead.offset};
            auto some = i ? dots<P, 4, W / 4, false> : dots<P, 4, W / 4, true>;
            some(query + i * ldq, ldq, keys + t, offset, left - t, dim, scores + i * lds + t, lds, these);
        }
    for (; i < m; i += 2) {
        auto some = i ? dots<P, 2, W / 2, false> : dots<P, 2, W / 2, true>;
        some(query + i * ldq, ldq, keys, offset, left, dim, scores + i * lds, lds, ahead);
    }
}

// out [Q, N * W] = out * factors + weights * values.
template <class P, int Q, int N, bool FETCH>
void weigh(const typename P::Weights* weights, int64_t ldw, const uint8_t* const* values, int64_t offset, int at, int tokens, float* out, int64_t ldo, const float* factors, const Ahead& ahead) {
    using S = typename P::Stored;
    vf sum[Q][N];
    UNROLL for (int i = 0; i < Q; i++)
        UNROLL for (int j = 0; j < N; j++) sum[i][j] = load(out + i * ldo + j * W) * factors[i];
    for (int t = 0; t < tokens; t += P::TOKENS) {
        const S* value[P::TOKENS];
        UNROLL for (int j = 0; j < P::TOKENS; j++) {
            int which = j ? std::min(t + j, tokens - 1) : t;  // the weight of one too many is 0
            value[j] = (const S*)(values[which] + offset);
            if (FETCH) {
                auto soon = (const S*)(ahead.at[which] + ahead.offset) + at;
                UNROLL for (int k = 0; k < N; k++)
                    if (k * W * sizeof(S) % 64 == 0) __builtin_prefetch(soon + k * W, 0, 2);
            }
        }
        typename P::Vector right[N];
        P::template read<N>(value, at, right);
        UNROLL for (int i = 0; i < Q; i++) {
            typename P::Vector weight = P::weight(weights + i * ldw + t);
            UNROLL for (int j = 0; j < N; j++) sum[i][j] = P::add(sum[i][j], weight, right[j]);
        }
    }
    UNROLL for (int i = 0; i < Q; i++)
        UNROLL for (int j = 0; j < N; j++) store(out + i * ldo + j * W, sum[i][j]);
}
template <class P, int Q, bool FETCH, int N = NV>
void weigh_all(const typename P::Weights* weights, int64_t ldw, const uint8_t* const* values, int64_t offset, int at, int dim, int tokens, float* out, int64_t ldo, const float* factors, const Ahead& ahead) {
    for (; dim - at >= N * W; at += N * W) weigh<P, Q, N, FETCH>(weights, ldw, values, offset, at, tokens, out + at, ldo, factors, ahead);
    constexpr int less = N - P::NUMBERS / W;
    if constexpr (less > 0)
        if (at < dim) weigh_all<P, Q, FETCH, less>(weights, ldw, values, offset, at, dim, tokens, out, ldo, factors, ahead);
}
template <class P>
void all_weighed(int m, const float* given, int64_t ldw, const uint8_t* const* values, int64_t offset, int dim, int tokens, float* out, int64_t ldo, const float* factors, const Ahead& ahead) {
    auto weights = (const typename P::Weights*)given;
    ldw *= sizeof(float) / sizeof(*weights);
    int i = 0;
    for (; m - i > 2; i += 4) {
        auto some = i ? weigh_all<P, 4, false> : weigh_all<P, 4, true>;
        some(weights + i * ldw, ldw, values, offset, 0, dim, tokens, out + i * ldo, ldo, factors + i, ahead);
    }
    for (; i < m; i += 2) {
        auto some = i ? weigh_all<P, 2, false> : weigh_all<P, 2, true>;
        some(weights + i * ldw, ldw, values, offset, 0, dim, tokens, out + i * ldo, ldo, factors + i, ahead);
    }
}
