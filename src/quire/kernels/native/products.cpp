// The products of a few rows with packed weights.
#include <algorithm>
#include <vector>

#include "products.h"
#include "tiles.h"

namespace {

constexpr int64_t LARGEST = 64;  // outputs of a panel
constexpr int64_t SERIAL = 1 << 20;  // multiplications below which threads cost more than they save

INLINE void narrow(const float* from, int32_t format, int64_t count, uint8_t* to) {
    if (format == F32) std::memcpy(to, from, 4 * count);
    else
        for (int64_t i = 0; i < count; i++) ((uint16_t*)to)[i] = to_bf16(from[i]);
}

// Outputs from `begin` on, of which `sums` [count, columns] lack biases.
void finish(const Panels& of, int64_t begin, int64_t columns, float* sums, int64_t count, uint8_t* out) {
    float bias[LARGEST];
    int64_t size = of.format == F32 ? 4 : 2, some = std::min(columns, of.outputs - begin);
    if (of.bias) decode(of.bias + begin * size, of.format, int(some), bias);
    for (int64_t i = 0; i < count; i++) {
        float* sum = sums + i * columns;
        for (int64_t j = 0; of.bias && j < some; j++) sum[j] += bias[j];
        narrow(sum, of.rows_format, some, out + (i * of.outputs + begin) * (of.rows_format == F32 ? 4 : 2));
    }
}

template <class P> void panel(const Panels& of, int64_t begin, const uint8_t* rows, int64_t count, float* sums) {
    int m = int(count), depth = int(of.inputs), width = int(of.width);
    auto left = (const typename P::Number*)rows, right = (const typename P::Number*)of.weights + begin * of.depth;
    if (width == NV * W && m > MR) return m <= 3 * MR ? many_rows<P, 2 * MR, NV / 2>(m, left, depth, right, sums) : many_rows<P, MR, NV>(m, left, depth, right, sums);
    product<P, false>(m, left, depth, right, width, depth, width, sums, width, nullptr);
}

void panel(const Panels& of, int64_t begin, const uint8_t* rows, int64_t count, float* sums) {
#if defined(__AVX512BF16__)
    if (of.format == BF16) return panel<Doubles>(of, begin, rows, count, sums);
#endif
    panel<Singles>(of, begin, rows, count, sums);
}

}  // namespace

void multiply(const Panels& of, const uint8_t* rows, uint8_t* out, int64_t count, int threads) {
    if (!count) return;  // no shape of tiles has no rows
    static thread_local std::vector<float> wide;
    if (of.format != of.rows_format) {
        wide.resize(count * of.inputs);
        decode(rows, of.rows_format, int(count * of.inputs), wide.data());
        rows = (const uint8_t*)wide.data();
    }
    if (count * of.inputs * of.outputs < SERIAL) threads = 1;
#if defined(__AMX_BF16__)
    if (tiles::fit(of)) {
        int64_t row = of.outputs * 2;
        return tiles::multiply(of, rows, count, threads, [&](float* sums, int64_t begin, int64_t first, int64_t some) {
            finish(of, begin, 2 * tiles::GROUP, sums, some, out + first * row);
        });
    }
#endif
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        static thread_local std::vector<float> sums;
        sums.resize(count * of.width);
#pragma omp for
        for (int64_t begin = 0; begin < of.outputs; begin += of.width) {
            panel(of, begin, rows, count, sums.data());
            finish(of, begin, of.width, sums.data(), count, out);
        }
    }
}

extern "C" int quire_can_multiply(const Panels* of) {
#if defined(__AVX512BF16__)
    bool pairs = of->format == BF16 && of->rows_format == BF16 && of->inputs % 2 == 0;
#else
    bool pairs = false;
#endif
    return of->width % W == 0 && of->width <= LARGEST && (pairs || of->format == F32);
}

extern "C" int quire_uses_tiles(const Panels* of) {
#if defined(__AMX_BF16__)
    return tiles::fit(*of);
#else
    (void)of;
    return 0;
#endif
}

extern "C" void quire_multiply(const Panels* of, const uint8_t* rows, uint8_t* out, int64_t count, int threads) {
    multiply(*of, rows, out, count, threads);
}
