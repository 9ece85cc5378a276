// Which pooled keys are valid: how far the cells of a stream are its positions, and what has to be pooled next.
#include <algorithm>
#include <cinttypes>

#include "llama-batch.h"
#include "llama-impl.h"
#include "llama-kv-cache.h"
#include "mg_switch.h"
#include "qsa_memory.h"
#include "qsa_stats.h"

namespace {

// Image tokens have a row and a column besides the position; text repeats the position.
bool is_text_position(const llama_ubatch & ubatch, uint32_t i) {
    for (uint32_t section = 1; section < std::min(ubatch.n_pos, 3u); ++section) {
        if (ubatch.pos[section * ubatch.n_tokens + i] != ubatch.pos[i]) {
            return false;
        }
    }
    return true;
}

}  // namespace

void qsa_memory::clear() {
    streams.assign(streams.size(), stream_state());
}

void qsa_memory::forget(llama_seq_id seq) {
    for (size_t s = 0; s < streams.size(); ++s) {
        if (seq >= 0 && s != idx.get_stream(seq)) {
            continue;
        }
        if (lean) {
            // What is pooled cannot be pooled again; it stays valid as far as the cells are found to be positions.
            if (idx.get_cells(seq < 0 ? (llama_seq_id) s : seq).get_used() == 0) {
                streams[s] = stream_state();
            }
        } else {
            streams[s].n_pooled = 0;
        }
        streams[s].unknown = true;
    }
}

void qsa_memory::remove(llama_seq_id seq, llama_pos p0) {
    if (seq < 0 || streams[idx.get_stream(seq)].owner != seq) {
        forget(seq);
        return;
    }
    // Raw keys below p0 are still there; the block that p0 cuts is pooled again when it is complete again.
    stream_state & state = streams[idx.get_stream(seq)];
    p0                   = std::max<llama_pos>(p0, 0);
    lean_remove(state, p0);
    state.n_same   = std::min<int64_t>(state.n_same, p0);
    state.n_pooled = std::min<int64_t>(state.n_pooled, p0 / r);
}

void qsa_memory::take_over(const qsa_memory & from, llama_seq_id seq_from, llama_seq_id seq_to,
                           const copy_bytes & copy) {
    const uint32_t       stream_from = from.idx.get_stream(seq_from);
    const uint32_t       stream_to   = idx.get_stream(seq_to);
    const stream_state & source      = from.streams[stream_from];
    if (from.buffers.empty() || buffers.empty() || lean != from.lean || source.owner != seq_from ||
        (!lean && source.n_pooled == 0)) {
        return;
    }
    // A block's key depends on the raw keys at its positions only, so it is valid wherever the cells are positions.
    const int64_t n_row = std::min<int64_t>(source.n_pooled, n_cell / r);
    for (const auto & [il, pooled] : layers) {
        ggml_tensor * theirs = from.layers.at(il);
        copy(theirs, stream_from * (size_t) (from.n_cell / r) * theirs->nb[1], pooled,
             stream_to * (size_t) (n_cell / r) * pooled->nb[1], n_row * pooled->nb[1]);
    }
    stream_state & target = streams[stream_to];
    target                = stream_state();
    target.owner          = seq_to;
    target.n_pooled       = n_row;
    target.unknown        = true;
    if (lean) {
        for (const auto & [il, mine] : rings) {
            ggml_tensor * theirs = from.rings.at(il);
            copy(theirs, stream_from * n_ring * theirs->nb[1], mine, stream_to * n_ring * mine->nb[1],
                 n_ring * mine->nb[1]);
        }
        target.raw_from = source.raw_from;
    }
}

void qsa_memory::recount(stream_state & state, llama_seq_id seq) const {
    const auto &  cells = idx.get_cells(seq);
    const int64_t n     = cells.used_max_p1();
    int64_t       w     = 0;
    while (w < n && !cells.is_empty(w) && cells.pos_get(w) == w && cells.seq_count(w) == 1 && cells.seq_has(w, seq)) {
        ++w;
    }
    if (state.owner != seq) {
        state.n_pooled = 0;
    }
    state.owner    = seq;
    state.n_same   = w;
    state.n_pooled = std::min(state.n_pooled, w / r);
    state.unknown  = false;
}

// Advance the streams of the ubatch and list them in the order in which they appear.
void qsa_memory::follow(const llama_ubatch & ubatch, std::vector<uint32_t> & touched) {
    std::vector<bool> counted(streams.size(), false);
    for (uint32_t i = 0; i < ubatch.n_tokens; ++i) {
        const llama_seq_id seq   = ubatch.seq_id[i][0];
        const uint32_t     s     = idx.get_stream(seq);
        stream_state &     state = streams[s];
        if (std::find(touched.begin(), touched.end(), s) == touched.end()) {
            touched.push_back(s);
            if (state.unknown) {
                recount(state, seq);
                counted[s] = true;
            }
        }
        if (counted[s]) {
            continue;
        }
        if (state.n_same == 0) {
            state.owner    = seq;
            state.n_pooled = 0;
        }
        const auto & cells = idx.get_cells(seq);
        const auto   pos   = ubatch.pos[i];
        if (is_text_position(ubatch, i) && ubatch.n_seq_id[i] == 1 && seq == state.owner && pos == state.n_same &&
            pos < n_cell && !cells.is_empty(pos) && cells.pos_get(pos) == pos) {
            ++state.n_same;
        }
    }
}

bool qsa_memory::begin(const llama_ubatch & ubatch, uint32_t n_stream) {
    range.clear();
    submitted = false;
    if (!wanted()) {
        // Not followed: the cells are counted when the switch is on again. Pooled keys stay valid, edits still lower P.
        if (mg_switch_value(MG_QSA)) {
            qsa_count_fallback("off for this context: " + reason);
        }
        for (uint32_t i = 0; i < ubatch.n_seqs_unq; ++i) {
            streams[idx.get_stream(ubatch.seq_id_unq[i])].unknown = true;
        }
        return false;
    }
    std::vector<uint32_t> touched;
    follow(ubatch, touched);
    int64_t n_new = 0;
    for (const uint32_t s : touched) {
        const stream_state & state = streams[s];
        const auto &         cells = idx.get_cells(state.owner);
        if (cells.get_used() != state.n_same || cells.used_max_p1() != state.n_same) {
            fall_back(
                "the cells of a sequence are not its positions (edited in the middle, shared, not from 0 on, or an "
                "image)");
            return false;
        }
        n_new += state.n_same / r - state.n_pooled;
        if (lean) {
            const std::string gone = lean_obstacle(s, ubatch);
            if (!gone.empty()) {
                fall_back(gone.c_str());
                return false;
            }
        }
    }
    if (touched.size() != n_stream) {
        fall_back("the ubatch has tokens of one stream in several places");
        return false;
    }
    for (const uint32_t s : touched) {
        range.insert(range.end(), { (int32_t) s, (int32_t) streams[s].n_pooled, (int32_t) (streams[s].n_same / r), 0 });
    }
    if (lean) {
        fill_inputs(ubatch);
    } else if (n_new > ubatch.n_tokens / r + (int64_t) touched.size()) {
        LLAMA_LOG_INFO("%s: rebuilding %" PRId64 " pooled keys of QSA per layer\n", __func__, n_new);
    }
    return true;
}

int64_t qsa_memory::collect(uint32_t n_seq) {
    range.clear();
    int64_t n_new = 0;
    for (uint32_t seq = 0; seq < n_seq; ++seq) {
        const uint32_t s     = idx.get_stream(seq);
        const auto &   cells = idx.get_cells(seq);
        if (cells.get_used() == 0 || !cells.seq_has(0, seq)) {
            continue;
        }
        stream_state & state = streams[s];
        recount(state, seq);
        if (cells.get_used() == state.n_same && state.n_pooled < state.n_same / r) {
            range.insert(range.end(), { (int32_t) s, (int32_t) state.n_pooled, (int32_t) (state.n_same / r), 0 });
            n_new += state.n_same / r - state.n_pooled;
        }
    }
    return n_new;
}

void qsa_memory::adopt(int64_t us) {
    for (size_t i = 0; i < range.size(); i += 4) {
        qsa_total.n_rebuilt += range[i + 2] - range[i + 1];
        qsa_total.n_pooled += range[i + 2] - range[i + 1];
        streams[range[i]].n_pooled = range[i + 2];
    }
    qsa_total.us_rebuilt += us;
}

void qsa_memory::fall_back(const char * reason) {
    if (lean) {
        LLAMA_LOG_ERROR("%s: a ubatch cannot be computed without raw index keys: %s\n", __func__, reason);
        return;
    }
    qsa_count_fallback(reason);
    if (!said) {
        said = true;
        LLAMA_LOG_WARN("%s: upstream's attention computes a ubatch: %s. Said once, counted always\n", __func__, reason);
    }
}

void qsa_memory::commit() {
    if (!submitted) {
        return;
    }
    submitted = false;
    ++qsa_total.n_native;
    for (size_t i = 0; i < range.size(); i += 4) {
        qsa_total.n_pooled += range[i + 2] - range[i + 1];
        streams[range[i]].n_pooled = range[i + 2];
    }
}
