// Functions on rows of hidden states, with the roundings of transformers' modules. Float32 (kind 0) or bfloat16 (1).
#include <cmath>
#include <cstdint>
#include <cstring>

namespace {

constexpr long kParallel = 1 << 15;  // numbers from which several threads are worth their start

struct Bfloat {
    uint16_t bits;
};

inline float widen(float number) { return number; }
inline float widen(Bfloat number) {
    uint32_t bits = uint32_t(number.bits) << 16;
    float found;
    std::memcpy(&found, &bits, 4);
    return found;
}
template <class T> inline T narrow(float number);
template <> inline float narrow<float>(float number) { return number; }
template <> inline Bfloat narrow<Bfloat>(float number) {
    uint32_t bits;
    std::memcpy(&bits, &number, 4);
    uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    return {uint16_t(number == number ? rounded : 0x7fc0u)};
}
template <class T> inline float rounded(float number) { return widen(narrow<T>(number)); }

inline float exponential(float x) {  // to 2 units in the last place, on the range where sigmoid is not 0 or 1
    x = x < -87.0f ? -87.0f : x > 88.0f ? 88.0f : x;
    float n = std::nearbyint(x * 1.44269504088896f);
    float r = x - n * 0.693359375f - n * -2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    uint32_t bits = uint32_t(int32_t(n) + 127) << 23;
    float power;
    std::memcpy(&power, &bits, 4);
    return p * power;
}

template <class T> inline void normalise(const T* from, const T* weight, T* to, long width, float eps) {
    float squares = 0.0f;
#pragma omp simd reduction(+ : squares)
    for (long i = 0; i < width; i++) squares += widen(from[i]) * widen(from[i]);
    float scale = 1.0f / std::sqrt(squares / float(width) + eps);
#pragma omp simd
    for (long i = 0; i < width; i++) to[i] = narrow<T>(widen(weight[i]) * rounded<T>(widen(from[i]) * scale));
}

template <class T>
void add_rms_norm(const T* rows, const T* added, const T* weight, T* sums, T* out, long count, long width, float eps) {
#pragma omp parallel for if (count * width > kParallel)
    for (long row = 0; row < count; row++) {
        const T* from = rows + row * width;
        if (added) {
            const T* other = added + row * width;
            T* sum = sums + row * width;
#pragma omp simd
            for (long i = 0; i < width; i++) sum[i] = narrow<T>(widen(from[i]) + widen(other[i]));
            from = sum;
        }
        normalise(from, weight, out + row * width, width, eps);
    }
}

template <class T>
void rotate(T* rows, const T* cosines, const T* sines, const T* first_norm, const T* second_norm, long count,
            long stride, long first, long heads, long width, float eps) {
    long half = width / 2;
#pragma omp parallel for if (count * heads * width > kParallel)
    for (long row = 0; row < count; row++) {
        const T *cos = cosines + row * width, *sin = sines + row * width;
        for (long head = 0; head < heads; head++) {
            T* at = rows + row * stride + head * width;
            const T* norm = head < first ? first_norm : second_norm;
            if (norm) normalise(at, norm, at, width, eps);
#pragma omp simd
            for (long i = 0; i < half; i++) {
                float low = widen(at[i]), high = widen(at[i + half]);
                float turned = rounded<T>(low * widen(cos[i])) + rounded<T>(-high * widen(sin[i]));
                float other = rounded<T>(high * widen(cos[i + half])) + rounded<T>(low * widen(sin[i + half]));
                at[i] = narrow<T>(turned);
                at[i + half] = narrow<T>(other);
            }
        }
    }
}

template <class T> void gated_silu(const T* pairs, T* out, long count, long width) {
#pragma omp parallel for if (count * width > kParallel)
    for (long row = 0; row < count; row++) {
        const T *gate = pairs + row * 2 * width, *up = gate + width;
        T* to = out + row * width;
#pragma omp simd
        for (long i = 0; i < width; i++) {
            float x = widen(gate[i]);
            to[i] = narrow<T>(rounded<T>(x / (1.0f + exponential(-x))) * widen(up[i]));
        }
    }
}

}  // namespace

extern "C" {

void quire_add_rms_norm(int kind, const void* rows, const void* added, const void* weight, void* sums, void* out,
                        long count, long width, float eps) {
    if (kind == 0)
        add_rms_norm((const float*)rows, (const float*)added, (const float*)weight, (float*)sums, (float*)out, count,
                     width, eps);
    else
        add_rms_norm((const Bfloat*)rows, (const Bfloat*)added, (const Bfloat*)weight, (Bfloat*)sums, (Bfloat*)out,
                     count, width, eps);
}

void quire_rotate(int kind, void* rows, const void* cosines, const void* sines, const void* first_norm,
                  const void* second_norm, long count, long stride, long first, long heads, long width, float eps) {
    if (kind == 0)
        rotate((float*)rows, (const float*)cosines, (const float*)sines, (const float*)first_norm,
               (const float*)second_norm, count, stride, first, heads, width, eps);
    else
        rotate((Bfloat*)rows, (const Bfloat*)cosines, (const Bfloat*)sines, (const Bfloat*)first_norm,
               (const Bfloat*)second_norm, count, stride, first, heads, width, eps);
}

void quire_gated_silu(int kind, const void* pairs, void* out, long count, long width) {
    if (kind == 0)
        gated_silu((const float*)pairs, (float*)out, count, width);
    else
        gated_silu((const Bfloat*)pairs, (Bfloat*)out, count, width);
}
}
