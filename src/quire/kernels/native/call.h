// A call of attention, as Python and the decoder make it.
#pragma once

#include <cstdint>

struct Place {  // of a token: the frame of its page, and its offset in there
    int32_t frame, offset;
};

struct Field {  // vectors of tokens: that of a head begins at rows + frame * `frame` + offset * token + head * `head`, in bytes
    const uint8_t* rows;
    int64_t frame, token, head;
    const uint8_t* scales;
    int64_t scale_frame, scale_token, scale_head;
    int32_t format, scale, block, width;

    const uint8_t* at(Place place, int64_t head_number) const {
        return rows + place.frame * frame + place.offset * token + head_number * head;
    }
    const uint8_t* scales_at(Place place, int64_t head_number) const {
        return scales + place.frame * scale_frame + place.offset * scale_token + head_number * scale_head;
    }
};

struct Call {
    const uint8_t* query;  // [rows, heads, key_dim]
    int64_t query_row, query_head;  // bytes
    uint8_t* out;  // [rows, heads, value_dim], contiguous
    float* lse;  // [rows, heads] or null
    const float* sinks;  // [heads] or null
    Field key, key_tail, value;  // a key is that of both; without a `value`, it is the value too
    const int32_t *starts, *contexts, *frames, *parents;
    int64_t frame_row;  // entries of `frames` per sequence
    const int64_t* slots;  // [rows, selected], in place of `frames`; a slot is frame * page_size + offset
    const uint8_t* hidden;
    int64_t sequences, rows, heads, kv_heads, page_size, window, selected;
    int32_t query_format, out_format, chunked, threads;
    float scale, softcap;  // 0: none
};

extern "C" void quire_attend(const Call* given);
