// The native QSA part of qwen4exp's graph. Compiled into libllama; called from three places of its build_layer_attn().
#pragma once

#include "llama-graph.h"

class llama_memory_hybrid_idx_context;
struct llama_layer;

// Inputs of a native graph; they belong to it. Those of the way without raw keys, or the range of POOL.
struct qsa_graph_tensors {
    ggml_tensor * range  = nullptr;  // I32 [4, S]
    ggml_tensor * cells  = nullptr;  // I64 [T], see qsa_memory::lean_inputs
    ggml_tensor * gather = nullptr;
    ggml_tensor * pos    = nullptr;
    ggml_tensor * rows   = nullptr;
    int64_t       n_stream;
};

// Adds the input that ties a graph to its mode. Returns its tensors, or nullptr: build upstream's graph.
const qsa_graph_tensors * qsa_graph_begin(const llm_graph_context & g, const llama_memory_hybrid_idx_context * mctx);

// Stores the raw index keys of cur, pools what became complete, and returns the lists I32 [ntop, T].
ggml_tensor * qsa_graph_select(const llm_graph_context & g, const llama_memory_hybrid_idx_context * mctx,
                               const llama_layer & layer, llm_graph_input_attn_kv * inp, const qsa_graph_tensors * in,
                               ggml_tensor * cur, ggml_tensor * inp_pos, int * sections, int il);

// Stores K and V and attends; returns [D*H, T].
ggml_tensor * qsa_graph_attn(const llm_graph_context & g, const llama_memory_hybrid_idx_context * mctx,
                             llm_graph_input_attn_kv * inp, ggml_tensor * q, ggml_tensor * k, ggml_tensor * v,
                             ggml_tensor * list, float scale, int il);
