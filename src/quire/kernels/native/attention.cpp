// Attention over pages. A task is some rows against some keys; tasks run on all threads and are merged by their sums.
//
//   sequence   |<-- run shared with others -->|<------- own keys, to the last row -------->|
//   tasks       all rows of all of them        blocks of its rows, each with what these see
//
// Large tasks are cut by heads and by keys. Keys and values are read in place where few queries read them. Where many
// do, a block of them is unpacked to float32 first, for products whose sums stay in registers.
#include <algorithm>
#include <numeric>
#include <omp.h>
#include <optional>
#include <vector>

#include "call.h"
#include "in_place.h"
#include "products.h"
#include "tiles.h"

namespace {

constexpr int DIRECT = 32, PACKED = 128;  // tokens of a block read in place, or unpacked
constexpr int MOST_DIRECT = 16, MOST_BESIDE_TILES = 8;  // queries of a head that read keys in place
constexpr int MOST_QUERIES = 1024, LEAST_QUERIES = 256;  // queries of a head in one task, fewer where threads would lack tasks
constexpr int SOME_QUERIES = 48;  // whose scores stay in the cache
constexpr int MIN_SHARED = 256;  // tokens not read again that make a shared run worthwhile
constexpr int MIN_PIECE = 256;  // keys
constexpr int64_t SERIAL = 1 << 17;  // multiplications of a query head below which threads cost more than they save
constexpr float NOTHING = -INFINITY;

int round_up(int64_t n, int to) { return int((n + to - 1) / to * to); }

struct Task {
    int rows_at, count;  // in `Plan::rows`
    int first, stop;  // positions of its keys
    int sequence;  // whose page table it reads
    int head, heads;  // KV heads
    int part;  // among those of its rows that begin at `Plan::before`
};

struct Plan {
    std::vector<int> rows, before;  // of the tasks, and the parts that the row has in tasks before this one
    std::vector<int> low, high, branch, part, parts;  // low, high: positions a row sees
    std::vector<Task> tasks;
    std::vector<uint8_t> sees;  // branch[row] + n: whether a row of a tree sees the n-th row of its sequence
    std::vector<int> past, position;
    int num_parts = 0;
};

struct Scratch {
    std::vector<float> memory;
    float* take(size_t floats) {
        if (memory.size() < floats + 16) memory.resize(floats + 16);
        auto at = (uintptr_t)memory.data();
        return (float*)((at + 63) / 64 * 64);
    }
};

// -- what is computed

void shared_runs(const Call& call, Plan& plan, std::vector<int>& done) {
    struct Family { std::vector<int> members; int first, depth; };
    std::vector<int> full(call.sequences);
    Family all{{}, 0, 0};
    for (int s = 0; s < call.sequences; s++) {
        int count = call.starts[s + 1] - call.starts[s];
        full[s] = count ? (call.contexts[s] - count) / call.page_size : 0;
        for (int row = call.starts[s]; row < call.starts[s + 1]; row++)
            if (plan.low[row] > 0) full[s] = 0;  // a window has moved past the first token
        if (full[s]) all.members.push_back(s);
    }
    std::vector<Family> open{all};
    auto frame = [&](int s, int page) { return call.frames[s * call.frame_row + page]; };
    while (!open.empty()) {
        Family family = std::move(open.back());
        open.pop_back();
        auto& members = family.members;
        members.erase(std::remove_if(members.begin(), members.end(), [&](int s) { return full[s] <= family.depth; }), members.end());
        if (members.size() < 2) continue;
        std::stable_sort(members.begin(), members.end(), [&](int a, int b) { return frame(a, family.depth) < frame(b, family.depth); });
        for (size_t begin = 0, end; begin < members.size(); begin = end) {
            for (end = begin + 1; end < members.size() && frame(members[end], family.depth) == frame(members[begin], family.depth);) end++;
            if (end - begin < 2) continue;
            std::vector<int> same(members.begin() + begin, members.begin() + end);
            int stop = full[same[0]];
            for (int s : same) stop = std::min(stop, full[s]);
            const int32_t* table = call.frames + same[0] * call.frame_row;
            for (int s : same) {
                const int32_t* other = call.frames + s * call.frame_row;
                stop = int(std::mismatch(table + family.depth, table + stop, other + family.depth).first - table);
            }
            int first = family.first;
            if ((stop - first) * call.page_size * int64_t(same.size() - 1) >= MIN_SHARED) {
                Task task{int(plan.rows.size()), 0, int(first * call.page_size), int(stop * call.page_size), same[0], 0, 0, 0};
                for (int s : same) {
                    for (int row = call.starts[s]; row < call.starts[s + 1]; row++) plan.rows.push_back(row);
                    done[s] = int(stop * call.page_size);
                }
                task.count = int(plan.rows.size()) - task.rows_at;
                plan.tasks.push_back(task);
                first = stop;
            }
            open.push_back({std::move(same), first, stop});
        }
    }
}

void see_trees(const Call& call, Plan& plan) {
    // A row of a tree sees the past, the rows that it follows and itself. Its position counts these.
    for (int s = 0; s < call.sequences; s++) {
        int start = call.starts[s], count = call.starts[s + 1] - start;
        bool branches = false;
        for (int row = start; row < start + count; row++) branches |= call.parents[row] != (row > start ? row - 1 : -1);
        if (!branches) continue;
        for (int row = start; row < start + count; row++) {
            int parent = call.parents[row], at = int(plan.sees.size());
            plan.branch[row] = at;
            plan.sees.resize(at + count);
            if (parent >= 0) std::copy_n(plan.sees.begin() + plan.branch[parent], count, plan.sees.begin() + at);
            plan.sees[at + row - start] = 1;
            plan.position[row] = parent >= 0 ? plan.position[parent] + 1 : plan.past[row];
            plan.high[row] = call.contexts[s] - 1;
        }
    }
}

void add_rows(Plan& plan, int sequence, int start, int stop, int done) {
    Task task{int(plan.rows.size()), stop - start, plan.low[start], plan.high[start] + 1, sequence, 0, 0, 0};
    for (int row = start; row < stop; row++) {
        plan.rows.push_back(row);
        task.first = std::min(task.first, plan.low[row]), task.stop = std::max(task.stop, plan.high[row] + 1);
    }
    task.first = std::max(task.first, done);
    plan.tasks.push_back(task);
}

// How keys, values and queries of a call are multiplied.
struct Ways {
    bool in_place, paired = false, tiled = false;  // where they lie; bfloat16 as it is; many queries by tiles
    int most_direct = MOST_DIRECT;
    int step = W;  // tokens of a block are filled up to its multiples

    explicit Ways(const Call& call) {
        auto plain = [](const Field& field) { return field.format <= F16 && field.width % W == 0; };
        in_place = plain(call.key) && !call.key_tail.width && call.value.rows && plain(call.value);
#if defined(__AVX512BF16__)
        auto pairs = [](int32_t format, int width) { return format == BF16 && width % Paired::NUMBERS == 0; };
        const int dim = call.key.width, value_dim = call.value.width;
        paired = in_place && pairs(call.query_format, dim) && pairs(call.key.format, dim) && pairs(call.value.format, value_dim);
        if (paired) step = 2 * W;
#endif
#if defined(__AMX_BF16__)
        tiled = paired && dim % tiles::DEPTH == 0 && value_dim % tiles::DEPTH == 0 && tiles::are_allowed();
        if (tiled) most_direct = MOST_BESIDE_TILES, step = tiles::DEPTH;
#endif
    }
};

void cut_tasks(const Call& call, Plan& plan) {
    const int group = int(call.heads / call.kv_heads), most_direct = Ways(call).most_direct;
    auto cost = [&](const Task& task) {
        int64_t queries = int64_t(task.count) * group;
        return (task.stop - task.first) * task.heads * (queries + 6);
    };
    std::vector<Task> by_rows, found;
    plan.before.resize(plan.rows.size());
    int64_t total = 0;
    for (Task& task : plan.tasks) {
        task.heads = int(call.kv_heads);
        total += cost(task);
    }
    // Costs are added to it.
    int64_t limit = call.threads > 1 ? std::max<int64_t>(1, total / (4 * call.threads)) : INT64_MAX / 2;
    for (const Task& task : plan.tasks) {
        int64_t queries = limit / std::max(1, task.stop - task.first);
        int most = std::max(1, int(std::clamp<int64_t>(queries, LEAST_QUERIES, MOST_QUERIES)) / group);
        for (int at = 0; at < task.count; at += most) {
            Task block = task;
            block.rows_at += at, block.count = std::min(most, task.count - at);
            int low = task.stop, high = 0;  // of what these rows see
            for (int i = 0; i < block.count; i++) {
                int row = plan.rows[block.rows_at + i];
                low = std::min(low, plan.low[row]), high = std::max(high, plan.high[row]);
            }
            block.first = std::max(task.first, low), block.stop = std::min(task.stop, high + 1);
            by_rows.push_back(block);
        }
    }
    for (const Task& task : by_rows) {
        // Many queries: a head at a time stays in the cache.
        int heads = task.count * group > most_direct ? 1 : task.heads;
        Task one = task;
        one.heads = heads;
        int keys = task.stop - task.first;
        int64_t pieces = std::min<int64_t>((cost(one) + limit - 1) / limit, keys / MIN_PIECE);
        int size = pieces > 1 ? round_up((keys + pieces - 1) / pieces, PACKED) : std::max(keys, 1);
        int part = 0;
        for (int at = task.first; at < std::max(task.stop, task.first + 1); at += size, part++)
            for (int head = 0; head < task.heads; head += heads) {
                Task piece = task;
                piece.first = at, piece.stop = std::min(at + size, task.stop);
                piece.head = head, piece.heads = heads, piece.part = part;
                found.push_back(piece);
            }
        for (int at = task.rows_at; at < task.rows_at + task.count; at++) {
            plan.before[at] = plan.parts[plan.rows[at]];
            plan.parts[plan.rows[at]] += part;
        }
    }
    plan.tasks = std::move(found);
}

Plan planned(const Call& call) {
    Plan plan;
    int rows = int(call.rows);
    plan.low.resize(rows), plan.high.resize(rows), plan.past.resize(rows), plan.position.resize(rows);
    plan.branch.assign(rows, -1), plan.parts.assign(rows, 0), plan.part.resize(rows);
    if (call.slots) {
        for (int row = 0; row < rows; row++) {
            plan.high[row] = int(call.selected) - 1;
            add_rows(plan, row, row, row + 1, 0);
        }
    } else {
        for (int s = 0; s < call.sequences; s++)
            for (int row = call.starts[s]; row < call.starts[s + 1]; row++) {
                plan.past[row] = call.contexts[s] - (call.starts[s + 1] - call.starts[s]);
                plan.position[row] = plan.high[row] = plan.past[row] + row - call.starts[s];
            }
        if (call.parents) see_trees(call, plan);
        for (int row = 0; row < rows && call.window; row++) {
            int at = plan.position[row];
            plan.low[row] = int(call.chunked ? at / call.window * call.window : std::max<int64_t>(0, at - call.window + 1));
        }
        std::vector<int> done(call.sequences, 0);
        shared_runs(call, plan, done);
        int most = std::max<int>(1, int(MOST_QUERIES * call.kv_heads / call.heads));
        for (int s = 0; s < call.sequences; s++)
            for (int row = call.starts[s]; row < call.starts[s + 1]; row += most)
                add_rows(plan, s, row, std::min(row + most, call.starts[s + 1]), done[s]);
    }
    cut_tasks(call, plan);
    for (int row = 0; row < rows; row++) {
        plan.part[row] = plan.num_parts;
        if (plan.parts[row] > 1) plan.num_parts += plan.parts[row];
    }
    return plan;
}

// -- a task

class Worker : Ways {
  public:
    Worker(const Call& call, const Plan& plan, float* partial, float* peaks)
        : Ways(call), call(call), plan(plan), partial(partial), peaks(peaks), group(int(call.heads / call.kv_heads)),
          dim(call.key.width + call.key_tail.width), value_dim(call.value.rows ? call.value.width : dim),
          dim_up(round_up(dim, W)), value_up(round_up(value_dim, W)) {
        key_bytes = dim * (call.key.format == F32 ? 4 : 2);
    }

    void run(const Task& task) {
        m = task.count * group;
        direct = in_place && m <= most_direct;
        m_up = round_up(m, tiled && !direct ? 32 : 8);
        block = direct ? DIRECT : PACKED;
        some = direct ? m : tiled ? 32 : SOME_QUERIES;
        size_t heads = task.heads, all = heads * m_up, scored = direct ? all : some;
        float* at = scratch.take(all * (dim_up + value_up + 2) + scored * block + m_up + (direct ? 0 : PACKED * (2 * dim_up + value_up)));
        auto next = [&](size_t floats) { float* here = at; at += floats; return here; };
        queries = next(all * dim_up), outs = next(all * value_up), scores = next(scored * block);
        if (!direct) rows = next(PACKED * dim_up), columns = next(PACKED * dim_up), values = next(PACKED * value_up);
        tops = next(all), totals = next(all), factors = next(m_up);
        std::fill(outs, outs + all * value_up, 0.0f);
        std::fill(tops, tops + all, NOTHING);
        std::fill(totals, totals + all, 0.0f);
        read_queries(task);
        int64_t most = call.slots ? read_slots(task) : 0;
        int stop = call.slots ? int(most) : task.stop;
        if (!call.slots) read_pages(task, task.first, std::min(block, stop - task.first), next_places);
        const int begin = call.slots ? 0 : task.first;
#if defined(__AMX_BF16__)
        std::optional<tiles::Held> held;
        if (tiled && !direct) held.emplace(tiles::ROWS);
#endif
        for (int first = begin; first < stop; first += block) {
            int tokens = std::min(block, stop - first);
            num_next = std::clamp(stop - first - block, 0, block);
            if (call.slots) {
                found = chosen.data() + first, found_next = found + block;
            } else {
                std::copy_n(next_places, tokens, places);
                read_pages(task, first + block, num_next, next_places);
                found = places, found_next = next_places;
            }
            if (direct) score(task, tokens, first == begin);
            for (int head = 0; head < task.heads; head++) attend(task, head, first, tokens);
        }
        finish(task);
    }

  private:
    const Call& call;
    const Plan& plan;
    float *partial, *peaks;
    int group, dim, value_dim, dim_up, value_up, m = 0, m_up = 0, block = 0;
    int some = 0;  // queries whose scores are there at once
    int key_bytes = 0;  // of a vector, where it is read in place
    bool direct = false;
    float *queries, *outs, *scores, *rows, *columns, *values, *tops, *totals, *factors;
    Place places[PACKED], next_places[PACKED];
    const Place *found, *found_next;  // places of the tokens of this block and of the next one
    int num_next = 0;
    std::vector<Place> chosen;
    const uint8_t *key_at[DIRECT], *value_at[DIRECT], *next_at[DIRECT];
    static thread_local Scratch scratch;

    static void prefetch(const uint8_t* from, int bytes) {
        for (int at = 0; at < bytes; at += 64) __builtin_prefetch(from + at, 0, 2);
    }

    void read_queries(const Task& task) {
        for (int head = 0; head < task.heads; head++)
            for (int i = 0; i < m_up; i++) {
                float* to = queries + (head * m_up + i) * int64_t(dim_up);
                if (i < m) {
                    int row = plan.rows[task.rows_at + i / group], which = (task.head + head) * group + i % group;
                    const uint8_t* from = call.query + row * call.query_row + which * call.query_head;
                    if (paired) std::memcpy(to, from, 2 * dim);
                    else decode(from, call.query_format, dim, to);
                }
                if (paired && i < m) continue;
                std::fill(to + (i < m ? dim : 0), to + dim_up, 0.0f);
            }
    }

    int64_t read_slots(const Task& task) {
        chosen.clear();
        const uint32_t size = uint32_t(call.page_size);
        const int64_t row = plan.rows[task.rows_at];
        for (int64_t at = row * call.selected + task.first; at < row * call.selected + task.stop; at++)
            if (!call.hidden[at]) {
                uint32_t slot = uint32_t(call.slots[at]);
                chosen.push_back({int32_t(slot / size), int32_t(slot % size)});
            }
        return int64_t(chosen.size());
    }

    void read_pages(const Task& task, int first, int tokens, Place* places) const {
        const int32_t* table = call.frames + task.sequence * call.frame_row;
        const int size = int(call.page_size);
        for (int i = 0; i < tokens;) {
            int page = (first + i) / size, offset = (first + i) % size;
            for (int end = std::min(tokens, i + size - offset); i < end;) places[i++] = {table[page], offset++};
        }
    }

    // What queries `from` to `end` see of a block: all, some or none of it.
    enum class Sight { ALL, SOME, NONE };
    Sight sight(const Task& task, int from, int end, int first, int tokens) const {
        bool all = true, none = true;
        for (int at = from / group; at <= (end - 1) / group; at++) {
            int row = plan.rows[task.rows_at + at], low = plan.low[row], high = plan.high[row];
            bool branches = plan.branch[row] >= 0;
            all &= low <= first && high >= first + tokens - 1 && !(branches && first + tokens > plan.past[row]);
            none &= low >= first + tokens || high < first;
        }
        return all ? Sight::ALL : none ? Sight::NONE : Sight::SOME;
    }

    // Scores of a block in place. A token's keys of all heads are read together, as they lie in memory. Values are
    // fetched beside them, and keys of the next block beside values: pages are scattered, and each would begin with a wait.
    template <class P> void score(const Task& task, int tokens) {
        for (int t = 0; t < tokens; t += STEP)
            for (int head = 0; head < task.heads; head++) {
                Ahead ahead{value_at + t, head * call.value.head};
                const float* query = queries + head * m_up * int64_t(dim_up);
                float* to = scores + head * m_up * int64_t(block) + t;
                all_dots<P>(m, query, dim_up, key_at + t, head * call.key.head, tokens - t, dim, to, block, ahead);
            }
    }

    void score(const Task& task, int tokens, bool is_first) {
        const Field &key = call.key, &value = call.value;
        for (int i = 0; i < tokens; i++) {
            key_at[i] = key.at(found[i], task.head);
            value_at[i] = value.at(found[i], task.head);
            next_at[i] = i < num_next ? key.at(found_next[i], task.head) : key_at[i];
        }
        for (int i = 0; i < tokens && is_first; i++) prefetch(key_at[i], task.heads * key_bytes);
#if defined(__AVX512BF16__)
        if (paired) return score<Paired>(task, tokens);
#endif
        switch (key.format) {
        case F32: return score<Widened<float>>(task, tokens);
        case BF16: return score<Widened<bf16>>(task, tokens);
        default: score<Widened<f16>>(task, tokens);
        }
    }

    void attend(const Task& task, int head, int first, int tokens) {
        if (!direct) unpack(task.head + head, tokens);
        for (int from = 0; from < m; from += some) {
            const int count = std::min(some, m - from);
            const int64_t at = head * m_up + from;
            Sight sees = call.slots ? Sight::ALL : sight(task, from, from + count, first, tokens);
            if (sees == Sight::NONE) continue;
            float *weights = scores + (direct ? at * block : 0), *out = outs + at * value_up;
            if (!direct) multiply<false>(count, tokens, queries + at * dim_up, weights);
            if (sees == Sight::SOME) mask(task, from, count, first, tokens, weights);
            soften(count, tokens, tops + at, totals + at, weights);
            direct ? weigh(head, tokens, weights, out) : multiply<true>(count, tokens, weights, out);
        }
    }

    void weigh(int head, int tokens, const float* weights, float* out) {
#if defined(__AVX512BF16__)
        if (paired) return weigh<Paired>(head, tokens, weights, out);
#endif
        switch (call.value.format) {
        case F32: return weigh<Widened<float>>(head, tokens, weights, out);
        case BF16: return weigh<Widened<bf16>>(head, tokens, weights, out);
        default: weigh<Widened<f16>>(head, tokens, weights, out);
        }
    }

    // Scores of queries, or values times weights added to `to`, from keys or values that were unpacked.
    template <bool WEIGHS> void multiply(int count, int tokens, const float* left, float* to) {
        int depth = WEIGHS ? tokens : dim, width = WEIGHS ? value_up : round_up(tokens, step);
        int64_t row = WEIGHS ? block : dim_up, right_row = WEIGHS ? value_up : PACKED, to_row = WEIGHS ? value_up : block;
        const float *right = WEIGHS ? values : columns, *by = WEIGHS ? factors : nullptr;
#if defined(__AMX_BF16__)
        if (tiled) {
            for (int i = 0; i < count && WEIGHS; i++)
                if (factors[i] != 1)
                    for (int d = 0; d < width; d += W) store(to + i * to_row + d, load(to + i * to_row + d) * factors[i]);
            return tiles::product<WEIGHS>(some, left, 4 * row, right, 4 * right_row, round_up(depth, tiles::DEPTH), width, to, 4 * to_row);
        }
#endif
#if defined(__AVX512BF16__)
        if (paired) return product<Doubles, WEIGHS>(count, (const uint16_t*)left, 2 * row, (const uint16_t*)right, right_row, depth, width, to, to_row, by);
#endif
        product<Singles, WEIGHS>(count, left, row, right, right_row, depth, width, to, to_row, by);
    }

#if defined(__AVX512BF16__)
    // A block of keys as columns `[dim / 2, PACKED]` of pairs of numbers.
    void pair_keys(int head, int tokens) {
        const int pairs = dim / 2, up = round_up(tokens, step);
        for (int i = 0; i < tokens; i++)
            for (int d = 0; d < pairs; d += W) store(rows + i * pairs + d, load_as<vf>(call.key.at(found[i], head) + 4 * d));
        std::fill(rows + tokens * pairs, rows + up * pairs, 0.0f);
        for (int i = 0; i < up; i += W)
            for (int d = 0; d < pairs; d += W) transpose(rows + i * pairs + d, pairs, columns + d * int64_t(PACKED) + i, PACKED);
    }

    // A block of values as rows `[tokens / 2, value_dim]` of pairs of tokens.
    void pair_values(int head, int tokens) {
        auto numbers = [&](int i, int d) { return i < tokens ? load_as<vu>(call.value.at(found[i], head) + 2 * d) : vu{}; };
        for (int i = 0; i < round_up(tokens, step); i += 2) {
            float* to = values + i / 2 * int64_t(value_up);
            for (int d = 0; d < value_dim; d += 2 * W) {
                vu a = numbers(i, d), b = numbers(i + 1, d);
                vu low = ::paired<0>(a, b), high = ::paired<1>(a, b);
                std::memcpy(to + d, &low, sizeof low), std::memcpy(to + d + W, &high, sizeof high);
            }
        }
    }
#endif

    template <class P> void weigh(int head, int tokens, const float* weights, float* out) {
        Ahead ahead{next_at, head * call.key.head};
        all_weighed<P>(m, weights, block, value_at, head * call.value.head, value_dim, tokens, out, value_up, factors, ahead);
    }

    static void read_row(const Field& field, Place place, int head, float* to) {
        decode(field.at(place, head), field.format, field.width, to);
        if (!field.block) return;
        const uint8_t* scales = field.scales_at(place, head);
        for (int at = 0; at < field.width; at += field.block) {
            float scale = scale_at(scales, field.scale, at / field.block);
            for (int i = at; i < at + field.block; i++) to[i] *= scale;
        }
    }

    // A block of keys as columns `[dim, PACKED]`, and of values as rows `[tokens, value_up]`.
    void unpack(int head, int tokens) {
#if defined(__AVX512BF16__)
        if (paired) return pair_keys(head, tokens), pair_values(head, tokens);
#endif
        for (int i = 0; i < tokens; i++) {
            float* row = rows + i * int64_t(dim_up);
            read_row(call.key, found[i], head, row);
            if (call.key_tail.width) read_row(call.key_tail, found[i], head, row + call.key.width);
            float* value = values + i * int64_t(value_up);
            if (call.value.rows) read_row(call.value, found[i], head, value);
            else std::memcpy(value, row, 4 * value_dim);
            std::fill(value + value_dim, value + value_up, 0.0f);
            std::fill(row + dim, row + dim_up, 0.0f);
        }
        for (int i = tokens; i < round_up(tokens, W); i++) std::fill_n(rows + i * int64_t(dim_up), dim_up, 0.0f);
        for (int i = 0; i < tokens; i += W)
            for (int d = 0; d < dim; d += W) transpose(rows + i * int64_t(dim_up) + d, dim_up, columns + d * int64_t(PACKED) + i, PACKED);
    }

    // Hides what queries from `from` on do not see from their scores.
    void mask(const Task& task, int from, int count, int first, int tokens, float* scores) const {
        for (int i = 0; i < count; i++) {
            int row = plan.rows[task.rows_at + (from + i) / group], low = plan.low[row] - first, high = plan.high[row] - first;
            int past = plan.past[row] - first;
            float* score = scores + i * int64_t(block);
            if (plan.branch[row] < 0) {
                for (int t = 0; t < tokens; t++) score[t] = t < low || t > high ? NOTHING : score[t];
                continue;
            }
            const uint8_t* sees = plan.sees.data() + plan.branch[row];
            for (int t = 0; t < tokens; t++) {
                bool hides = t < past ? t < low : !sees[t - past] || position_of(task, t - past) < plan.low[row];
                if (hides) score[t] = NOTHING;
            }
        }
    }

    // The position of the n-th row of the task's sequence.
    int position_of(const Task& task, int n) const { return plan.position[call.starts[task.sequence] + n]; }

    void soften(int count, int tokens, float* top, float* total, float* scores) {
        int i = 0;
        constexpr int MOST = std::min(W, 8);
        for (; count - i > MOST - 2; i += MOST) soften_rows<MOST>(i, tokens, top, total, scores);
        for (; count - i > 2; i += 4) soften_rows<4>(i, tokens, top, total, scores);
        for (; i < count; i += 2) soften_rows<2>(i, tokens, top, total, scores);
        for (i = count; i < some && tiled; i++) std::fill_n(scores + i * int64_t(block), round_up(tokens, step), 0.0f);
    }

    // Weights of R rows, from the `at`-th on, in place of their scores. Rows are side by side: each waits for its own steps.
    template <int R> void soften_rows(int at, int tokens, float* top, float* total, float* scores) {
        int up = round_up(tokens, step);
        float* score[R];
        vf found[R];
        UNROLL for (int i = 0; i < R; i++) {
            score[i] = scores + (at + i) * int64_t(block);
            std::fill(score[i] + tokens, score[i] + up, NOTHING);
            found[i] = splat(NOTHING);
        }
        // Scores times a scale that turns them around, or hides none, have another largest one.
        const bool is_later = call.softcap == 0 && call.scale > 0;
        for (int t = 0; t < up && !is_later; t += W)
            UNROLL for (int i = 0; i < R; i++) {
                vf given = load(score[i] + t), s = given * call.scale;
                if (call.softcap != 0) s = tanh_of(s / call.softcap) * call.softcap;
                store(score[i] + t, choose(given == NOTHING, given, s));
            }
        for (int t = 0; t < up; t += W)
            UNROLL for (int i = 0; i < R; i++) found[i] = larger(load(score[i] + t), found[i]);
        const float scale = is_later ? call.scale : 1;
        alignas(64) float bases[W];
        vf before = load_some<R>(top + at), peak = larger(reduced<Largest, R>(found) * scale, before);
        store(bases, choose(peak == NOTHING, vf{}, peak));
        vf factor = choose(before == NOTHING, vf{}, exp_of(before - load(bases)));
        UNROLL for (int i = 0; i < R; i++) found[i] = vf{};
#if defined(__AVX512BF16__)
        auto rough = [&](int i, int t) { return power_of_two(load(score[i] + t) * (scale * LOG2_E) - bases[i] * LOG2_E); };
        for (int t = 0; t < up && paired; t += 2 * W)
            UNROLL for (int i = 0; i < R; i++) {
                vu both = narrowed(rough(i, t), rough(i, t + W));
                std::memcpy((uint16_t*)score[i] + t, &both, sizeof both);
                found[i] = dot_pairs(found[i], both, vu{} + 0x3f803f80u);  // times one
            }
#endif
        for (int t = 0; t < up && !paired; t += W)
            UNROLL for (int i = 0; i < R; i++) {
                vf weight = exp_of(load(score[i] + t) * scale - bases[i]);
                store(score[i] + t, weight);
                found[i] += weight;
            }
        vf sum = load_some<R>(total + at) * factor + reduced<Sum, R>(found);
        std::memcpy(top + at, &peak, 4 * R), std::memcpy(total + at, &sum, 4 * R), std::memcpy(factors + at, &factor, 4 * R);
    }

    void finish(const Task& task) {
        for (int head = 0; head < task.heads; head++)
            for (int i = 0; i < m; i++) {
                int row = plan.rows[task.rows_at + i / group], which = (task.head + head) * group + i % group;
                int64_t at = head * m_up + i;
                if (plan.parts[row] == 1) {
                    write(row, which, outs + at * value_up, tops[at], totals[at]);
                    continue;
                }
                int64_t part = (plan.part[row] + plan.before[task.rows_at + i / group] + task.part) * call.heads + which;
                std::memcpy(partial + part * value_dim, outs + at * value_up, 4 * value_dim);
                peaks[2 * part] = tops[at], peaks[2 * part + 1] = totals[at];
            }
    }

  public:
    void write(int row, int head, const float* sum, float top, float total) const {
        int64_t at = row * call.heads + head;
        if (call.lse) call.lse[at] = total == 0 ? NOTHING : top + std::log(total);
        float all = call.sinks ? total + std::exp(call.sinks[head] - top) : total;
        float factor = total == 0 ? 0.0f : 1 / all;
        for (int d = 0; d < value_dim; d++) {
            float x = sum[d] * factor;
            if (call.out_format == F32) ((float*)call.out)[at * value_dim + d] = x;
            else ((uint16_t*)call.out)[at * value_dim + d] = call.out_format == BF16 ? to_bf16(x) : to_f16(x);
        }
    }

    void merge(int row) const {
        std::vector<float> sum(value_dim);
        for (int head = 0; head < call.heads; head++) {
            float top = NOTHING, total = 0;
            std::fill(sum.begin(), sum.end(), 0.0f);
            for (int part = plan.part[row]; part < plan.part[row] + plan.parts[row]; part++) {
                int64_t at = part * call.heads + head;
                if (peaks[2 * at + 1] == 0) continue;  // not for a top of NOTHING: NaN has that, too
                float peak = std::max(top, peaks[2 * at]), before = top == NOTHING ? 0 : std::exp(top - peak);
                float weight = std::exp(peaks[2 * at] - peak);
                total = total * before + peaks[2 * at + 1] * weight;
                for (int d = 0; d < value_dim; d++) sum[d] = sum[d] * before + partial[at * value_dim + d] * weight;
                top = peak;
            }
            write(row, head, sum.data(), top, total);
        }
    }
};

thread_local Scratch Worker::scratch;

}  // namespace

extern "C" void quire_attend(const Call* given) {
    const Call& call = *given;
    Plan plan = planned(call);
    static thread_local Scratch memory;
    int width = call.value.rows ? call.value.width : call.key.width + call.key_tail.width;
    int64_t parts = plan.num_parts * call.heads;
    float *partial = memory.take(parts * (width + 2)), *peaks = partial + parts * width;
    int64_t work = 0;
    for (const Task& task : plan.tasks) work += int64_t(task.stop - task.first) * task.count * task.heads * width;
    int threads = work < SERIAL ? 1 : call.threads;
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        Worker worker(call, plan, partial, peaks);
#pragma omp for schedule(dynamic, 1)
        for (size_t at = 0; at < plan.tasks.size(); at++) worker.run(plan.tasks[at]);
#pragma omp for schedule(dynamic, 4)
        for (int64_t row = 0; row < call.rows; row++)
            if (plan.parts[row] > 1) worker.merge(int(row));
    }
}
