// Decoder layers on pages, one behind the other, for a step: what `FusedLayer` computes in some ten calls of
// Python for each layer. The products, the functions on rows and attention are those that it calls, so results are equal.
#include "call.h"
#include "products.h"

extern "C" {
void quire_add_rms_norm(int kind, const void* rows, const void* added, const void* weight, void* sums, void* out, long count, long width, float eps);
void quire_rotate(int kind, void* rows, const void* cosines, const void* sines, const void* first_norm, const void* second_norm, long count, long stride, long first, long heads, long width, float eps);
void quire_gated_silu(int kind, const void* pairs, void* out, long count, long width);
}

struct Layer {
    Panels heads, out, pairs, down;  // queries, keys and values; after attention; gate and up; after these
    const void *first_norm, *second_norm, *query_norm, *key_norm;
    float first_eps, second_eps, head_eps;
    int32_t group;
    Call attention;  // without what a step has
};

struct Group {  // where the rows of a step are
    const int32_t *starts, *contexts, *frames, *parents, *slots;
    int64_t frame_row, sequences;
};

struct Pass {
    const Layer* layers;
    const Group* groups;
    uint8_t* memory;  // twice `width`, `wide_row` and `narrow_row` numbers for each row, each part in whole lines of 64 bytes, aligned to these
    uint8_t* hidden;  // [rows, width], before the first layer, then after the last one
    const uint8_t* read;  // [rows, inputs]: what the first layer's attention reads; null: the norm of the rows
    uint8_t* const* kept;  // [num_layers]: where the rows after each layer are stored, [rows, width], or null; null: none are
    const void *cosines, *sines;  // [rows, dim]
    int64_t num_layers, rows, width, wide_row, narrow_row, dim, queries, keys;
    int32_t format, threads;
};

namespace {

void write_rows(const Pass& pass, const Group& group, const Call& call, const uint8_t* heads, int64_t row_bytes) {
    int64_t head_bytes = pass.dim * (pass.format == F32 ? 4 : 2);
    for (int64_t row = 0; row < pass.rows; row++) {
        int32_t slot = group.slots[row], size = int32_t(call.page_size);
        Place place{slot / size, slot % size};
        const uint8_t *key = heads + row * row_bytes + pass.queries * head_bytes, *value = key + pass.keys * head_bytes;
        for (int64_t head = 0; head < pass.keys; head++) {
            std::memcpy((uint8_t*)call.key.at(place, head), key + head * head_bytes, head_bytes);
            std::memcpy((uint8_t*)call.value.at(place, head), value + head * head_bytes, head_bytes);
        }
    }
}

void keep(const Pass& pass, int64_t layer) {
    if (!pass.kept || !pass.kept[layer]) return;
    std::memcpy(pass.kept[layer], pass.hidden, pass.rows * pass.width * (pass.format == F32 ? 4 : 2));
}

void attend(const Pass& pass, const Layer& layer, const uint8_t* heads, uint8_t* out) {
    const Group& group = pass.groups[layer.group];
    int64_t head_bytes = pass.dim * (pass.format == F32 ? 4 : 2), row_bytes = layer.heads.outputs / pass.dim * head_bytes;
    Call call = layer.attention;
    call.query = heads, call.query_row = row_bytes, call.query_head = head_bytes, call.out = out;
    call.starts = group.starts, call.contexts = group.contexts, call.frames = group.frames, call.parents = group.parents;
    call.frame_row = group.frame_row, call.sequences = group.sequences, call.rows = pass.rows, call.threads = pass.threads;
    write_rows(pass, group, call, heads, row_bytes);
    quire_attend(&call);
}

}  // namespace

extern "C" void quire_decode(const Pass* given) {
    const Pass& pass = *given;
    auto bytes = [&](int64_t row) { return (pass.rows * row * (pass.format == F32 ? 4 : 2) + 63) / 64 * 64; };
    uint8_t *normed = pass.memory, *added = normed + bytes(pass.width), *wide = added + bytes(pass.width), *narrow = wide + bytes(pass.wide_row);
    const void* pending = nullptr;  // what the layer before adds to the rows
    for (int64_t i = 0; i < pass.num_layers; i++) {
        const Layer& layer = pass.layers[i];
        const uint8_t* read = i ? nullptr : pass.read;
        if (!read) {
            quire_add_rms_norm(pass.format, pass.hidden, pending, layer.first_norm, pass.hidden, normed, pass.rows, pass.width, layer.first_eps);
            if (i) keep(pass, i - 1);
        }
        multiply(layer.heads, read ? read : normed, wide, pass.rows, pass.threads);
        quire_rotate(pass.format, wide, pass.cosines, pass.sines, layer.query_norm, layer.key_norm, pass.rows,
                     layer.heads.outputs, pass.queries, pass.queries + pass.keys, pass.dim, layer.head_eps);
        attend(pass, layer, wide, narrow);
        multiply(layer.out, narrow, added, pass.rows, pass.threads);
        quire_add_rms_norm(pass.format, pass.hidden, added, layer.second_norm, pass.hidden, normed, pass.rows, pass.width, layer.second_eps);
        multiply(layer.pairs, normed, wide, pass.rows, pass.threads);
        quire_gated_silu(pass.format, wide, narrow, pass.rows, layer.pairs.outputs / 2);
        multiply(layer.down, narrow, added, pass.rows, pass.threads);
        pending = added;
    }
    const Layer& last = pass.layers[pass.num_layers - 1];  // whose norm of the sums is not read
    quire_add_rms_norm(pass.format, pass.hidden, pending, last.second_norm, pass.hidden, normed, pass.rows, pass.width, last.second_eps);
    keep(pass, pass.num_layers - 1);
}
