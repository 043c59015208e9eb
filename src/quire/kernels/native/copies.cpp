// Rows of bytes to other places, each in one piece: what numpy does in a call for each run of neighbours.
#include <cstdint>
#include <cstring>
#if defined(__AVX__)
#include <immintrin.h>
#endif

namespace {

constexpr int64_t AHEAD = 1024;  // bytes of the next row that are asked for while one is copied
constexpr int64_t LARGE = 4 << 20;  // bytes of a call that would push out of the cache what steps read

constexpr int64_t LINE = 64;
#if defined(__AVX__)
constexpr bool STREAMS = true;

// Past the cache: a line is written whole, and not read before. `to` is the start of a line.
void stream(uint8_t* to, const uint8_t* from, int64_t num_bytes) {
    int64_t at = 0;
    for (; at + LINE <= num_bytes; at += LINE) {
        const __m256i first = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + at));
        const __m256i second = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + at + 32));
        _mm256_stream_si256(reinterpret_cast<__m256i*>(to + at), first);
        _mm256_stream_si256(reinterpret_cast<__m256i*>(to + at + 32), second);
    }
    std::memcpy(to + at, from + at, num_bytes - at);
}
void fence() { _mm_sfence(); }
#else
constexpr bool STREAMS = false;
void stream(uint8_t* to, const uint8_t* from, int64_t num_bytes) { std::memcpy(to, from, num_bytes); }
void fence() {}
#endif

}  // namespace

extern "C" void quire_copy_rows(const uint8_t* source, int64_t source_stride, uint8_t* target, int64_t target_stride,
                                int64_t num_bytes, int64_t count, const int32_t* sources, const int32_t* targets) {
    const bool streams = STREAMS && num_bytes * count >= LARGE && reinterpret_cast<uintptr_t>(target) % LINE == 0 &&
                         target_stride % LINE == 0;
    for (int64_t i = 0; i < count; i++) {
        uint8_t* to = target + targets[i] * target_stride;
        const uint8_t* from = source + sources[i] * source_stride;
        const uint8_t* next = source + sources[i + 1 < count ? i + 1 : i] * source_stride;
        for (int64_t at = 0; at < AHEAD && at < num_bytes; at += LINE) __builtin_prefetch(next + at);
        if (streams)
            stream(to, from, num_bytes);
        else
            std::memcpy(to, from, num_bytes);
    }
    if (streams) fence();
}
