// Taking the cells of a KV cache over whole: where a sequence has a stream of its own on both sides, the ordered sets
// that index its cells change hands instead of being filled and emptied again cell by cell.
#pragma once

#include "handover_copier.h"
#include "llama-kv-cache.h"

// A friend of llama_kv_cache and llama_kv_cells in the patched tree.
struct kv_take {
    // Cells keep their indexes, so they must all be there in the destination.
    static bool possible(const llama_kv_cache & from, llama_seq_id seq_from, const llama_kv_cache & to,
                         llama_seq_id seq_to);
    static void copy(const llama_kv_cache & from, llama_seq_id seq_from, const llama_kv_cache & to, llama_seq_id seq_to,
                     handover::device_copier & copier);
    // After the copies: from has the sequence no more.
    static void cells(llama_kv_cache & from, llama_seq_id seq_from, llama_kv_cache & to, llama_seq_id seq_to);
};
