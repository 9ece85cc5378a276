// What needs the inside of a KV cache.
// Taking the cells over whole: where a sequence has a stream of its own on both sides, the ordered sets that index its
// cells change hands instead of being filled and emptied again cell by cell.
// Rows: where the keys and values of a sequence lie, and cells for tokens whose rows come from elsewhere.
#pragma once

#include <cstdint>
#include <vector>

#include "handover_copier.h"
#include "llama-kv-cache.h"

// The keys or values of one layer in the stream of a sequence.
struct kv_plane {
    ggml_tensor * tensor;
    uint32_t      n_cells;
    uint32_t      n_columns;  // 1: rows of `bytes`, one for each cell. More: transposed, elements of `bytes`
    size_t        bytes;
};

// A friend of llama_kv_cache and llama_kv_cells in the patched tree.
struct kv_take {
    // Cells keep their indexes, so they must all be there in the destination.
    static bool possible(const llama_kv_cache & from, llama_seq_id seq_from, const llama_kv_cache & to,
                         llama_seq_id seq_to);
    static void copy(const llama_kv_cache & from, llama_seq_id seq_from, const llama_kv_cache & to, llama_seq_id seq_to,
                     handover::device_copier & copier);
    // After the copies: from has the sequence no more.
    static void cells(llama_kv_cache & from, llama_seq_id seq_from, llama_kv_cache & to, llama_seq_id seq_to);

    // False when its rows belong to another cache.
    static bool planes(const llama_kv_cache & cache, llama_seq_id seq, std::vector<kv_plane> & out);
    // The cells of positions [pos, pos + n) of a sequence; false when one is missing, or is there twice.
    static bool find(const llama_kv_cache & cache, llama_seq_id seq, llama_pos pos, int32_t n, int32_t * out);
    // Would place() give cells that are their positions, behind all others of a stream that no other sequence has?
    static bool appends(const llama_kv_cache & cache, llama_seq_id seq, llama_pos pos, int32_t n);
    // Where appends(cache, seq, 0, n): give an empty sequence cells for as many tokens as is quick; how many, at most
    // n.
    static int32_t adopt(llama_kv_cache & cache, llama_seq_id seq, int32_t n, const llama_token * tokens,
                         uint32_t n_pos);
    // Take all cells from a long sequence whose cells are its positions, in a stream of its own; false for any other.
    static bool empty(llama_kv_cache & cache, llama_seq_id seq);
    // Give a sequence cells for n tokens from pos on, those numbered as their positions where they are free. With
    // `like` the cells are given instead of chosen. n_pos: sections of a position in the model's batches. False, and
    // nothing is done, when there is no room.
    static bool place(llama_kv_cache & cache, llama_seq_id seq, llama_pos pos, int32_t n, const llama_token * tokens,
                      uint32_t n_pos, int32_t * out, bool like);

private:
    static bool append(llama_kv_cache & cache, llama_seq_id seq, llama_pos pos, int32_t n, const llama_token * tokens,
                       uint32_t n_pos);
};
