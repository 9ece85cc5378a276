// Rows of a KV cache: where they lie, which cell holds which position, and cells for rows that are copied in.
#include <algorithm>
#include <memory>
#include <numeric>

#include "cells_stash.h"
#include "handover_cells.h"
#include "llama-batch.h"
#include "llama-hparams.h"

bool kv_take::planes(const llama_kv_cache & cache, llama_seq_id seq, std::vector<kv_plane> & out) {
    if (cache.other) {
        return false;
    }
    const uint32_t stream = cache.seq_to_stream[seq];
    const uint32_t size   = cache.v_cells[stream].size();
    for (const auto & layer : cache.layers) {
        ggml_tensor * k = layer.k_stream[stream];
        out.push_back({ k, size, 1, ggml_row_size(k->type, cache.hparams.n_embd_k_gqa(layer.il)) });
    }
    for (const auto & layer : cache.layers) {
        ggml_tensor * v = layer.v_stream[stream];
        if (!v) {
            continue;
        }
        const uint32_t n = cache.hparams.n_embd_v_gqa(layer.il);
        if (cache.v_trans) {
            out.push_back({ v, size, n, ggml_type_size(v->type) });
        } else {
            out.push_back({ v, size, 1, ggml_row_size(v->type, n) });
        }
    }
    return true;
}

bool kv_take::find(const llama_kv_cache & cache, llama_seq_id seq, llama_pos pos, int32_t n, int32_t * out) {
    const llama_kv_cells & cells      = cache.v_cells[cache.seq_to_stream[seq]];
    const auto             holds      = [&](uint32_t i) { return !cells.is_empty(i) && cells.seq_has(i, seq); };
    int32_t                n_in_place = 0;
    while (n_in_place < n && (uint32_t) (pos + n_in_place) < cells.size() && holds(pos + n_in_place) &&
           cells.pos_get(pos + n_in_place) == pos + n_in_place) {
        out[n_in_place] = pos + n_in_place;
        ++n_in_place;
    }
    if (n_in_place == n) {
        return true;
    }
    std::fill(out, out + n, -1);
    int32_t n_found = 0;
    for (uint32_t i = 0; i < cells.used_max_p1(); ++i) {
        if (!holds(i)) {
            continue;
        }
        const llama_pos p = cells.pos_get(i);
        if (p < pos || p >= pos + n) {
            continue;
        }
        if (out[p - pos] >= 0) {
            return false;
        }
        out[p - pos] = (int32_t) i;
        ++n_found;
    }
    return n_found == n;
}

namespace {

// As apply_ubatch() leaves the cell of a token of text.
llama_kv_cell_ext text_ext(llama_token token, llama_pos pos, uint32_t n_pos) {
    llama_kv_cell_ext ext;
    ext.tok = token;
    if (n_pos >= 3) {
        ext.x = ext.y = pos;
    }
    return ext;
}

}  // namespace

bool kv_take::appends(const llama_kv_cache & cache, llama_seq_id seq, llama_pos pos, int32_t n) {
    const llama_kv_cells & cells = cache.v_cells[cache.seq_to_stream[seq]];
    return cache.n_stream == cache.n_seq_max && cache.n_swa == 0 && cells.used_max_p1() <= (uint32_t) pos &&
           (uint32_t) (pos + n) <= cells.size();
}

// The ordered sets grow at their ends.
bool kv_take::append(llama_kv_cache & cache, llama_seq_id seq, llama_pos pos, int32_t n, const llama_token * tokens,
                     uint32_t n_pos) {
    if (!appends(cache, seq, pos, n)) {
        return false;
    }
    llama_kv_cells & cells     = cache.v_cells[cache.seq_to_stream[seq]];
    auto &           positions = cells.seq_pos[seq];
    for (int32_t i = 0; i < n; ++i) {
        const llama_pos p = pos + i;
        cells.pos[p]      = p;
        cells.ext[p]      = text_ext(tokens[i], p, n_pos);
        cells.seq[p].set(seq);
        cells.used.insert(cells.used.end(), (uint32_t) p);
        positions.emplace_hint(positions.end(), p, (uint32_t) p);
    }
    cache.v_heads[cache.seq_to_stream[seq]] = pos + n;
    return true;
}

int32_t kv_take::adopt(llama_kv_cache & cache, llama_seq_id seq, int32_t n, const llama_token * tokens,
                       uint32_t n_pos) {
    llama_kv_cells & cells     = cache.v_cells[cache.seq_to_stream[seq]];
    auto &           positions = cells.seq_pos[seq];
    if (!appends(cache, seq, 0, n) || !cells.used.empty() || !positions.empty()) {
        return 0;
    }
    cells_stash::sets sets = cells_stash::all().take(n);
    const auto        m    = (int32_t) sets.used.size();
    for (int32_t i = 0; i < m; ++i) {
        cells.pos[i] = i;
        cells.ext[i] = text_ext(tokens[i], i, n_pos);
        cells.seq[i].set(seq);
    }
    cells.used.swap(sets.used);
    positions.swap(sets.positions);
    cache.v_heads[cache.seq_to_stream[seq]] = m;
    return m;
}

bool kv_take::empty(llama_kv_cache & cache, llama_seq_id seq) {
    if (cache.other || cache.n_stream != cache.n_seq_max) {
        return false;
    }
    llama_kv_cells & cells     = cache.v_cells[cache.seq_to_stream[seq]];
    auto &           positions = cells.seq_pos[seq];
    const uint32_t   n         = cells.used.size();
    if (n < cells_stash::N_MIN || cells.has_shift || cells.used_max_p1() != n || positions.size() != n) {
        return false;
    }
    for (uint32_t i = 0; i < n; ++i) {
        if (cells.pos[i] != (llama_pos) i || cells.seq[i].count() != 1) {
            return false;
        }
    }
    cells_stash::sets sets;
    sets.used.swap(cells.used);
    sets.positions.swap(positions);
    cells_stash::all().give(std::move(sets));
    for (uint32_t i = 0; i < n; ++i) {
        cells.pos[i] = -1;
        cells.ext[i].reset();
        cells.shift[i] = 0;
        cells.seq[i].reset();
    }
    cache.v_heads[cache.seq_to_stream[seq]] = 0;
    return true;
}

bool kv_take::place(llama_kv_cache & cache, llama_seq_id seq, llama_pos pos, int32_t n, const llama_token * tokens,
                    uint32_t n_pos, int32_t * out, bool like) {
    bool is_in_place = true;
    for (int32_t i = 0; like && i < n; ++i) {
        is_in_place = is_in_place && out[i] == pos + i;
    }
    if (is_in_place && append(cache, seq, pos, n, tokens, n_pos)) {
        std::iota(out, out + n, pos);
        return true;
    }
    const uint32_t         stream = cache.seq_to_stream[seq];
    const llama_kv_cells & cells  = cache.v_cells[stream];

    // As for a batch of text: every section of a position is the position.
    llama_batch_allocr allocr(n_pos);
    llama_ubatch       ubatch = allocr.ubatch_reserve(n, 1);
    ubatch.seq_id_unq[0]      = seq;
    for (int32_t i = 0; i < n; ++i) {
        for (uint32_t section = 0; section < ubatch.n_pos; ++section) {
            ubatch.pos[section * n + i] = pos + i;
        }
        ubatch.token[i]    = tokens[i];
        ubatch.n_seq_id[i] = 1;
        ubatch.seq_id[i]   = &seq;
    }

    llama_kv_cache::slot_info where;
    where.s0 = where.s1 = stream;
    where.resize(1);
    where.strm[0] = stream;
    if (like) {
        where.idxs[0].assign(out, out + n);
    } else {
        where.idxs[0].resize(n);
        std::iota(where.idxs[0].begin(), where.idxs[0].end(), (uint32_t) pos);
    }
    const auto is_free = [&](uint32_t i) { return i < cells.size() && cells.is_empty(i); };
    if (!std::all_of(where.idxs[0].begin(), where.idxs[0].end(), is_free)) {
        if (like) {
            return false;
        }
        where = cache.find_slot(ubatch, false);
        if (where.empty() || !std::all_of(where.idxs[0].begin(), where.idxs[0].end(), is_free)) {
            return false;  // a window may offer cells it still needs for other rows of this copy
        }
    }
    cache.apply_ubatch(where, ubatch);
    std::copy(where.idxs[0].begin(), where.idxs[0].end(), out);
    return true;
}
