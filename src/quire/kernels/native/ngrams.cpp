// Drafts of n-grams for all requests of a step in one call: what `NgramDrafter` computes by operations on arrays. Places,
// tables and drafts are the same.
#include <algorithm>
#include <cstdint>
#include <vector>

struct Ngrams {  // of one drafter; arrays by row have an entry for each row of the cache
    int64_t *own, *shared;  // tables from hashes to the place of a last token + 1; `shared` is of `history`, or null
    const int32_t *history, *texts;  // tokens of ended requests, and the number of each token's text
    const int64_t* history_spaces;
    const int64_t* spaces;  // by row, as the next ones
    int64_t *entered, *sources, *lengths;
    uint8_t* departed;
    int64_t history_size, shortest, longest, table_bits;
    int64_t resume_tokens, near;  // 0 of both: copies are not taken up again
    int64_t num_chains, most_nodes;  // of a tree; 0 nodes: one chain
};

struct Search {  // of one step
    const int32_t* flat;  // [rows of the cache, width]
    int64_t width;
    const int64_t *rows, *known, *most;  // by request
    int64_t count, depth, finds_history;
    int32_t *tokens, *parents;  // [count, depth], or of trees [count, nodes]
    int64_t* counts;
};

namespace {

constexpr uint64_t PRIME = 0x9E3779B97F4A7C15ull, OTHER_PRIME = 0xBF58476D1CE4E5B9ull, SHARED = 1ull << 63;

struct Match {  // an n-gram ended before at `place`; size 0: nowhere
    int64_t place, size;
    bool is_own;
};

uint64_t own_seed(int64_t row) { return (uint64_t(row) + 1) * OTHER_PRIME; }

int64_t cell(const Ngrams& of, uint64_t sum, uint64_t seed) {
    uint64_t state = (sum ^ seed) * PRIME;
    state ^= state >> 29;
    state *= PRIME;
    return int64_t(state >> (64 - of.table_bits));
}

uint64_t sum_of(const int32_t* end, int64_t size) {  // of the `size` tokens up to `end`
    uint64_t sum = 0, factor = PRIME;
    for (int64_t back = 0; back < size; back++, factor *= PRIME) sum += uint64_t(int64_t(end[-back])) * factor;
    return sum;
}

bool ends_alike(const int32_t* left, const int32_t* right, int64_t size) {
    for (int64_t back = 0; back < size; back++)
        if (left[-back] != right[-back]) return false;
    return true;
}

// Enter the n-grams that a token follows since the last time. All of one size come before longer ones, so that a cell
// which several want has the entry that operations on arrays leave there.
void enter(const Ngrams& of, const Search& step) {
    for (int64_t size = of.shortest; size <= of.longest; size++)
        for (int64_t i = 0; i < step.count; i++) {
            int64_t row = step.rows[i], begin = row * step.width;
            for (int64_t within = std::max(of.entered[row], size - 1); within < step.known[i] - 1; within++) {
                int64_t end = begin + within;
                of.own[cell(of, sum_of(step.flat + end, size), own_seed(row))] = end + 1;
            }
        }
    for (int64_t i = 0; i < step.count; i++) of.entered[step.rows[i]] = step.known[i] - 1;
}

Match resumed(const Ngrams& of, const int32_t* text, int64_t row, int64_t known) {
    int64_t more = known - of.lengths[row], &source = of.sources[row];
    if (of.departed[row]) {
        if (more > of.resume_tokens) source = 0;
    } else {
        if (source > 0) source += more;
        of.lengths[row] = known;
    }
    Match best{source, 0, true};
    const int32_t* end = text + known - 1;
    for (int64_t at = source; source > 0 && at < std::min(source + of.near, known - 1); at++) {
        int64_t size = text[at] != *end ? 0 : 1 + (text[at - 1] == end[-1]);
        if (size > best.size) best = {at, size, true};
    }
    return best;
}

Match own(const Ngrams& of, const int32_t* text, int64_t begin, int64_t row, int64_t known, int64_t size) {
    const int32_t* end = text + known - 1;
    if (known < size) return {0, 0, true};
    int64_t place = of.own[cell(of, sum_of(end, size), own_seed(row))] - 1 - begin;  // in the row
    bool found = place >= size - 1 && place < known - 1 && ends_alike(text + place, end, size);
    return {place, found ? size : 0, true};
}

Match shared(const Ngrams& of, const int32_t* end, int64_t space, int64_t known, int64_t size) {
    if (known < size) return {0, 0, false};
    int64_t place = of.shared[cell(of, sum_of(end, size), uint64_t(space) ^ SHARED)] - 1;
    bool found = place >= size && place < of.history_size - 1 && ends_alike(of.history + place, end, size)
        && of.history_spaces[place] == space && of.texts[place - size + 1] == of.texts[place] && of.texts[place + 1] == of.texts[place];
    return {place, found ? size : 0, false};
}

// What follows a match, at most `most` tokens; how many there are. What ends with the last token is repeated.
int64_t follow(const Ngrams& of, const int32_t* text, int64_t known, const Match& match, int64_t most, int32_t* out) {
    for (int64_t at = 0; at < most; at++) {
        if (match.is_own) {
            out[at] = text[match.place + 1 + at % (known - 1 - match.place)];
        } else {
            int64_t place = match.place + 1 + at;
            if (place >= of.history_size || of.texts[place] != of.texts[match.place]) return at;
            out[at] = of.history[place];
        }
    }
    return std::max<int64_t>(most, 0);
}

// Add a chain to a tree of `count` nodes, as far as it has room; how many there are then.
int64_t join(const Ngrams& of, const int32_t* chain, int64_t length, int32_t* tokens, int32_t* parents, int64_t count) {
    int32_t parent = -1;
    for (int64_t at = 0; at < length; at++) {
        int64_t node = 0;
        while (node < count && !(parents[node] == parent && tokens[node] == chain[at])) node++;
        if (node == of.most_nodes) break;
        if (node == count) tokens[node] = chain[at], parents[node] = parent, count++;
        parent = int32_t(node);
    }
    return count;
}

}  // namespace

extern "C" void quire_ngram_drafts(const Ngrams* state, const Search* given) {
    const Ngrams& of = *state;
    const Search& step = *given;
    static thread_local std::vector<Match> found;
    static thread_local std::vector<int32_t> chain;
    enter(of, step);
    std::fill_n(step.counts, step.count, 0);
    if (!step.depth) return;
    chain.resize(step.depth);
    for (int64_t i = 0; i < step.count; i++) {
        int64_t row = step.rows[i], known = step.known[i], begin = row * step.width;
        const int32_t *text = step.flat + begin, *end = text + known - 1;
        found.clear();  // the request's own come first, and of these what copies, so that they are taken if as long
        if (of.near) found.push_back(resumed(of, text, row, known));
        for (int64_t size = of.shortest; size <= of.longest; size++) found.push_back(own(of, text, begin, row, known, size));
        for (int64_t size = of.shortest; step.finds_history && size <= of.longest; size++)
            found.push_back(shared(of, end, of.spaces[row], known, size));
        auto longer = [](const Match& a, const Match& b) { return a.size > b.size; };
        Match best = *std::min_element(found.begin(), found.end(), longer);
        if (of.near) {
            of.departed[row] = !best.size;
            if (best.size) of.sources[row] = best.is_own ? best.place : 0;
            if (best.size && best.is_own) of.lengths[row] = known;
        }
        if (!of.most_nodes) {
            if (best.size) step.counts[i] = follow(of, text, known, best, step.most[i], step.tokens + i * step.depth);
            continue;
        }
        std::stable_sort(found.begin(), found.end(), longer);
        int64_t count = 0, chains = std::min<int64_t>(of.num_chains, found.size());
        for (int64_t at = 0; at < chains; at++) {
            int64_t length = found[at].size ? follow(of, text, known, found[at], step.most[i], chain.data()) : 0;
            count = join(of, chain.data(), length, step.tokens + i * of.most_nodes, step.parents + i * of.most_nodes, count);
        }
        step.counts[i] = count;
    }
}
