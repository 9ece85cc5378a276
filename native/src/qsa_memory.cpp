#include "qsa_memory.h"

#include <cstring>
#include <stdexcept>

#include "ggml-backend.h"
#include "llama-impl.h"
#include "llama-kv-cache.h"
#include "llama-model.h"
#include "mg_switch.h"
#include "qsa.h"
#include "qsa_stats.h"

namespace {

constexpr double MiB = 1024.0 * 1024.0;

ggml_backend_dev_t device_of(ggml_backend_buffer_type_t buft) {
    ggml_backend_dev_t dev = ggml_backend_buft_get_device(buft);
    return dev ? dev : ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU);
}

}  // namespace

qsa_memory::qsa_memory(const llama_model & model, const llama_kv_cache & attn, const llama_kv_cache & idx, bool v_trans,
                       bool offload)
    : model(model),
      attn(attn),
      idx(idx),
      v_trans(v_trans),
      offload(offload),
      lean(drops_raw(model)),
      ids(lean ? attn.get_layer_ids() : idx.get_layer_ids()),
      n_cell((int32_t) idx.get_size()),
      streams(idx.get_n_stream()) {
    reason = obstacle();
    if (reason.empty()) {
        r    = (int32_t) model.hparams.dsv4_compress_ratios[ids.front()];
        ntop = (int32_t) model.hparams.indexer_top_k / r;
    }
    if (!wanted() && lean) {
        throw std::runtime_error("native QSA is not possible here, so raw index keys cannot be dropped: " + reason);
    }
    qsa_total.n_lean += lean;
    set_reserved(true);
}

qsa_memory::~qsa_memory() {
    qsa_total.n_lean -= lean;
    release();
}

std::string qsa_memory::obstacle() const {
    const auto & hparams = model.hparams;
    if (v_trans) {
        return "it needs flash attention (-fa on)";
    }
    if (hparams.use_alibi || !hparams.causal_attn) {
        return "the model's attention is not causal, or has ALiBi";
    }
    if (ids.empty()) {
        return "the model has no layer with an index cache";
    }
    const int64_t ratio = hparams.dsv4_compress_ratios[ids.front()];
    for (const uint32_t il : ids) {
        if (hparams.dsv4_compress_ratios[il] != ratio) {
            return "the model's layers have different compress ratios";
        }
        if (!qsa_shapes_ok(ratio, ratio > 0 ? hparams.indexer_top_k / ratio : 0, hparams.indexer_head_size,
                           hparams.indexer_n_head, hparams.n_rot(il), hparams.n_embd_head_k(il), hparams.n_head(il),
                           hparams.n_head_kv(il))) {
            return "the kernels do not know this model's compress ratio, top_k or head sizes";
        }
    }
    if (hparams.indexer_top_k % ratio != 0 || n_cell % ratio != 0) {
        return "top_k or the context size is not a multiple of the compress ratio";
    }
    if ((!lean && !qsa_type_ok(idx.type_k())) || !qsa_type_ok(attn.type_k()) || !qsa_type_ok(attn.type_v())) {
        return "the kernels cannot read this cache type";
    }
    return "";
}

// Ask every device that holds an index layer, with tensors of the real shapes.
std::string qsa_memory::device_obstacle() const {
    for (const auto & [il, pooled] : layers) {
        ggml_tensor *      raw = lean ? rings.at(il) : idx.get_k_storage(il);
        ggml_backend_dev_t dev = device_of(ggml_backend_buffer_get_type(pooled->buffer));
        if (std::strcmp(ggml_backend_reg_name(ggml_backend_dev_backend_reg(dev)), "RPC") == 0) {
            // It accepts every operation; the server behind it may be a stock build that aborts.
            return "a layer with an index cache is on an RPC server, which may not know the operation; keep such "
                   "layers "
                   "on devices of this machine (--device, --tensor-split) to have it";
        }
        const auto &     hparams = model.hparams;
        const int64_t    D       = hparams.n_embd_head_k(il);
        const int64_t    H       = hparams.n_head(il);
        const int64_t    HKV     = hparams.n_head_kv(il);
        ggml_context_ptr ctx(ggml_init({ 64 * ggml_tensor_overhead(), nullptr, true }));
        ggml_context *   c     = ctx.get();
        const auto       whole = [&](ggml_tensor * t) {
            return ggml_view_2d(c, t, t->ne[0], t->ne[1] * t->ne[2], t->nb[1], 0);
        };

        ggml_tensor *  v     = ggml_new_tensor_2d(c, attn.type_v(), D * HKV, n_cell * (int64_t) streams.size());
        ggml_tensor *  gamma = ggml_new_tensor_1d(c, GGML_TYPE_F32, raw->ne[0]);
        ggml_tensor *  some  = ggml_new_tensor_2d(c, GGML_TYPE_I32, 4, 1);
        const qsa_rope rope  = { (int32_t) hparams.n_rot(il), 4096, 1e4f, 1.0f, 0.0f, 1.0f, 32.0f, 1.0f };
        for (const int64_t n_tokens : { 1, 512 }) {
            ggml_tensor * k_idxs = ggml_new_tensor_1d(c, GGML_TYPE_I64, n_tokens);
            ggml_tensor * q_idx  = ggml_new_tensor_3d(c, GGML_TYPE_F32, raw->ne[0], hparams.indexer_n_head, n_tokens);
            ggml_tensor * q      = ggml_new_tensor_3d(c, GGML_TYPE_F32, D, H, n_tokens);
            ggml_tensor * pool =
                lean ? keys(c, il) : ggml_qsa_pool(c, whole(raw), pooled, gamma, some, r, n_cell, 1e-6f, &rope);
            ggml_tensor * sel = ggml_qsa_select(c, q_idx, pool, k_idxs, r, n_cell, ntop);
            ggml_tensor * att = ggml_qsa_attn(c, q, whole(attn.get_k_storage(il)), v, k_idxs,
                                              ggml_qsa_select_list(c, sel), r, n_cell, (int32_t) HKV, 1.0f);
            for (const ggml_tensor * op : { pool, sel, att }) {
                if (!ggml_backend_dev_supports_op(dev, op)) {
                    return std::string("no kernel for these shapes and cache types on ") + ggml_backend_dev_name(dev);
                }
            }
        }
    }
    return "";
}

void qsa_memory::release() {
    for (const auto & [ctx, buffer] : buffers) {
        qsa_total.n_bytes -= ggml_backend_buffer_get_size(buffer.get());
    }
    buffers.clear();
    layers.clear();
    rings.clear();
}

// Returns what went wrong, or nothing.
std::string qsa_memory::allocate() {
    const int64_t d = model.hparams.indexer_head_size;

    std::map<ggml_backend_buffer_type_t, std::vector<int32_t>> by_buft;
    for (const uint32_t il : ids) {
        ggml_backend_buffer_type_t buft =
            offload ? ggml_backend_dev_buffer_type(model.dev_layer(il)) : ggml_backend_cpu_buffer_type();
        by_buft[buft].push_back((int32_t) il);
    }
    const int64_t n_stream = (int64_t) streams.size();
    for (const auto & [buft, some] : by_buft) {
        ggml_context_ptr ctx(ggml_init({ 2 * some.size() * ggml_tensor_overhead(), nullptr, true }));
        for (const int32_t il : some) {
            // without raw keys a row more, for padding
            layers[il] = ggml_new_tensor_2d(ctx.get(), GGML_TYPE_F32, d, n_cell / r * n_stream + lean);
            ggml_format_name(layers[il], "cache_qsa_l%d", il);
            if (lean) {
                rings[il] = ggml_new_tensor_2d(ctx.get(), GGML_TYPE_F32, d, n_ring * n_stream);
                ggml_format_name(rings[il], "cache_qsa_raw_l%d", il);
            }
        }
        ggml_backend_buffer_t buffer = nullptr;
        if (model.hparams.no_alloc) {
            // Sizes are wanted, not memory; the scheduler must take the tensors for allocated.
            buffer = ggml_backend_buft_alloc_buffer(buft, 0);
            for (ggml_tensor * t = ggml_get_first_tensor(ctx.get()); t; t = ggml_get_next_tensor(ctx.get(), t)) {
                t->buffer = buffer;
            }
        } else {
            buffer = ggml_backend_alloc_ctx_tensors_from_buft(ctx.get(), buft);
        }
        if (!buffer) {
            const double n_mib = some.size() * ggml_nbytes(layers[some.front()]) / MiB;
            release();
            is_short = true;
            return format("%.0f MiB for its pooled keys do not fit on %s", n_mib, ggml_backend_buft_name(buft));
        }
        qsa_total.n_bytes += ggml_backend_buffer_get_size(buffer);
        LLAMA_LOG_INFO("%s: %10s pooled keys of QSA = %8.2f MiB\n", __func__, ggml_backend_buffer_name(buffer),
                       ggml_backend_buffer_get_size(buffer) / MiB);
        buffers.emplace_back(std::move(ctx), buffer);
    }
    const std::string refusal = device_obstacle();
    if (!refusal.empty()) {
        release();
    }
    return refusal;
}

bool qsa_memory::wanted() {
    if (!lean && !mg_switch_value(MG_QSA)) {
        return false;
    }
    if (reason.empty() && buffers.empty()) {
        reason = allocate();
    }
    if (!reason.empty() && !said) {
        said = true;
        LLAMA_LOG_WARN("%s: native QSA is off for this context: %s\n", __func__, reason.c_str());
    }
    return reason.empty();
}

bool qsa_memory::is_return() const {
    return mg_switch_value(MG_QSA) == reserved;
}

bool qsa_memory::is_reserved() const {
    return is_valid && is_return();
}

void qsa_memory::set_reserved(bool done) {
    is_valid = done;
    if (done) {
        reserved = mg_switch_value(MG_QSA);
    }
}

std::string qsa_memory::take_reason() {
    const std::string taken = mg_switch_value(MG_QSA) ? reason : "";
    if (is_short) {
        // There may be more room next time.
        is_short = said = false;
        reason.clear();
    }
    return taken;
}

std::vector<uint32_t> qsa_memory::layer_ids() const {
    return ids;
}

std::map<ggml_backend_buffer_type_t, size_t> qsa_memory::memory_breakdown() const {
    std::map<ggml_backend_buffer_type_t, size_t> sizes;
    for (const auto & [ctx, buffer] : buffers) {
        ggml_backend_buffer_type_t buft = ggml_backend_buffer_get_type(buffer.get());
        sizes[buft] += model.hparams.no_alloc ? ggml_backend_alloc_ctx_tensors_from_buft_size(ctx.get(), buft)
                                              : ggml_backend_buffer_get_size(buffer.get());
    }
    return sizes;
}
