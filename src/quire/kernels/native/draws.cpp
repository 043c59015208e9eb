// Draws of a step in one call: what `Sampler` computes by operators. A row is read a few times, and nothing as large is written.
#include <algorithm>
#include <cmath>
#include <functional>
#include <vector>

#include "vectors.h"

struct Draws {
    const float* logits;  // [rows, width]
    int64_t rows, width;
    const uint8_t* terms;  // a record for each row, of `record` bytes, whose fields begin at the next numbers
    int64_t record, greedy, temperature, top_k, top_p, min_p;
    const uint64_t* keys;  // of the noise of rows that are not greedy
    int64_t* tokens;
    int64_t threads;

    template <class T> T term(int64_t row, int64_t field) const {
        T found;
        std::memcpy(&found, terms + row * record + field, sizeof found);
        return found;
    }
};

namespace {

constexpr int64_t SERIAL = 1 << 15;  // numbers below which threads cost more than they save
constexpr int BLOCK = 4 * W;
constexpr float NOTHING = -INFINITY, UNIT = 0x1p-31f * (1 - 0x1p-24f);

typedef double vd __attribute__((vector_size(W * 4)));
typedef int64_t vl __attribute__((vector_size(W * 4)));
typedef float half __attribute__((vector_size(W * 2)));

bool any(vi lanes) {
    uint64_t parts[W / 2], all = 0;
    std::memcpy(parts, &lanes, sizeof parts);
    for (uint64_t part : parts) all |= part;
    return all;
}

vd wide(const float* from) { return __builtin_convertvector(load_as<half>(from), vd); }

// To a few units in the last place for x from -700 to 0, and 0 below.
vd exp_of(vd x) {
    vd shifted = x * 0x1.71547652b82fep0 + 0x1.8p52, whole = shifted - 0x1.8p52;
    vd rest = x - whole * 0x1.62e42fefa38p-1 - whole * 0x1.ef35793c7673p-45, found = {};
    for (double divisor : {479001600., 39916800., 3628800., 362880., 40320., 5040., 720., 120., 24., 6., 2., 1., 1.}) found = found * rest + 1 / divisor;
    vd power = (vd)(((vl)shifted + 1023) << 52);
    return x < -700 ? vd{} : found * power;
}
double sum_of(vd lanes) {
    double found = 0;
    for (int i = 0; i < W / 2; i++) found += lanes[i];
    return found;
}

// Minus a token's noise: the logarithm of an exponential number, hashed from the key and the token as by `_hash`.
template <class V> V bits_of(V token, uint64_t key) {
    V state = token * 0x9E3779B9u + uint32_t(key);
    state ^= state >> 16;
    state *= 0x7FEB352Du;
    state ^= uint32_t(key >> 32);
    state ^= state >> 15;
    state *= 0x846CA68Bu;
    state ^= state >> 16;
    return state & 0x7FFFFFFFu;
}
float noise(uint64_t key, int64_t token) { return std::log(-std::log1p(-(float(bits_of(uint32_t(token), key)) + 0.5f) * UNIT)); }

class Row {
  public:
    Row(const Draws& of, int64_t at, const uint64_t* key)  // null: the likeliest token
        : of(of), at(at), key(key), logits(of.logits + at * of.width), scale(key ? float(1 / of.term<double>(at, of.temperature)) : 1) {}

    int64_t draw() {
        vf highest = splat(NOTHING);
        vi unordered = {};
        for (int64_t i = 0; i < of.width; i += W) {
            vf x = scores(i);
            highest = larger(x, highest), unordered |= x != x;
        }
        for (int i = 0; i < W; i++) top = std::max(top, highest[i]);
        if (any(unordered)) return first([](vf x) { return x != x; });
        if (!key || std::isinf(top)) return first([&](vf x) { return x == top; });
        return best(least());
    }

  private:
    const Draws& of;
    int64_t at;
    const uint64_t* key;
    const float* logits;
    float scale, top = NOTHING;
    static thread_local std::vector<float> likely;  // scores of a bin

    vf scores(int64_t i) const {
        if (i + W <= of.width) return load(logits + i) * scale;
        vf found = splat(NOTHING);
        for (int64_t j = i; j < of.width; j++) found[j - i] = logits[j] * scale;
        return found;
    }

    template <class Is> int64_t first(Is is) const {
        for (int64_t i = 0; i < of.width; i += W) {
            vi found = is(scores(i));
            for (int j = 0; any(found) && j < std::min<int64_t>(W, of.width - i); j++)
                if (found[j]) return i + j;
        }
        return 0;
    }

    double weight(float score) const { return std::exp(double(score) - top); }

    double mass(const float* from, int64_t count) const {
        vd sum = {};
        float some[W / 2];
        for (int64_t i = 0; i < count; i += W / 2) {
            const bool all = i + W / 2 <= count;
            if (!all) std::copy(from + i, from + count, std::fill_n(some, W / 2, NOTHING) - W / 2);
            sum += exp_of(wide(all ? from + i : some) - top);
        }
        return sum_of(sum);
    }

    // The lowest score that passes the filters.
    float least() {
        float found = NOTHING;
        const int64_t limit = of.term<int64_t>(at, of.top_k), k = limit > 0 ? std::min(limit, of.width) : of.width;
        const double p = of.term<double>(at, of.top_p), share = of.term<double>(at, of.min_p);
        if (k < of.width || p < 1) found = prefix_end(k, p);
        if (share > 0) found = std::max(found, above(share));
        return std::min(found, top);
    }

    // The lowest score whose weight may be `share`.
    float above(double share) const {
        const double low = top + std::log(share);
        const float found = float(low);
        return found < low ? std::nextafter(found, INFINITY) : found;
    }

    // Bins of scores, the highest first: of equal widths, then of all that is left.
    static constexpr int BINS = 256, A_UNIT = 16;
    float low() const { return top - BINS / A_UNIT; }
    vi bins_of(vf scores) const {
        vi found = __builtin_convertvector(larger(top - scores, vf{}) * float(A_UNIT), vi);
        return scores >= low() ? found < BINS ? found : vi{} + BINS - 1 : vi{} + BINS;
    }

    // The last score that top-k, and then top-p of what it kept, leave in descending order.
    float prefix_end(int64_t k, double p) {
        int64_t counts[BINS + 1] = {};
        double masses[BINS + 1] = {};
        alignas(64) float some[W];
        alignas(64) double weights[W];
        vd rest = {};
        for (int64_t i = 0; i < of.width; i += W) {
            vf x = scores(i);
            store(some, x);
            vd first = p < 1 ? exp_of(wide(some) - top) : vd{}, second = p < 1 ? exp_of(wide(some + W / 2) - top) : vd{};
            if (!any(x >= low())) {
                rest += first + second;
                continue;
            }
            std::memcpy(weights, &first, sizeof first), std::memcpy(weights + W / 2, &second, sizeof second);
            const vi bins = bins_of(x);
            for (int j = 0; j < std::min<int64_t>(W, of.width - i); j++) counts[bins[j]]++, masses[bins[j]] += weights[j];
        }
        masses[BINS] += sum_of(rest);
        float least = NOTHING;
        double total = 0;
        int64_t in_front = 0;
        int last = 0;  // the bin in which the k-th score is
        for (; k < of.width && last < BINS && in_front + counts[last] < k; last++) in_front += counts[last], total += masses[last];
        if (k < of.width) {
            gather(last, [&] { return int64_t(likely.size()) >= k - in_front; });
            if (likely.empty()) return NOTHING;
            auto kth = likely.begin() + std::min(k - in_front, int64_t(likely.size()));
            std::nth_element(likely.begin(), kth - 1, likely.end(), std::greater<float>());
            least = kth[-1];
            likely.erase(kth, likely.end());
            if (p >= 1) return least;
            total += mass(likely.data(), int64_t(likely.size()));
        } else {
            for (double each : masses) total += each;
            last = BINS;
        }
        double left = p * total;
        int bin = 0;
        for (; bin < last && masses[bin] < left; bin++) left -= masses[bin];
        if (bin < last || k == of.width) gather(bin, [&] { return mass(likely.data(), int64_t(likely.size())) >= left; });
        return likely.empty() ? NOTHING : heaviest(left);  // empty: rounding has left more than there is
    }

    // `likely` gets the scores of a bin; of the last one the highest, until they are `enough`.
    template <class Enough> void gather(int bin, Enough enough) {
        for (float radius = 32;; radius = radius < 256 ? 2 * radius : INFINITY) {
            likely.clear();
            for (int64_t i = 0; i < of.width; i += W) {
                vf x = scores(i);
                vi inside = (bins_of(x) == bin) & (x >= top - radius);
                for (int j = 0; any(inside) && j < std::min<int64_t>(W, of.width - i); j++)
                    if (inside[j]) likely.push_back(x[j]);
            }
            if (bin < BINS || std::isinf(radius) || enough()) return;
        }
    }

    // Of `likely`, the lowest score in front of which, in descending order, is less than `most`.
    float heaviest(double most) {
        auto begin = likely.begin(), end = likely.end();
        while (end - begin > 32) {
            auto middle = begin + (end - begin) / 2;
            std::nth_element(begin, middle, end, std::greater<float>());
            double some = mass(&*begin, middle - begin);
            if (some >= most) end = middle;
            else begin = middle, most -= some;
        }
        std::sort(begin, end, std::greater<float>());
        for (; begin + 1 < end && weight(*begin) < most; begin++) most -= weight(*begin);
        return *begin;
    }

    // The token with the highest sum of score and noise, of those that score `least` or more. An exponential number is larger than the
    // uniform one that it is made of, so few tokens need logarithms.
    int64_t best(float least) const {
        int64_t token = first([&](vf x) { return x == top; });
        float highest = top - noise(*key, token);
        vu lanes;
        for (int i = 0; i < W; i++) lanes[i] = uint32_t(i);
        for (int64_t i = 0; i < of.width; i += BLOCK) {
            vi may[4], found = {};
            float some[BLOCK];
            const vf slack = ::exp_of(splat(1e-4f + std::abs(highest) * 0x1p-22f));  // for what sums of this size are rounded by
            UNROLL for (int part = 0; part < 4; part++) {
                int64_t from = i + part * W;
                vf x = from < of.width ? scores(from) : splat(NOTHING);
                store(some + part * W, x);
                vf uniform = (__builtin_convertvector((vi)bits_of(lanes + uint32_t(from), *key), vf) + 0.5f) * UNIT;
                may[part] = (uniform < ::exp_of(x - highest) * slack) & (x >= least);
                found |= may[part];
            }
            if (!any(found)) continue;
            for (int64_t j = 0; j < BLOCK; j++) {
                if (!may[j / W][j % W]) continue;
                float x = some[j] - noise(*key, i + j);
                if (x > highest || (x == highest && i + j < token)) highest = x, token = i + j;
            }
        }
        return token;
    }
};

thread_local std::vector<float> Row::likely;

}  // namespace

extern "C" void quire_draw(const Draws* given) {
    const Draws& of = *given;
    std::vector<const uint64_t*> keys(of.rows);
    for (int64_t at = 0, next = 0; at < of.rows; at++)
        if (!of.term<uint8_t>(at, of.greedy)) keys[at] = of.keys + next++;
#pragma omp parallel for schedule(dynamic, 1) num_threads(int(of.threads)) if (of.rows > 1 && of.rows * of.width > SERIAL)
    for (int64_t at = 0; at < of.rows; at++) of.tokens[at] = Row(of, at, keys[at]).draw();
}
