// The products of a few rows with packed weights.
#include <algorithm>
#include <vector>

#include "products.h"

namespace {

constexpr int64_t SERIAL = 1 << 20;  // multiplications below which threads cost more than they save

INLINE void narrow(const float* from, int32_t format, int64_t count, uint8_t* to) {
    if (format == F32) std::memcpy(to, from, 4 * count);
    else
        for (int64_t i = 0; i < count; i++) ((uint16_t*)to)[i] = to_bf16(from[i]);
}

void panel(const Panels& of, int64_t at, const uint8_t* rows, uint8_t* out, int64_t count, float* sums, float* bias) {
    int64_t size = of.format == F32 ? 4 : 2, begin = at * of.width, width = of.width;
    int64_t columns = std::min(width, of.outputs - begin);
    const uint8_t* weights = of.weights + begin * of.depth * size;
#if defined(__AVX512BF16__)
    if (of.format == BF16)
        product<Doubles, false>(int(count), (const uint16_t*)rows, of.inputs, (const uint16_t*)weights, width, int(of.inputs), int(width), sums, width, nullptr);
#endif
    if (of.format == F32)
        product<Singles, false>(int(count), (const float*)rows, of.inputs, (const float*)weights, width, int(of.inputs), int(width), sums, width, nullptr);
    if (of.bias) decode(of.bias + begin * size, of.format, int(columns), bias);
    for (int64_t i = 0; i < count; i++) {
        float* sum = sums + i * width;
        for (int64_t j = 0; of.bias && j < columns; j++) sum[j] += bias[j];
        narrow(sum, of.rows_format, columns, out + (i * of.outputs + begin) * (of.rows_format == F32 ? 4 : 2));
    }
}

}  // namespace

void multiply(const Panels& of, const uint8_t* rows, uint8_t* out, int64_t count, int threads) {
    static thread_local std::vector<float> wide;
    if (of.format != of.rows_format) {
        wide.resize(count * of.inputs);
        decode(rows, of.rows_format, int(count * of.inputs), wide.data());
        rows = (const uint8_t*)wide.data();
    }
    if (count * of.inputs * of.outputs < SERIAL) threads = 1;
    int64_t panels = (of.outputs + of.width - 1) / of.width;
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        static thread_local std::vector<float> sums;
        sums.resize((count + 1) * of.width);
#pragma omp for
        for (int64_t at = 0; at < panels; at++) panel(of, at, rows, out, count, sums.data(), sums.data() + count * of.width);
    }
}

extern "C" int quire_can_multiply(const Panels* of) {
#if defined(__AVX512BF16__)
    bool pairs = of->format == BF16 && of->rows_format == BF16 && of->inputs % 2 == 0;
#else
    bool pairs = false;
#endif
    return of->width % W == 0 && (pairs || of->format == F32);
}

extern "C" void quire_multiply(const Panels* of, const uint8_t* rows, uint8_t* out, int64_t count, int threads) {
    multiply(*of, rows, out, count, threads);
}
