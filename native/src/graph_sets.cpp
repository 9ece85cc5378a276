#include "graph_sets.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "llama-context.h"
#include "llama-impl.h"
#include "llama-memory.h"
#include "llama-model.h"
#include "mg_switch.h"
#include "mg_trace.h"

namespace {

// Rows of decoders and of drafts being verified, and short prompts. Buffers grow with it, so it is not n_ubatch.
constexpr uint32_t n_tokens_small = 64;

constexpr int32_t n_sets_max = 8;

// A set may take this much, or half of what the context's own takes.
constexpr size_t n_bytes_cheap = 128ull << 20;

}  // namespace

graph_sets_return::~graph_sets_return() {
    ctx.graph_use(0);
}

void llama_context::graph_use(size_t i) {
    if (i == graphs.current) {
        return;
    }
    const auto exchange = [this](graph_set & set) {
        std::swap(sched, set.sched);
        std::swap(gf_res_prev, set.results);
        std::swap(gf_res_prev_active, set.active);
    };
    exchange(graphs.sets[graphs.current]);
    exchange(graphs.sets[i]);
    graphs.current = i;
}

// The set whose graph fits the ubatch, else the one that has not computed for longest: what alternates stays.
void llama_context::graph_select(const llama_ubatch & ubatch, llm_graph_type gtype,
                                 const llama_memory_context_i * mctx) {
    if (!graphs.is_on()) {
        return;
    }
    if (ubatch.n_tokens > graphs.n_tokens) {
        graph_use(0);
        return;
    }
    size_t oldest = 0;
    for (size_t i = 0; i < graphs.sets.size(); ++i) {
        graph_use(i);
        if (gf_res_prev_active && gf_res_prev_active == gf_res_prev[n_outputs > 0].get() &&
            gf_res_prev_active->can_reuse(graph_params(gf_res_prev_active, ubatch, mctx, gtype))) {
            if (graphs.sets[i].used != graphs.clock) {
                mg_trace_host(MG_TRACE_SPARED, (int32_t) i);
            }
            return;
        }
        if (graphs.sets[i].used < graphs.sets[oldest].used) {
            oldest = i;
        }
    }
    graph_use(oldest);
}

void llama_context::graph_forget() {
    if (graphs.is_on()) {
        gf_res_prev_active = nullptr;
        for (graph_set & set : graphs.sets) {
            set.active = nullptr;
        }
    }
}

void llama_context::graph_sets_update(bool anew) {
    const bool    can    = memory && !cparams.training && !graph_reuse_disable;
    const int32_t wanted = can ? std::clamp(mg_switch_value(MG_SMALL_GRAPHS), 0, n_sets_max) : 0;
    const int32_t qsa    = mg_switch_value(MG_QSA);  // other graphs, other buffers
    if (wanted == graphs.n_wanted && (wanted == 0 || qsa == graphs.qsa) && !anew) {
        return;
    }
    // Not synchronize(), which would count the tokens of the batch that begins.
    ggml_backend_sched_synchronize(sched.get());
    graph_use(0);
    graphs          = graph_sets();
    graphs.n_wanted = wanted;
    graphs.qsa      = qsa;
    if (wanted == 0) {
        return;
    }
    const bool   measured = model.hparams.no_alloc;
    const size_t n_own = std::accumulate(backend_ptrs.begin(), backend_ptrs.end(), (size_t) 0, [&](size_t n, auto b) {
        return n + ggml_backend_sched_get_buffer_size(sched.get(), b);
    });
    const size_t n_own_measured = std::accumulate(backend_buf_exp_size.begin(), backend_buf_exp_size.end(), (size_t) 0);
    const size_t n_most         = std::max((measured ? n_own_measured : n_own) / 2, n_bytes_cheap);

    graphs.n_tokens = std::min(std::min(cparams.n_ctx, cparams.n_ubatch), std::max(n_tokens_small, cparams.n_seq_max));
    graphs.sets.resize(1 + wanted);
    bool ok = true;
    for (int32_t i = 1; ok && i <= wanted; ++i) {
        graphs.sets[i].sched.reset(ggml_backend_sched_new(backend_ptrs.data(), backend_buft.data(), backend_ptrs.size(),
                                                          graph_max_nodes(graphs.n_tokens), cparams.pipeline_parallel,
                                                          cparams.op_offload));
        graph_use(i);
        ok = graph_set_reserve(graphs.sets[i].sizes, n_most);
        graph_use(0);
    }
    if (!ok) {
        graphs.sets.clear();
        return;
    }
    for (size_t b = 0; b < backend_ptrs.size(); ++b) {
        const size_t size = graphs.sets[1].sizes[b] * wanted;
        if (size > 1) {
            LLAMA_LOG_INFO("%s: %10s compute buffer size = %8.2f MiB more for %d graph%s of up to %u tokens\n",
                           __func__, ggml_backend_buft_name(backend_buft[b]), size / 1024.0 / 1024.0, wanted,
                           wanted == 1 ? "" : "s", graphs.n_tokens);
        }
    }
}

// Buffers for the set that the context holds, if they are not too large; a model without memory only gets their sizes.
bool llama_context::graph_set_reserve(std::vector<size_t> & sizes, size_t n_most) {
    const uint32_t n_seqs    = cparams.n_seq_max;
    const uint32_t n_outputs = std::min(graphs.n_tokens, cparams.n_outputs_max);
    const auto     mctx      = memory->init_full();
    sizes.assign(backend_ptrs.size(), 0);
    if (!mctx || !graph_reserve(graphs.n_tokens, n_seqs, n_outputs, mctx.get(), true, sizes.data())) {
        return false;
    }
    const size_t n_all = std::accumulate(sizes.begin(), sizes.end(), (size_t) 0);
    if (n_all > n_most) {
        LLAMA_LOG_INFO("%s: graphs of small ubatches would take %.0f MiB each, so there is one graph\n", __func__,
                       n_all / 1024.0 / 1024.0);
        return false;
    }
    if (model.hparams.no_alloc) {
        return true;
    }
    // Decoding comes last: it leaves its layout, and the first step finds it.
    if (!graph_reserve(graphs.n_tokens, n_seqs, n_outputs, mctx.get()) ||
        !graph_reserve(n_seqs, n_seqs, n_seqs, mctx.get())) {
        LLAMA_LOG_WARN("%s: no room for graphs of small ubatches, so there is one graph\n", __func__);
        return false;
    }
    for (size_t b = 0; b < backend_ptrs.size(); ++b) {
        sizes[b] = ggml_backend_sched_get_buffer_size(sched.get(), backend_ptrs[b]);
    }
    return true;
}

void llama_context::graph_sets_memory(llama_memory_breakdown & out) const {
    for (size_t i = 1; i < graphs.sets.size(); ++i) {
        for (size_t b = 0; b < backend_ptrs.size(); ++b) {
            ggml_backend_t             backend = backend_ptrs[b];
            ggml_backend_buffer_type_t buft    = ggml_backend_sched_get_buffer_type(sched.get(), backend);
            out[buft].compute += model.hparams.no_alloc
                                     ? graphs.sets[i].sizes[b]
                                     : ggml_backend_sched_get_buffer_size(graphs.sets[i].sched.get(), backend);
        }
    }
}
