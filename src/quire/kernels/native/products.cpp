// The products of rows with packed weights.
#include <vector>

#include "products.h"
#include "tiles.h"

namespace {

constexpr int64_t LARGEST = 64;  // outputs of a panel
constexpr int64_t BLOCK = 240;  // rows of a panel at once, whose sums stay in the cache: a multiple of those of tiles
constexpr int64_t SHARE = 36;  // rows below which they are not shared by threads: each reads the whole panel
constexpr int64_t SERIAL = 1 << 20;  // multiplications below which threads cost more than they save

INLINE void narrow(const float* from, int32_t format, int64_t count, uint8_t* to) {
    int64_t i = 0;
    if (format == F32) return (void)std::memcpy(to, from, 4 * count);
#if defined(__AVX512BF16__)
    for (; i + 2 * W <= count; i += 2 * W) {
        vu both = narrowed(load(from + i), load(from + i + W));
        std::memcpy(to + 2 * i, &both, sizeof both);
    }
#endif
    for (; i < count; i++) ((uint16_t*)to)[i] = to_bf16(from[i]);
}

// Outputs from `begin` on, of which `sums` [count, columns] lack biases. They may be the outputs.
void finish(const Panels& of, int64_t begin, int64_t columns, float* sums, int64_t row, int64_t count, uint8_t* out) {
    float bias[LARGEST];
    int64_t size = of.format == F32 ? 4 : 2, some = std::min(columns, of.outputs - begin);
    if (of.bias) decode(of.bias + begin * size, of.format, int(some), bias);
    for (int64_t i = 0; i < count; i++) {
        float* sum = sums + i * row;
        for (int64_t j = 0; of.bias && j < some; j++) sum[j] += bias[j];
        uint8_t* to = out + (i * of.outputs + begin) * (of.rows_format == F32 ? 4 : 2);
        if (to != (uint8_t*)sum) narrow(sum, of.rows_format, some, to);
    }
}

template <class P> void panel(const Panels& of, int64_t begin, const uint8_t* rows, int64_t count, float* sums, int64_t row, bool are_last) {
    int m = int(count), depth = int(of.inputs), width = int(of.width);
    auto left = (const typename P::Number*)rows, right = (const typename P::Number*)of.weights + begin * of.depth;
    if (width == NV * W && m > MR) return m <= 3 * MR ? many_rows<P, 2 * MR, NV / 2>(m, left, depth, right, sums, row, are_last) : many_rows<P, MR, NV>(m, left, depth, right, sums, row, are_last);
    product<P, false>(m, left, depth, right, width, depth, width, sums, row, nullptr);
}

void panel(const Panels& of, int64_t begin, const uint8_t* rows, int64_t count, float* sums, int64_t row, bool are_last) {
#if defined(__AVX512BF16__)
    if (of.format == BF16) return panel<Doubles>(of, begin, rows, count, sums, row, are_last);
#endif
    panel<Singles>(of, begin, rows, count, sums, row, are_last);
}

}  // namespace

void multiply(const Panels& of, const uint8_t* rows, uint8_t* out, int64_t count, int threads) {
    if (!count) return;  // no shape of tiles has no rows
    static thread_local std::vector<float> wide;
    const int64_t row_number = of.format == F32 ? 4 : 2;
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
            finish(of, begin, 2 * tiles::GROUP, sums, 2 * tiles::GROUP, some, out + first * row);
        });
    }
#endif
    const int64_t panels = (of.outputs + of.width - 1) / of.width, shares = threads > 1 ? (4 * threads + panels - 1) / panels : 1;
    const int64_t most = std::clamp((count + shares - 1) / shares, SHARE, BLOCK), number = of.rows_format == F32 ? 4 : 2;
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        static thread_local std::vector<float> sums;
        sums.resize(std::min(count, most) * of.width);
#pragma omp for collapse(2)
        for (int64_t begin = 0; begin < of.outputs; begin += of.width)
            for (int64_t first = 0; first < count; first += most) {
                const int64_t some = std::min(most, count - first);
                uint8_t* to = out + first * of.outputs * number;
                const bool in_place = of.rows_format == F32 && begin + of.width <= of.outputs;
                float* sum = in_place ? (float*)to + begin : sums.data();
                const int64_t row = in_place ? of.outputs : of.width;
                panel(of, begin, rows + first * of.inputs * row_number, some, sum, row, first + some == count);
                finish(of, begin, of.width, sum, row, some, to);
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

// Whether vectors fill a panel: then many rows are as fast as in any other layout.
extern "C" int quire_takes_many_rows(const Panels* of) { return of->width == NV * W && of->format == of->rows_format; }

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
