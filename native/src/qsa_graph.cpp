#include "qsa_graph.h"

#include <cstring>

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

// Present in both kinds of graph, so that neither is reused for a ubatch of the other kind.
class qsa_graph_input : public llm_graph_input_i {
public:
    qsa_graph_input(const llama_memory_hybrid_idx_context * mctx, ggml_tensor * range) : mctx(mctx), range(range) {}

    void set_input(const llama_ubatch *) override {
        if (!range) {
            return;
        }
        qsa_memory * memory = mctx->get_qsa();
        GGML_ASSERT(memory && "a native QSA graph was given a ubatch of the other kind");
        const auto & values = memory->ranges();
        GGML_ASSERT(values.size() == (size_t) ggml_nelements(range));
        ggml_backend_tensor_set(range, values.data(), 0, ggml_nbytes(range));
        memory->submit();
    }

    bool can_reuse(const llm_graph_params & params) override {
        mctx = static_cast<const llama_memory_hybrid_idx_context *>(params.mctx);
        return is_native(mctx, params.cparams) == (range != nullptr) &&
               (!range || range->ne[1] == mctx->get_n_stream());
    }

private:
    const llama_memory_hybrid_idx_context * mctx;
    ggml_tensor *                           range;
};

// With -nkvo everything that touches the cache runs where the cache is.
void pin(const llm_graph_context & g, ggml_tensor * op) {
    if (!g.cparams.offload_kqv) {
        ggml_backend_sched_set_tensor_backend(g.sched, op, g.backend_cpu);
    }
}

}  // namespace

ggml_tensor * qsa_graph_begin(const llm_graph_context & g, const llama_memory_hybrid_idx_context * mctx) {
    ggml_tensor * range = nullptr;
    if (is_native(mctx, g.cparams)) {
        range = ggml_new_tensor_2d(g.ctx0, GGML_TYPE_I32, 4, mctx->get_n_stream());
        ggml_set_input(range);
        g.cb(range, "qsa_range", -1);
    }
    g.res->add_input(std::make_unique<qsa_graph_input>(mctx, range));
    return range;
}

ggml_tensor * qsa_graph_select(const llm_graph_context & g, const llama_memory_hybrid_idx_context * mctx,
                               const llama_layer & layer, llm_graph_input_attn_kv * inp, ggml_tensor * range,
                               ggml_tensor * cur, ggml_tensor * inp_pos, int * sections, int il) {
    const qsa_memory * memory = mctx->get_qsa();
    const int64_t      d      = g.hparams.indexer_head_size;
    const int64_t      h      = g.hparams.indexer_n_head;

    // Slot infos are shared, so attention's cell indices serve the index cache too.
    ggml_tensor * k_idxs = inp->get_k_idxs();
    ggml_tensor * raw    = ggml_reshape_3d(g.ctx0, g.build_lora_mm(layer.index_k_proj, cur), d, 1, g.n_tokens);
    g.cb(raw, "indexer_k_raw", il);
    ggml_tensor * stored = mctx->get_idx()->cpy_k(g.ctx0, raw, k_idxs, il);
    ggml_build_forward_expand(g.gf, stored);

    const qsa_rope rope  = { (int32_t) g.n_rot, g.n_ctx_orig,  g.freq_base, g.freq_scale,
                             g.ext_factor,      g.attn_factor, g.beta_fast, g.beta_slow };
    ggml_tensor * pooled = ggml_qsa_pool(g.ctx0, stored, memory->pooled(il), layer.index_k_norm, range, memory->ratio(),
                                         memory->kv_size(), g.norm_rms_eps, &rope);
    g.cb(pooled, "indexer_k", il);
    ggml_build_forward_expand(g.gf, pooled);

    ggml_tensor * q = ggml_reshape_3d(g.ctx0, g.build_lora_mm(layer.index_q_proj, cur), d, h, g.n_tokens);
    q               = g.build_norm(q, layer.index_q_norm, nullptr, LLM_NORM_RMS, il);
    q = ggml_rope_multi(g.ctx0, q, inp_pos, nullptr, g.n_rot, sections, g.rope_type, g.n_ctx_orig, g.freq_base,
                        g.freq_scale, g.ext_factor, g.attn_factor, g.beta_fast, g.beta_slow);
    g.cb(q, "indexer_q", il);

    ggml_tensor * selected =
        ggml_qsa_select(g.ctx0, q, pooled, k_idxs, memory->ratio(), memory->kv_size(), memory->n_top());
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
