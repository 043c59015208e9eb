// Vectors of the width that this CPU has, by the vector extensions of GCC and Clang: what loads, decodes and reduces.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <utility>
#if defined(__AVX512BF16__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
constexpr int W = 16;  // floats in a vector
constexpr int NV = 4;  // vectors of a row of a tile of a product, which has MR rows: all in registers
#elif defined(__AVX2__)
constexpr int W = 8;
constexpr int NV = 2;
#elif defined(__aarch64__)
constexpr int W = 4;
constexpr int NV = 4;
#else
constexpr int W = 4;
constexpr int NV = 2;
#endif
constexpr int MR = 6;
constexpr float LOG2_E = 1.44269504f;

typedef float vf __attribute__((vector_size(W * 4)));
typedef int32_t vi __attribute__((vector_size(W * 4)));
typedef uint32_t vu __attribute__((vector_size(W * 4)));
typedef uint16_t vh __attribute__((vector_size(W * 2)));
typedef uint8_t vb __attribute__((vector_size(W)));

#define UNROLL _Pragma("GCC unroll 16")
#define INLINE static inline __attribute__((always_inline))

template <class V> INLINE V load_as(const void* from) {
    V found;
    std::memcpy(&found, from, sizeof found);
    return found;
}
INLINE vf load(const float* from) { return load_as<vf>(from); }
template <int N> INLINE vf load_some(const float* from) {
    vf found = {};
    UNROLL for (int i = 0; i < N; i++) found[i] = from[i];  // a narrow store that is read as a vector would wait
    return found;
}
INLINE void store(float* to, vf what) { std::memcpy(to, &what, sizeof what); }
INLINE vf splat(float x) { return vf{} + x; }
INLINE vf as_float(vu bits) { return (vf)bits; }
INLINE vf choose(vi which, vf yes, vf no) { return which ? yes : no; }
INLINE vf larger(vf a, vf b) { return choose(a > b, a, b); }  // b where one of them is NaN
INLINE vf smaller(vf a, vf b) { return choose(a < b, a, b); }

// -- numbers as they are stored

enum Format : int32_t { F32, BF16, F16, E4M3, E5M2, E2M1 };
enum Scale : int32_t { NONE, FLOAT, E8M0, SCALE_E4M3 };

struct bf16 { uint16_t bits; };
struct f16 { uint16_t bits; };

INLINE vf widen(vu bits) {  // of bfloat16
    return as_float(bits << 16);
}
INLINE vf small_float(vu magnitude, vu sign, float factor, vi special) {
    // A subnormal float32 has the right mantissa; a power of two corrects the exponent.
    vf found = choose(special, as_float(magnitude | 0x7f800000u), as_float(magnitude) * factor);
    return as_float((vu)found | sign);
}
INLINE vf from_f16(vu bits) {
    return small_float((bits & 0x7fffu) << 13, (bits & 0x8000u) << 16, 0x1p112f, (vi)((bits & 0x7c00u) == 0x7c00u));
}
INLINE vf from_e5m2(vu bits) {
    return small_float((bits & 0x7fu) << 21, (bits & 0x80u) << 24, 0x1p112f, (vi)((bits & 0x7cu) == 0x7cu));
}
INLINE vf from_e4m3(vu bits) {
    return small_float((bits & 0x7fu) << 20, (bits & 0x80u) << 24, 0x1p120f, (vi)((bits & 0x7fu) == 0x7fu));
}
INLINE vf from_e2m1(vu codes) {
    return small_float((codes & 7u) << 22, (codes & 8u) << 28, 0x1p126f, vi{});
}

INLINE vf load(const bf16* from) { return widen(__builtin_convertvector(load_as<vh>(from), vu)); }
INLINE vf load(const f16* from) { return from_f16(__builtin_convertvector(load_as<vh>(from), vu)); }

INLINE float narrow_scalar(vf (*decode)(vu), uint32_t bits) { return decode(vu{} + bits)[0]; }

INLINE float scale_at(const uint8_t* scales, int32_t kind, int at) {
    if (kind == FLOAT) {
        float found;
        std::memcpy(&found, scales + 4 * at, 4);
        return found;
    }
    if (kind == SCALE_E4M3) return narrow_scalar(from_e4m3, scales[at]);
    uint32_t bits = scales[at] == 255 ? 0x7fc00000u : scales[at] == 0 ? 0x00400000u : uint32_t(scales[at]) << 23;
    float found;
    std::memcpy(&found, &bits, 4);
    return found;
}

template <class Store, vf (*Decode)(vu), class Bits>
INLINE void decode_plain(const void* from, int width, float* to) {
    const Store* in = (const Store*)from;
    int at = 0;
    for (; at + W <= width; at += W) store(to + at, Decode(__builtin_convertvector(load_as<Bits>(in + at), vu)));
    for (; at < width; at++) to[at] = narrow_scalar(Decode, in[at]);
}

// `width` numbers of a row as float32.
INLINE void decode(const uint8_t* from, int32_t format, int width, float* to) {
    switch (format) {
    case F32: std::memcpy(to, from, 4 * width); return;
    case BF16: return decode_plain<uint16_t, widen, vh>(from, width, to);
    case F16: return decode_plain<uint16_t, from_f16, vh>(from, width, to);
    case E4M3: return decode_plain<uint8_t, from_e4m3, vb>(from, width, to);
    case E5M2: return decode_plain<uint8_t, from_e5m2, vb>(from, width, to);
    default:
        for (int at = 0; at < width; at += 2 * W) {  // a vector of bytes, or what is left of them
            uint8_t bytes[W] = {0};
            int left = width - at < 2 * W ? width - at : 2 * W;
            std::memcpy(bytes, from + at / 2, left / 2);
            vu pairs = __builtin_convertvector(load_as<vb>(bytes), vu);
            vf low = from_e2m1(pairs & 15u), high = from_e2m1(pairs >> 4);
            for (int i = 0; 2 * i < left; i++) to[at + 2 * i] = low[i], to[at + 2 * i + 1] = high[i];
        }
    }
}

INLINE uint16_t to_bf16(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    if (x != x) return 0x7fc0;
    return uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}
INLINE uint16_t to_f16(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    uint32_t sign = (bits >> 16) & 0x8000u, size = bits & 0x7fffffffu;
    if (size > 0x7f800000u) return uint16_t(sign | 0x7e00u);
    if (size >= 0x477ff000u) return uint16_t(sign | 0x7c00u);  // rounds beyond the largest
    float wide;
    if (size < 0x38800000u) {  // subnormal: adding a power of two rounds at the right place
        std::memcpy(&wide, &size, 4);
        wide += 0.5f;
        uint32_t rounded;
        std::memcpy(&rounded, &wide, 4);
        return uint16_t(sign | (rounded - 0x3f000000u));
    }
    size += 0xc8000fffu + ((size >> 13) & 1);
    return uint16_t(sign | (size >> 13));
}

// -- functions of vectors

#if defined(__AVX512BF16__)
INLINE vf dot_pairs(vf sum, vu a, vu b) {  // each lane of `a` and `b` is a pair of bfloat16
    return (vf)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
}
INLINE vu narrowed(vf low, vf high) { return (vu)_mm512_cvtne2ps_pbh((__m512)high, (__m512)low); }
// To 13 bits, for what is rounded to bfloat16.
INLINE vf power_of_two(vf x) {
    vf rest = (vf)_mm512_reduce_ps((__m512)x, 0x09);  // above the next lower whole number
    vf found = ((rest * 7.802452e-2f + 2.2606716e-1f) * rest + 6.9583354e-1f) * rest + 9.9992522e-1f;
    return (vf)_mm512_scalef_ps((__m512)found, (__m512)x);
}
template <int HALF> INLINE vu paired(vu a, vu b) {  // numbers of one half of two rows, in turns
    typedef uint16_t vhh __attribute__((vector_size(W * 4)));
    vhh order;
    for (int i = 0; i < 2 * W; i++) order[i] = uint16_t(i % 2 * 2 * W + HALF * W + i / 2);
    return (vu)_mm512_permutex2var_epi16((__m512i)a, (__m512i)order, (__m512i)b);
}
#endif

INLINE vf exp_of(vf x) {
    vf bounded = smaller(splat(88.0f), larger(splat(-87.3f), x));
    vf shifted = bounded * LOG2_E + 0x1.8p23f;
    vf whole = shifted - 0x1.8p23f;
    vf rest = bounded - whole * 0.693359375f + whole * 2.12194440e-4f;
    vf found = splat(1.9875691500e-4f);
    for (float next : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f})
        found = found * rest + next;
    found = found * rest * rest + rest + 1.0f;
    vu power = ((vu)shifted + 127u) << 23;
    return choose(x < -87.3f, vf{}, found * as_float(power));
}
INLINE vf tanh_of(vf x) { return 1.0f - 2.0f / (exp_of(x + x) + 1.0f); }

// Reductions of several vectors at once. `Join` is commutative.
struct Sum {
    INLINE vf join(vf a, vf b) { return a + b; }
};
struct Largest {
    INLINE vf join(vf a, vf b) { return larger(a, b); }
};
template <class Join, int L, int... I> INLINE vf merged(vf a, vf b, std::integer_sequence<int, I...>) {
    // Lanes are segments of L; each becomes the join of its halves, those of `a` and `b` in turn.
    constexpr int H = L / 2;
    vf kept = __builtin_shufflevector(a, b, (I / H % 2 * W + I)...);  // no lane moves
    vf moved = __builtin_shufflevector(a, b, (I / H % 2 * (W - H) + I + (I / H % 2 ? 0 : H))...);
    return Join::join(kept, moved);
}
template <int DISTANCE, int... I> INLINE vf turned(vf a, std::integer_sequence<int, I...>) {
    return __builtin_shufflevector(a, a, ((I + DISTANCE) % W)...);
}
template <class Join, int L, int DISTANCE = W / 2> INLINE vf folded(vf v) {  // of W / L segments
    if constexpr (DISTANCE < L) return v;
    else return folded<Join, L, DISTANCE / 2>(Join::join(v, turned<DISTANCE>(v, std::make_integer_sequence<int, W>{})));
}
template <class Join, int R, int L = R> INLINE vf reduced(vf* v) {  // lane i is the reduction of vector i of R
    if constexpr (L == 1) {
        return folded<Join, R>(v[0]);
    } else {
        UNROLL for (int i = 0; i < L / 2; i++) v[i] = merged<Join, L>(v[i], v[i + L / 2], std::make_integer_sequence<int, W>{});
        return reduced<Join, R, L / 2>(v);
    }
}
template <int HALF, int... I> INLINE vf zipped(vf a, vf b, std::integer_sequence<int, I...>) {
    return __builtin_shufflevector(a, b, (I % 2 * W + I / 2 + HALF * (W / 2))...);
}
// Columns for rows, of W by W numbers. Each round brings the halves of the rows together.
INLINE void transpose(const float* from, int64_t from_row, float* to, int64_t to_row) {
    constexpr auto lanes = std::make_integer_sequence<int, W>{};
    vf rows[W], next[W];
    UNROLL for (int i = 0; i < W; i++) rows[i] = load(from + i * from_row);
    UNROLL for (int round = 1; round < W; round *= 2) {
        UNROLL for (int i = 0; i < W / 2; i++) {
            next[2 * i] = zipped<0>(rows[i], rows[i + W / 2], lanes);
            next[2 * i + 1] = zipped<1>(rows[i], rows[i + W / 2], lanes);
        }
        UNROLL for (int i = 0; i < W; i++) rows[i] = next[i];
    }
    UNROLL for (int i = 0; i < W; i++) store(to + i * to_row, rows[i]);
}
