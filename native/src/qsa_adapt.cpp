#include "qsa_adapt.h"

#include <algorithm>
#include <cinttypes>
#include <cmath>
#include <cstdio>
#include <map>
#include <numeric>
#include <stdexcept>
#include <string>
#include <vector>

#include "ggml-backend.h"
#include "ggml-cpp.h"
#include "llama-context.h"
#include "llama-impl.h"
#include "llama-kv-cache.h"
#include "llama-memory-hybrid-idx.h"
#include "llama-model.h"
#include "qsa.h"
#include "qsa_memory.h"

namespace {

constexpr double MiB = 1024.0 * 1024.0;

// Pool the keys in memory.ranges(), in all layers at once.
void pool_all(llama_context & ctx, qsa_memory & memory) {
    const llama_model &   model   = ctx.get_model();
    const llama_cparams & cparams = ctx.get_cparams();
    const auto            ids     = memory.layer_ids();
    const auto &          values  = memory.ranges();

    ggml_context_ptr graph_ctx(
        ggml_init({ (3 * ids.size() + 1) * ggml_tensor_overhead() + ggml_graph_overhead(), nullptr, true }));
    ggml_context * c     = graph_ctx.get();
    ggml_cgraph *  graph = ggml_new_graph(c);
    ggml_tensor *  range = ggml_new_tensor_2d(c, GGML_TYPE_I32, 4, (int64_t) values.size() / 4);
    ggml_set_input(range);

    const qsa_rope rope = { (int32_t) model.hparams.n_rot(), (int32_t) cparams.n_ctx_orig_yarn,
                            cparams.rope_freq_base,          cparams.rope_freq_scale,
                            cparams.yarn_ext_factor,         cparams.yarn_attn_factor,
                            cparams.yarn_beta_fast,          cparams.yarn_beta_slow };
    for (const uint32_t il : ids) {
        ggml_tensor * raw   = memory.index_cache().get_k_storage((int32_t) il);
        ggml_tensor * whole = ggml_view_2d(c, raw, raw->ne[0], raw->ne[1] * raw->ne[2], raw->nb[1], 0);
        ggml_build_forward_expand(
            graph, ggml_qsa_pool(c, whole, memory.pooled((int32_t) il), model.layers[il].index_k_norm, range,
                                 memory.ratio(), memory.kv_size(), model.hparams.f_norm_rms_eps, &rope));
    }
    ggml_backend_sched_t sched = ctx.get_sched();
    ggml_backend_sched_reset(sched);
    if (!ggml_backend_sched_alloc_graph(sched, graph)) {
        throw std::runtime_error("there is no room to pool the keys of the running sequences");
    }
    ggml_backend_tensor_set(range, values.data(), 0, ggml_nbytes(range));
    const ggml_status status = ggml_backend_sched_graph_compute(sched, graph);
    ggml_backend_sched_reset(sched);
    if (status != GGML_STATUS_SUCCESS) {
        throw std::runtime_error("pooling the keys of the running sequences failed");
    }
}

std::vector<size_t> buffer_sizes(ggml_backend_sched_t sched) {
    std::vector<size_t> sizes;
    for (int i = 0; i < ggml_backend_sched_get_n_backends(sched); ++i) {
        sizes.push_back(ggml_backend_sched_get_buffer_size(sched, ggml_backend_sched_get_backend(sched, i)));
    }
    return sizes;
}

// What buffers of these sizes lack, as "300 MiB on CUDA0, where 900 MiB are needed"; empty if all fit. Those from
// before are given back by now: a device counts them as free itself, host_free does not.
std::string missing(ggml_backend_sched_t sched, const std::vector<size_t> & sizes, const std::vector<size_t> & before,
                    uint64_t host_free) {
    struct place {
        std::string name;
        double      free = 0, wanted = 0;
    };

    std::map<ggml_backend_dev_t, place> places;  // main memory is nullptr
    for (size_t i = 0; i < sizes.size(); ++i) {
        ggml_backend_t             backend = ggml_backend_sched_get_backend(sched, (int) i);
        ggml_backend_buffer_type_t buft    = ggml_backend_sched_get_buffer_type(sched, backend);
        ggml_backend_dev_t         dev  = ggml_backend_buft_is_host(buft) ? nullptr : ggml_backend_get_device(backend);
        place &                    here = places[dev];
        if (here.name.empty()) {
            size_t n_free = host_free, n_total = 0;
            if (dev) {
                ggml_backend_dev_memory(dev, &n_free, &n_total);
            }
            here.name = dev ? ggml_backend_dev_name(dev) : "main memory";
            here.free = (double) n_free;
        }
        here.free += dev ? 0.0 : (double) before[i];
        here.wanted += (double) sizes[i];
    }
    std::string out;
    for (const auto & [dev, here] : places) {
        if (here.wanted > here.free) {
            out += format("%s%.0f MiB on %s, where %.0f MiB are needed", out.empty() ? "" : " and ",
                          std::ceil((here.wanted - here.free) / MiB), here.name.c_str(), std::ceil(here.wanted / MiB));
        }
    }
    return out;
}

// Compute buffers of the largest graph, like those a new context has. They have been there before on a return from a
// change that was refused. Returns their size in bytes.
size_t reserve(llama_context & ctx, uint64_t host_free, bool is_return) {
    const llama_cparams & cparams   = ctx.get_cparams();
    const uint32_t        n_seqs    = cparams.n_seq_max;
    const uint32_t        n_tokens  = std::min(cparams.n_ctx, cparams.n_ubatch);
    const uint32_t        n_outputs = std::min(n_tokens, cparams.n_outputs_max);
    const auto            full      = ctx.get_memory()->init_full();

    const std::vector<size_t> before = buffer_sizes(ctx.get_sched());
    std::vector<size_t>       sizes(before.size());
    ctx.graph_reserve(n_tokens, n_seqs, n_outputs, full.get(), true, sizes.data());
    const std::string lacking = is_return ? "" : missing(ctx.get_sched(), sizes, before, host_free);
    if (!lacking.empty()) {
        throw std::runtime_error("its compute buffers do not fit: missing " + lacking);
    }
    if (!ctx.graph_reserve(n_tokens, n_seqs, n_outputs, full.get())) {
        throw std::runtime_error("its compute buffers could not be allocated, although there seemed to be room");
    }
    return std::accumulate(sizes.begin(), sizes.end(), (size_t) 0);
}

std::string adapt(llama_context & ctx, uint64_t host_free) {
    auto *       hybrid = dynamic_cast<llama_memory_hybrid_idx *>(ctx.get_memory());
    qsa_memory * memory = hybrid ? hybrid->get_qsa() : nullptr;
    if (!memory || memory->is_reserved()) {
        return "";
    }
    if (memory->is_lean()) {
        throw std::runtime_error(
            "its raw index keys were dropped at the start (--qsa-drop-raw-keys), so there is nothing that upstream's "
            "attention could read");
    }
    const bool is_return = memory->is_return();
    memory->set_reserved(false);
    ctx.synchronize();
    ctx.memory_update(false);  // copies of sequences that are still to be done
    std::string done;
    const bool  is_native = memory->wanted();
    if (is_native) {
        const int64_t n_new = memory->collect(ctx.n_seq_max());
        if (n_new > 0) {
            const int64_t begin = ggml_time_us();
            pool_all(ctx, *memory);
            const int64_t us = ggml_time_us() - begin;
            memory->adopt(us);
            done = format("rebuilt %" PRId64 " pooled keys in each of %zu layers in %.1f ms; ", n_new,
                          memory->layer_ids().size(), us / 1e3);
        }
    } else if (const std::string reason = memory->take_reason(); !reason.empty()) {
        throw std::runtime_error("native QSA is not possible here: " + reason);
    }
    const double n_mib = reserve(ctx, host_free, is_return) / MiB;
    memory->set_reserved(true);
    return done +
           format("the %s attention graph needs compute buffers of %.0f MiB", is_native ? "native" : "upstream", n_mib);
}

}  // namespace

int32_t qsa_adapt(void * ctx, uint64_t host_free, char * text, size_t n_text) {
    try {
        std::snprintf(text, n_text, "%s", adapt(*static_cast<llama_context *>(ctx), host_free).c_str());
        return 0;
    } catch (const std::exception & e) {
        std::snprintf(text, n_text, "%s", e.what());
        return -1;
    }
}
