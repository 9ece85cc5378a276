// Rows of a sequence: planes, cells, and copies between cells and blocks on the host.
#include <algorithm>
#include <stdexcept>
#include <string>
#include <vector>

#include "ggml-backend.h"
#include "llama.h"
#include "mg.h"
#include "mg_error.h"
#ifndef MG_NO_SWITCHES
#include "cells_bytes.h"
#include "handover_cells.h"
#include "llama-context.h"
#include "llama-kv-cache-iswa.h"
#include "llama-kv-cache.h"
#include "llama-memory-hybrid-idx.h"
#include "llama-memory-hybrid-iswa.h"
#include "llama-memory-hybrid.h"
#include "llama-memory-recurrent.h"
#include "llama-model.h"
#include "qsa_memory.h"

namespace {

// The caches that grow with the tokens; the cells of the second one are those of the first.
struct growing {
    llama_kv_cache *          attention = nullptr;
    llama_kv_cache *          index     = nullptr;
    llama_memory_hybrid_idx * owner     = nullptr;  // of the index keys
};

growing caches_of(llama_context * ctx, int32_t seq) {
    llama_memory_i * memory = ctx->get_memory();
    if (!memory || seq < 0 || seq >= (int32_t) ctx->n_seq_max()) {
        throw std::runtime_error("there is no such sequence");
    }
    growing found;
    if (auto * hybrid = dynamic_cast<llama_memory_hybrid_idx *>(memory)) {
        found.attention = hybrid->get_mem_attn();
        found.index     = hybrid->get_mem_idx();
        found.owner     = hybrid;
        if (found.index && ctx->get_model().arch != LLM_ARCH_QWEN4EXP) {
            throw std::runtime_error("this architecture keeps groups of cells besides");
        }
        if (hybrid->get_qsa() && hybrid->get_qsa()->is_lean()) {
            // Rows that come back would have no pooled keys, and nothing to make them of.
            throw std::runtime_error("raw index keys are dropped (leave out --qsa-drop-raw-keys)");
        }
    } else if (auto * hybrid = dynamic_cast<llama_memory_hybrid *>(memory)) {
        found.attention = hybrid->get_mem_attn();
    } else if (auto * hybrid = dynamic_cast<llama_memory_hybrid_iswa *>(memory)) {
        found.attention = hybrid->get_mem_attn()->get_base();
    } else if (auto * iswa = dynamic_cast<llama_kv_cache_iswa *>(memory)) {
        found.attention = iswa->get_base();
    } else if (auto * cache = dynamic_cast<llama_kv_cache *>(memory)) {
        found.attention = cache;
    } else if (!dynamic_cast<llama_memory_recurrent *>(memory)) {
        throw std::runtime_error("nobody has written how the memory of this architecture is copied");
    }
    return found;
}

std::vector<kv_plane> planes_of(llama_context * ctx, int32_t seq) {
    const growing         caches = caches_of(ctx, seq);
    std::vector<kv_plane> planes;
    for (const llama_kv_cache * cache : { caches.attention, caches.index }) {
        if (cache && !kv_take::planes(*cache, seq, planes)) {
            throw std::runtime_error("its cells belong to another context");
        }
    }
    for (const kv_plane & plane : planes) {
        if (ggml_backend_buffer_is_meta(cells::buffer_of(plane.tensor))) {
            throw std::runtime_error("tensors are split over devices (-sm tensor); use -sm layer");
        }
    }
    return planes;
}

int32_t device_index(ggml_backend_buffer_t buffer) {
    if (ggml_backend_buffer_is_host(buffer)) {
        return -1;
    }
    ggml_backend_dev_t dev = ggml_backend_buft_get_device(ggml_backend_buffer_get_type(buffer));
    for (size_t i = 0; i < ggml_backend_dev_count(); ++i) {
        if (ggml_backend_dev_get(i) == dev) {
            return (int32_t) i;
        }
    }
    throw std::runtime_error("a buffer belongs to no device");
}

void copy_plane(const kv_plane & plane, bool to_host, int32_t cell, int32_t n, char * area, int32_t n_rows,
                int32_t row) {
    if (cell < 0 || n < 0 || (uint32_t) (cell + n) > plane.n_cells || row < 0 || row + n > n_rows) {
        throw std::runtime_error("the cells are not in the cache, or the rows not in the block");
    }
    for (uint32_t c = 0; c < plane.n_columns; ++c) {
        const size_t offset = ((size_t) c * plane.n_cells + cell) * plane.bytes;
        cells::copy_bytes(cells::bytes_of(plane.tensor, offset, n * plane.bytes),
                          area + ((size_t) c * n_rows + row) * plane.bytes, to_host);
    }
}

}  // namespace
#endif

int32_t mg_cells_planes(void * ctx, int32_t seq, struct mg_plane * out, int32_t n_max) {
    return mg::guarded("mg_cells_planes", (int32_t) -1, [&]() -> int32_t {
#ifndef MG_NO_SWITCHES
        const auto planes = planes_of(static_cast<llama_context *>(ctx), seq);
        for (int32_t i = 0; i < n_max && i < (int32_t) planes.size(); ++i) {
            const kv_plane & p = planes[i];
            out[i]             = {
                p.tensor->data,          p.bytes, p.n_cells, p.n_columns, device_index(cells::buffer_of(p.tensor)),
                (int32_t) p.tensor->type
            };
        }
        return (int32_t) planes.size();
#else
        (void) ctx, (void) seq, (void) out, (void) n_max;
        throw std::runtime_error("an unpatched build does not show its cells");
#endif
    });
}

int32_t mg_cells_find(void * ctx, int32_t seq, int32_t pos, int32_t n, int32_t * out_cells) {
    return mg::guarded("mg_cells_find", (int32_t) -1, [&]() -> int32_t {
#ifndef MG_NO_SWITCHES
        const growing caches = caches_of(static_cast<llama_context *>(ctx), seq);
        if (!caches.attention) {
            return 0;
        }
        if (!kv_take::find(*caches.attention, seq, pos, n, out_cells)) {
            throw std::runtime_error("the sequence does not hold these positions once each");
        }
        if (caches.index) {
            std::vector<int32_t> same(n);
            if (!kv_take::find(*caches.index, seq, pos, n, same.data()) ||
                !std::equal(same.begin(), same.end(), out_cells)) {
                throw std::runtime_error("the index keys lie in other cells");
            }
        }
        return 0;
#else
        (void) ctx, (void) seq, (void) pos, (void) n, (void) out_cells;
        throw std::runtime_error("an unpatched build does not show its cells");
#endif
    });
}

int32_t mg_cells_appends(void * ctx, int32_t seq, int32_t pos, int32_t n) {
    return mg::guarded("mg_cells_appends", (int32_t) -1, [&]() -> int32_t {
#ifndef MG_NO_SWITCHES
        const growing caches = caches_of(static_cast<llama_context *>(ctx), seq);
        if (!caches.attention || caches.attention->seq_pos_max(seq) != pos - 1) {
            return 0;
        }
        return kv_take::appends(*caches.attention, seq, pos, n) &&
               (!caches.index || kv_take::appends(*caches.index, seq, pos, n));
#else
        (void) ctx, (void) seq, (void) pos, (void) n;
        throw std::runtime_error("an unpatched build does not show its cells");
#endif
    });
}

int32_t mg_cells_place(void * ctx, int32_t seq, int32_t pos, int32_t n, const int32_t * tokens, int32_t * out_cells) {
    return mg::guarded("mg_cells_place", (int32_t) -1, [&]() -> int32_t {
#ifndef MG_NO_SWITCHES
        const growing  caches = caches_of(static_cast<llama_context *>(ctx), seq);
        const uint32_t n_pos  = static_cast<llama_context *>(ctx)->get_model().hparams.n_pos_per_embd();
        if (!caches.attention || n <= 0) {
            return 0;
        }
        if (caches.attention->seq_pos_max(seq) != pos - 1) {
            throw std::runtime_error("the sequence does not end where the new cells begin");
        }
        if (!kv_take::place(*caches.attention, seq, pos, n, tokens, n_pos, out_cells, false)) {
            throw std::runtime_error("the cache has no room for " + std::to_string(n) + " more tokens");
        }
        if (caches.index && !kv_take::place(*caches.index, seq, pos, n, tokens, n_pos, out_cells, true)) {
            caches.attention->seq_rm(seq, pos, -1);
            throw std::runtime_error("the cells are not free in the index cache");
        }
        if (caches.owner && caches.owner->get_qsa()) {
            caches.owner->get_qsa()->forget(seq);  // pooled keys are made again from the index keys
        }
        return 0;
#else
        (void) ctx, (void) seq, (void) pos, (void) n, (void) tokens, (void) out_cells;
        throw std::runtime_error("an unpatched build does not show its cells");
#endif
    });
}

int32_t mg_cells_adopt(void * ctx, int32_t seq, int32_t n, const int32_t * tokens) {
    return mg::guarded("mg_cells_adopt", (int32_t) -1, [&]() -> int32_t {
#ifndef MG_NO_SWITCHES
        const growing  caches = caches_of(static_cast<llama_context *>(ctx), seq);
        const uint32_t n_pos  = static_cast<llama_context *>(ctx)->get_model().hparams.n_pos_per_embd();
        if (!caches.attention || n <= 0) {
            return 0;
        }
        const int32_t n_first = kv_take::adopt(*caches.attention, seq, n, tokens, n_pos);
        if (!caches.index) {
            return n_first;
        }
        const int32_t n_second = kv_take::adopt(*caches.index, seq, n, tokens, n_pos);
        const int32_t n_both   = std::max(n_first, n_second);
        // What one of them lacks is short: both had as many cells once.
        for (auto [cache, m] : { std::pair{ caches.attention, n_first }, std::pair{ caches.index, n_second } }) {
            std::vector<int32_t> cells(n_both - m);
            if (m < n_both && !kv_take::place(*cache, seq, m, n_both - m, tokens + m, n_pos, cells.data(), false)) {
                throw std::runtime_error("the cache has no room");
            }
        }
        if (n_both > 0 && caches.owner && caches.owner->get_qsa()) {
            caches.owner->get_qsa()->forget(seq);
        }
        return n_both;
#else
        (void) ctx, (void) seq, (void) n, (void) tokens;
        throw std::runtime_error("an unpatched build does not show its cells");
#endif
    });
}

int32_t mg_cells_empty(void * ctx, int32_t seq) {
    return mg::guarded("mg_cells_empty", (int32_t) -1, [&]() -> int32_t {
#ifndef MG_NO_SWITCHES
        const growing caches = caches_of(static_cast<llama_context *>(ctx), seq);
        int32_t       done   = 0;
        for (llama_kv_cache * cache : { caches.attention, caches.index }) {
            done += cache && kv_take::empty(*cache, seq);
        }
        return done;
#else
        (void) ctx, (void) seq;
        return 0;
#endif
    });
}

int32_t mg_cells_copy(void * ctx, int32_t seq, int32_t to_host, int32_t plane, int32_t n_planes, int32_t cell,
                      int32_t n, void * block, int32_t n_rows, int32_t row) {
    return mg::guarded("mg_cells_copy", (int32_t) -1, [&]() -> int32_t {
#ifndef MG_NO_SWITCHES
        const auto planes = planes_of(static_cast<llama_context *>(ctx), seq);
        char *     area   = static_cast<char *>(block);
        for (int32_t i = 0; i < (int32_t) planes.size() && i < plane + n_planes; ++i) {
            if (i >= plane) {
                copy_plane(planes[i], to_host != 0, cell, n, area, n_rows, row);
            }
            area += planes[i].bytes * planes[i].n_columns * n_rows;
        }
        return 0;
#else
        (void) ctx, (void) seq, (void) to_host, (void) plane, (void) n_planes;
        (void) cell, (void) n, (void) block, (void) n_rows, (void) row;
        throw std::runtime_error("an unpatched build does not show its cells");
#endif
    });
}
