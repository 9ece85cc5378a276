// Native QSA without raw index keys. A ring per stream keeps the raw keys of the last positions, enough for blocks that
// are not complete yet; what was pooled cannot be pooled again, so it is copied with a sequence and saved with its
// state.
#include <algorithm>
#include <limits>
#include <stdexcept>

#include "ggml-backend.h"
#include "llama-batch.h"
#include "llama-impl.h"
#include "llama-io.h"
#include "llama-kv-cache.h"
#include "llama-model.h"
#include "mg_switch.h"
#include "qsa_memory.h"

namespace {

constexpr int64_t GONE = std::numeric_limits<int64_t>::max();

// Rows of pooled keys and positions of raw keys that follow in a state.
struct state_header {
    int64_t magic, n_pooled, raw_from, raw_to;
};

constexpr int64_t MAGIC = 0x6e61656c61737171;

}  // namespace

bool qsa_memory::drops_raw(const llama_model & model) {
    return model.arch == LLM_ARCH_QWEN4EXP && mg_switch_value(MG_QSA) && mg_switch_value(MG_QSA_DROP_RAW);
}

std::function<bool(int32_t)> qsa_memory::index_layers(const llama_model & model, std::function<bool(int32_t)> filter) {
    return drops_raw(model) ? [](int32_t) { return false; } : std::move(filter);
}

ggml_tensor * qsa_memory::keys(ggml_context * ctx, int32_t il, ggml_tensor * written) const {
    ggml_tensor * all = written ? written : layers.at(il);
    return ggml_view_2d(ctx, all, all->ne[0], all->ne[1] - lean, all->nb[1], 0);
}

// Positions from p0 on are forgotten.
void qsa_memory::lean_remove(stream_state & state, int64_t p0) const {
    if (!lean) {
        return;
    }
    if (p0 == 0) {
        state = stream_state();
    } else if (p0 % r == 0) {
        state.raw_from = std::min(state.raw_from, p0);  // the next block begins with the next token
    } else if (state.saved_from < p0 && p0 <= state.saved_to) {
        state.raw_from = state.saved_from;
    }
    state.saved_to = -1;
}

// Why the ubatch cannot be computed in this stream, which follow() has advanced.
std::string qsa_memory::lean_obstacle(uint32_t stream, const llama_ubatch & ubatch) const {
    const stream_state & state    = streams[stream];
    int64_t              n_tokens = 0;
    for (uint32_t i = 0; i < ubatch.n_tokens; ++i) {
        n_tokens += idx.get_stream(ubatch.seq_id[i][0]) == stream;
    }
    const int64_t before = state.n_same - n_tokens;  // tokens that were there
    const int64_t first  = state.n_pooled * r;       // of the block that is next
    if (n_tokens > n_ring - 2 * r) {
        return format("a ubatch has more than %d tokens of a sequence (use a smaller --ubatch-size)",
                      (int) (n_ring - 2 * r));
    }
    if (before / r > state.n_pooled || (before > first && first < state.raw_from)) {
        return "keys of the sequence are gone: it was cut inside a block, or restored from a state without them";
    }
    return "";
}

void qsa_memory::fill_inputs(const llama_ubatch & ubatch) {
    const int64_t n_stream = (int64_t) range.size() / 4;
    const int64_t n        = n_slot(ubatch.n_tokens, n_stream);
    const int64_t per      = n_cell / r;
    lean_in.cells.clear();
    lean_in.gather.assign(r * n, 0);
    lean_in.pos.assign(4 * n, 0);
    lean_in.rows.assign(n, per * (int64_t) streams.size());
    for (uint32_t i = 0; i < ubatch.n_tokens; ++i) {
        lean_in.cells.push_back(idx.get_stream(ubatch.seq_id[i][0]) * n_ring + ubatch.pos[i] % n_ring);
    }
    int64_t k = 0;
    for (int64_t i = 0; i < n_stream; ++i) {
        stream_state & state = streams[range[4 * i]];
        for (int64_t b = range[4 * i + 1]; b < range[4 * i + 2]; ++b, ++k) {
            GGML_ASSERT(k < n);
            for (int64_t j = 0; j < r; ++j) {
                lean_in.gather[k * r + j] = (int32_t) (range[4 * i] * n_ring + (b * r + j) % n_ring);
            }
            for (int64_t section = 0; section < 4; ++section) {
                lean_in.pos[section * n + k] = (int32_t) (b * r);
            }
            lean_in.rows[k] = range[4 * i] * per + b;
        }
        // also if the ubatch fails: its rows may have been written
        state.raw_from = std::max(state.raw_from, state.n_same - n_ring);
    }
}

void qsa_memory::copy(llama_seq_id from, llama_seq_id to) {
    const uint32_t a = idx.get_stream(from);
    const uint32_t b = idx.get_stream(to);
    if (!lean || a == b) {
        forget(to);
        return;
    }
    pending.emplace_back(a, b);
    streams[b]         = streams[a];
    streams[b].owner   = to;
    streams[b].unknown = true;
}

void qsa_memory::copy_pending() {
    for (const auto & [a, b] : pending) {
        for (const auto * storages : { &layers, &rings }) {
            for (const auto & [il, t] : *storages) {
                const int64_t    n = storages == &rings ? n_ring : n_cell / r;
                ggml_context_ptr ctx(ggml_init({ 2 * ggml_tensor_overhead(), nullptr, true }));
                const auto       part = [&, t = t](uint32_t s) {
                    ggml_tensor * view = ggml_view_2d(ctx.get(), t, t->ne[0], n, t->nb[1], s * n * t->nb[1]);
                    ggml_backend_view_init(view);
                    return view;
                };
                ggml_backend_tensor_copy(part(a), part(b));
            }
        }
    }
    pending.clear();
}

void qsa_memory::state_write(llama_io_write_i & io, llama_seq_id seq, bool partial) const {
    if (!lean) {
        return;
    }
    for (uint32_t s = 0; s < streams.size(); ++s) {
        if (seq >= 0 && s != idx.get_stream(seq)) {
            continue;
        }
        stream_state       state = streams[s];
        const llama_seq_id owner = seq >= 0 ? seq : std::max(state.owner, 0);
        if (state.unknown) {
            recount(state, owner);
        }
        const int64_t first = state.n_pooled * r;
        state_header  head  = { MAGIC, partial ? 0 : state.n_pooled, first, state.n_same };
        if (state.n_same / r != state.n_pooled || (state.n_same > first && first < state.raw_from)) {
            head = { MAGIC, 0, GONE, GONE };
        }
        io.write(&head, sizeof(head));
        for (const auto & [il, pooled] : layers) {
            ggml_tensor * ring = rings.at(il);
            if (head.n_pooled > 0) {
                io.write_tensor(pooled, s * (size_t) (n_cell / r) * pooled->nb[1], head.n_pooled * pooled->nb[1]);
            }
            if (head.raw_to > head.raw_from) {
                io.write_tensor(ring, (s * n_ring + head.raw_from % n_ring) * ring->nb[1],
                                (head.raw_to - head.raw_from) * ring->nb[1]);
            }
        }
    }
}

void qsa_memory::state_read(llama_io_read_i & io, llama_seq_id seq, bool partial) {
    if (!lean) {
        forget(seq);
        return;
    }
    for (uint32_t s = 0; s < streams.size(); ++s) {
        if (seq >= 0 && s != idx.get_stream(seq)) {
            continue;
        }
        state_header head;
        io.read(&head, sizeof(head));
        const bool is_gone = head.raw_from == GONE;
        if (head.magic != MAGIC || head.n_pooled < 0 || head.n_pooled > n_cell / r ||
            (!is_gone && (head.raw_from < 0 || head.raw_from % r != 0 || head.raw_to < head.raw_from ||
                          head.raw_to >= head.raw_from + r))) {
            throw std::runtime_error("the state has no pooled keys of QSA");
        }
        for (const auto & [il, pooled] : layers) {
            ggml_tensor * ring = rings.at(il);
            if (head.n_pooled > 0) {
                io.read_tensor(pooled, s * (size_t) (n_cell / r) * pooled->nb[1], head.n_pooled * pooled->nb[1]);
            }
            if (head.raw_to > head.raw_from) {
                io.read_tensor(ring, (s * n_ring + head.raw_from % n_ring) * ring->nb[1],
                               (head.raw_to - head.raw_from) * ring->nb[1]);
            }
        }
        stream_state & state = streams[s];
        if (!partial) {
            state          = stream_state();
            state.owner    = seq >= 0 ? seq : (llama_seq_id) s;
            state.n_pooled = head.n_pooled;
            state.raw_from = head.raw_from;
            state.unknown  = true;
        } else if (!is_gone) {
            // The sequence is cut there next, or was already.
            state.saved_from = head.raw_from;
            state.saved_to   = head.raw_to;
            if (state.n_same == head.raw_to) {
                state.raw_from = head.raw_from;
            }
        }
    }
}
