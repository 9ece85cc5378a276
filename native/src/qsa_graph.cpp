#include "qsa_graph.h"

#include <memory>
#include <vector>

#include "llama-cparams.h"
#include "llama-impl.h"
#include "llama-memory-hybrid-idx.h"
#include "llama-model.h"
#include "qsa.h"
#include "qsa_memory.h"

namespace {

bool is_native(const llama_memory_hybrid_idx_context * mctx, const llama_cparams & cparams) {
    return mctx->get_qsa() != nullptr && cparams.causal_attn && cparams.flash_attn && !cparams.training;
}

template <typename T>
void set(ggml_tensor * tensor, const std::vector<T> & values) {
    GGML_ASSERT(values.size() == (size_t) ggml_nelements(tensor));
    ggml_backend_tensor_set(tensor, values.data(), 0, ggml_nbytes(tensor));
}

// Present in both kinds of graph, so that neither is reused for a ubatch of the other kind.
class qsa_graph_input : public llm_graph_input_i {
public:
    qsa_graph_input(const llama_memory_hybrid_idx_context * mctx, bool native, int64_t n_stream)
        : mctx(mctx), native(native) {
        tensors.n_stream = n_stream;
    }

    void set_input(const llama_ubatch *) override {
        if (!native) {
            return;
        }
        qsa_memory * memory = mctx->get_qsa();
        GGML_ASSERT(memory && "a native QSA graph was given a ubatch of the other kind");
        if (tensors.range) {
            set(tensors.range, memory->ranges());
        } else {
            set(tensors.cells, memory->inputs().cells);
            set(tensors.gather, memory->inputs().gather);
            set(tensors.pos, memory->inputs().pos);
            set(tensors.rows, memory->inputs().rows);
        }
        memory->submit();
    }

    bool can_reuse(const llm_graph_params & params) override {
        mctx = static_cast<const llama_memory_hybrid_idx_context *>(params.mctx);
        return is_native(mctx, params.cparams) == native && (!native || tensors.n_stream == mctx->get_n_stream());
    }

    qsa_graph_tensors tensors;

private:
    const llama_memory_hybrid_idx_context * mctx;
    const bool                              native;
};

// With -nkvo everything that touches the cache runs where the cache is.
void pin(const llm_graph_context & g, ggml_tensor * op) {
    if (!g.cparams.offload_kqv) {
        ggml_backend_sched_set_tensor_backend(g.sched, op, g.backend_cpu);
    }
}

}  // namespace

const qsa_graph_tensors * qsa_graph_begin(const llm_graph_context & g, const llama_memory_hybrid_idx_context * mctx) {
    const bool    native   = is_native(mctx, g.cparams);
    const int64_t n_stream = native ? mctx->get_n_stream() : 0;
    auto          made     = std::make_unique<qsa_graph_input>(mctx, native, n_stream);
    auto *        in       = &made->tensors;
    g.res->add_input(std::move(made));
    if (!native) {
        return nullptr;
    }
    const qsa_memory * memory = mctx->get_qsa();
    const auto         input  = [&](ggml_type type, int64_t n, int64_t n_row, const char * name) {
        ggml_tensor * t = ggml_new_tensor_2d(g.ctx0, type, n, n_row);
        ggml_set_input(t);
        g.cb(t, name, -1);
        return t;
    };
    if (!memory->is_lean()) {
        in->range = input(GGML_TYPE_I32, 4, n_stream, "qsa_range");
        return in;
    }
    const int64_t n = memory->n_slot(g.n_tokens, n_stream);
    in->cells       = input(GGML_TYPE_I64, g.n_tokens, 1, "qsa_cells");
    in->gather      = input(GGML_TYPE_I32, memory->ratio() * n, 1, "qsa_gather");
    in->pos         = input(GGML_TYPE_I32, 4 * n, 1, "qsa_pos");
    in->rows        = input(GGML_TYPE_I64, n, 1, "qsa_rows");
    return in;
}

namespace {

// Stores raw keys [d, 1, T] in the index cache and pools there.
ggml_tensor * pool_stored(const llm_graph_context & g, const llama_memory_hybrid_idx_context * mctx,
                          const llama_layer & layer, llm_graph_input_attn_kv * inp, const qsa_graph_tensors * in,
                          ggml_tensor * raw, int il) {
    const qsa_memory * memory = mctx->get_qsa();
    // Slot infos are shared, so attention's cell indices serve the index cache too.
    ggml_tensor * stored = mctx->get_idx()->cpy_k(g.ctx0, raw, inp->get_k_idxs(), il);
    ggml_build_forward_expand(g.gf, stored);
    const qsa_rope rope = { (int32_t) g.n_rot, g.n_ctx_orig,  g.freq_base, g.freq_scale,
                            g.ext_factor,      g.attn_factor, g.beta_fast, g.beta_slow };
    return ggml_qsa_pool(g.ctx0, stored, memory->pooled(il), layer.index_k_norm, in->range, memory->ratio(),
                         memory->kv_size(), g.norm_rms_eps, &rope);
}

// The same by ggml's own operations on a ring, which POOL cannot read.
ggml_tensor * pool_ring(const llm_graph_context & g, const qsa_memory * memory, const llama_layer & layer,
                        const qsa_graph_tensors * in, ggml_tensor * raw, int * sections, int il) {
    const int64_t d = raw->ne[0];
    const int64_t r = memory->ratio();
    const int64_t n = in->rows->ne[0];

    ggml_tensor * stored =
        ggml_set_rows(g.ctx0, memory->ring(il), ggml_reshape_2d(g.ctx0, raw, d, g.n_tokens), in->cells);
    ggml_tensor * members = ggml_reshape_3d(g.ctx0, ggml_get_rows(g.ctx0, stored, in->gather), d, r, n);
    ggml_tensor * key     = nullptr;
    for (int64_t j = 0; j < r; ++j) {
        ggml_tensor * one = ggml_cont(g.ctx0, ggml_view_2d(g.ctx0, members, d, n, members->nb[2], j * members->nb[1]));
        key               = key ? ggml_add(g.ctx0, key, one) : one;
    }
    key = g.build_norm(ggml_scale(g.ctx0, key, 1.0f / (float) r), layer.index_k_norm, nullptr, LLM_NORM_RMS, il);
    key =
        ggml_rope_multi(g.ctx0, ggml_reshape_3d(g.ctx0, key, d, 1, n), in->pos, nullptr, g.n_rot, sections, g.rope_type,
                        g.n_ctx_orig, g.freq_base, g.freq_scale, g.ext_factor, g.attn_factor, g.beta_fast, g.beta_slow);
    ggml_tensor * written = ggml_set_rows(g.ctx0, memory->pooled(il), ggml_reshape_2d(g.ctx0, key, d, n), in->rows);
    ggml_build_forward_expand(g.gf, written);
    return memory->keys(g.ctx0, il, written);
}

}  // namespace

ggml_tensor * qsa_graph_select(const llm_graph_context & g, const llama_memory_hybrid_idx_context * mctx,
                               const llama_layer & layer, llm_graph_input_attn_kv * inp, const qsa_graph_tensors * in,
                               ggml_tensor * cur, ggml_tensor * inp_pos, int * sections, int il) {
    const qsa_memory * memory = mctx->get_qsa();
    const int64_t      d      = g.hparams.indexer_head_size;
    const int64_t      h      = g.hparams.indexer_n_head;

    ggml_tensor * raw = ggml_reshape_3d(g.ctx0, g.build_lora_mm(layer.index_k_proj, cur), d, 1, g.n_tokens);
    g.cb(raw, "indexer_k_raw", il);
    ggml_tensor * pooled = memory->is_lean() ? pool_ring(g, memory, layer, in, raw, sections, il)
                                             : pool_stored(g, mctx, layer, inp, in, raw, il);
    g.cb(pooled, "indexer_k", il);
    ggml_build_forward_expand(g.gf, pooled);

    ggml_tensor * q = ggml_reshape_3d(g.ctx0, g.build_lora_mm(layer.index_q_proj, cur), d, h, g.n_tokens);
    q               = g.build_norm(q, layer.index_q_norm, nullptr, LLM_NORM_RMS, il);
    q = ggml_rope_multi(g.ctx0, q, inp_pos, nullptr, g.n_rot, sections, g.rope_type, g.n_ctx_orig, g.freq_base,
                        g.freq_scale, g.ext_factor, g.attn_factor, g.beta_fast, g.beta_slow);
    g.cb(q, "indexer_q", il);

    ggml_tensor * selected =
        ggml_qsa_select(g.ctx0, q, pooled, inp->get_k_idxs(), memory->ratio(), memory->kv_size(), memory->n_top());
    g.cb(selected, "indexer_top_k", il);
    pin(g, selected);
    ggml_build_forward_expand(g.gf, selected);
    return ggml_qsa_select_list(g.ctx0, selected);
}

ggml_tensor * qsa_graph_attn(const llm_graph_context & g, const llama_memory_hybrid_idx_context * mctx,
                             llm_graph_input_attn_kv * inp, ggml_tensor * q, ggml_tensor * k, ggml_tensor * v,
                             ggml_tensor * list, float scale, int il) {
    const qsa_memory * memory = mctx->get_qsa();

    // A quantised cache holds rotated rows; the index cache does not, and SELECT has used its own query already.
    if (inp->self_k_rot) {
        q = llama_mul_mat_hadamard(g.ctx0, q, inp->self_k_rot);
        k = llama_mul_mat_hadamard(g.ctx0, k, inp->self_k_rot);
    }
    if (inp->self_v_rot) {
        v = llama_mul_mat_hadamard(g.ctx0, v, inp->self_v_rot);
    }
    // k last: CUDA fuses its rope with the store that follows.
    ggml_build_forward_expand(g.gf, q);
    ggml_build_forward_expand(g.gf, v);
    ggml_build_forward_expand(g.gf, k);
    ggml_tensor * k_all = inp->mctx->cpy_k(g.ctx0, k, inp->get_k_idxs(), il);
    ggml_tensor * v_all = inp->mctx->cpy_v(g.ctx0, v, inp->get_v_idxs(), il);
    ggml_build_forward_expand(g.gf, k_all);
    ggml_build_forward_expand(g.gf, v_all);

    ggml_tensor * attn = ggml_qsa_attn(g.ctx0, q, k_all, v_all, inp->get_k_idxs(), list, memory->ratio(),
                                       memory->kv_size(), (int32_t) g.hparams.n_head_kv(il), scale);
    g.cb(attn, "qsa_attn", il);
    pin(g, attn);
    ggml_tensor * out = ggml_qsa_attn_out(g.ctx0, attn);
    g.cb(out, "kqv_out", il);
    return inp->self_v_rot ? llama_mul_mat_hadamard(g.ctx0, out, inp->self_v_rot) : out;
}
