// GGML_OP_QSA on CUDA: reads tensors and parameters, decides what is supported, launches. The kernels know no ggml.
#include "qsa.cuh"

#include <cstring>

#include "qsa_launch.cuh"

static constexpr bool same_type(int a, ggml_type b) {
    return a == (int) b;
}

static_assert(same_type(qsa::T_F32, GGML_TYPE_F32) && same_type(qsa::T_F16, GGML_TYPE_F16) &&
                  same_type(qsa::T_BF16, GGML_TYPE_BF16) && same_type(qsa::T_Q8_0, GGML_TYPE_Q8_0) &&
                  same_type(qsa::T_Q5_1, GGML_TYPE_Q5_1) && same_type(qsa::T_Q5_0, GGML_TYPE_Q5_0) &&
                  same_type(qsa::T_Q4_1, GGML_TYPE_Q4_1) && same_type(qsa::T_Q4_0, GGML_TYPE_Q4_0) &&
                  same_type(qsa::T_IQ4_NL, GGML_TYPE_IQ4_NL),
              "qsa_types.cuh repeats the values of ggml_type");
#if !defined(GGML_USE_HIP) && !defined(GGML_USE_MUSA)

namespace {

// -1: not a power of two
int log2_of(int32_t r) {
    for (int i = 0; i < 31; ++i) {
        if (r == 1 << i) {
            return i;
        }
    }
    return -1;
}

qsa::device_limits limits_of(int device) {
    const auto & info = ggml_cuda_info().devices[device];
    return { ggml_cuda_highest_compiled_arch(info.cc), info.smpbo };
}

bool is_query(const ggml_tensor * t) {
    return t && t->type == GGML_TYPE_F32 && t->nb[0] == sizeof(float) && t->nb[1] % 16 == 0 && t->nb[2] % 16 == 0 &&
           t->view_offs % 16 == 0 && t->ne[3] == 1;
}

// Rows of whole blocks, one behind the other.
bool is_cache(const ggml_tensor * t) {
    return t && qsa::block_bytes(t->type) > 0 && t->ne[0] % 32 == 0 && t->nb[0] == ggml_type_size(t->type) &&
           t->nb[1] == ggml_row_size(t->type, t->ne[0]) && t->nb[1] % 4 == 0 &&
           t->view_offs % 16 == 0;
}

bool is_dense(const ggml_tensor * t, ggml_type type) {
    return t && t->type == type && t->view_offs % 16 == 0 && ggml_is_contiguous(t);
}

qsa::pool_args pool_args_of(const ggml_tensor * dst) {
    const ggml_tensor * raw = dst->src[0];
    qsa::pool_args      a   = {};
    a.raw                   = (const char *) raw->data;
    a.raw_row               = raw->nb[1];
    a.raw_type              = raw->type;
    a.pooled                = (float *) dst->data;
    a.gamma                 = (const float *) dst->src[2]->data;
    a.range                 = (const int32_t *) dst->src[3]->data;
    a.n_ranges              = (int) dst->src[3]->ne[1];
    a.d                     = (int) raw->ne[0];
    a.log2r                 = log2_of(qsa_param_i32(dst, QSA_PARAM_R));
    a.kv_size               = qsa_param_i32(dst, QSA_PARAM_KV_SIZE);
    a.n_rot                 = qsa_param_i32(dst, QSA_PARAM_N_ROT);
    a.eps                   = qsa_param_f32(dst, QSA_PARAM_EPS);
    a.freq_scale            = qsa_param_f32(dst, QSA_PARAM_FREQ_SCALE);
    a.ext_factor            = qsa_param_f32(dst, QSA_PARAM_EXT_FACTOR);
    a.magnitude             = qsa_param_f32(dst, QSA_PARAM_ATTN_FACTOR);
    const float freq_base   = qsa_param_f32(dst, QSA_PARAM_FREQ_BASE);
    a.theta_scale           = powf(freq_base, -2.0f / a.n_rot);
    if (a.ext_factor != 0.0f) {
        a.magnitude *= 1.0f + 0.1f * logf(1.0f / a.freq_scale);
    }
    float corr[2];
    ggml_rope_yarn_corr_dims(a.n_rot, qsa_param_i32(dst, QSA_PARAM_N_CTX_ORIG), freq_base,
                             qsa_param_f32(dst, QSA_PARAM_BETA_FAST), qsa_param_f32(dst, QSA_PARAM_BETA_SLOW), corr);
    a.corr_low  = corr[0];
    a.corr_high = corr[1];
    return a;
}

qsa::select_args select_args_of(const ggml_tensor * dst) {
    const ggml_tensor * q = dst->src[0];
    qsa::select_args    a = {};
    a.q                   = (const float *) q->data;
    a.q_head              = q->nb[1] / sizeof(float);
    a.q_token             = q->nb[2] / sizeof(float);
    a.pooled              = (const float *) dst->src[1]->data;
    a.k_idxs              = (const int64_t *) dst->src[2]->data;
    a.d                   = (int) q->ne[0];
    a.h                   = (int) q->ne[1];
    a.n_tokens            = (int) q->ne[2];
    a.ntop                = qsa_param_i32(dst, QSA_PARAM_NTOP);
    a.log2r               = log2_of(qsa_param_i32(dst, QSA_PARAM_R));
    a.kv_size             = qsa_param_i32(dst, QSA_PARAM_KV_SIZE);
    a.n_block_max         = a.log2r < 0 ? 0 : a.kv_size >> a.log2r;
    a.list                = (int32_t *) dst->data;
    a.keys                = (uint32_t *) dst->data + qsa_select_ws_offset(a.ntop, a.n_tokens);
    return a;
}

qsa::attn_args attn_args_of(const ggml_tensor * dst) {
    const ggml_tensor * q = dst->src[0];
    qsa::attn_args      a = {};
    a.q                   = (const float *) q->data;
    a.q_head              = q->nb[1] / sizeof(float);
    a.q_token             = q->nb[2] / sizeof(float);
    a.k                   = (const char *) dst->src[1]->data;
    a.k_row               = dst->src[1]->nb[1];
    a.k_type              = dst->src[1]->type;
    a.v                   = (const char *) dst->src[2]->data;
    a.v_row               = dst->src[2]->nb[1];
    a.v_type              = dst->src[2]->type;
    a.k_idxs              = (const int64_t *) dst->src[3]->data;
    a.list                = (const int32_t *) dst->src[4]->data;
    a.head_size           = (int) q->ne[0];
    a.n_head              = (int) q->ne[1];
    a.n_tokens            = (int) q->ne[2];
    a.n_head_kv           = qsa_param_i32(dst, QSA_PARAM_N_KV_HEAD);
    a.ntop                = qsa_param_i32(dst, QSA_PARAM_NTOP);
    a.log2r               = log2_of(qsa_param_i32(dst, QSA_PARAM_R));
    a.n_split             = qsa_param_i32(dst, QSA_PARAM_N_SPLIT);
    a.kv_size             = qsa_param_i32(dst, QSA_PARAM_KV_SIZE);
    a.scale               = qsa_param_f32(dst, QSA_PARAM_SCALE);
    a.out                 = (float *) dst->data;
    a.part                = a.out + (size_t) a.head_size * a.n_head * a.n_tokens;
    return a;
}

bool pool_is_supported(const ggml_tensor * op) {
    return is_cache(op->src[0]) && is_dense(op->src[1], GGML_TYPE_F32) && is_dense(op->src[2], GGML_TYPE_F32) &&
           is_dense(op->src[3], GGML_TYPE_I32) &&
           qsa::pool_supported((int) op->src[0]->ne[0], qsa_param_i32(op, QSA_PARAM_N_ROT),
                               log2_of(qsa_param_i32(op, QSA_PARAM_R)));
}

bool select_is_supported(int device, const ggml_tensor * op) {
    if (!is_query(op->src[0]) || !is_dense(op->src[1], GGML_TYPE_F32) || !is_dense(op->src[2], GGML_TYPE_I64)) {
        return false;
    }
    const qsa::select_args a = select_args_of(op);
    return qsa_param_i32(op, QSA_PARAM_ROWS) > 0 &&
           qsa::select_supported(a.d, a.h, a.ntop, a.log2r, a.n_block_max, limits_of(device));
}

bool attn_is_supported(int device, const ggml_tensor * op) {
    const ggml_tensor * list = op->src[4];
    if (!is_query(op->src[0]) || !is_cache(op->src[1]) || !is_cache(op->src[2]) ||
        !is_dense(op->src[3], GGML_TYPE_I64) || !list || list->type != GGML_TYPE_I32 ||
        list->nb[1] != list->ne[0] * sizeof(int32_t) || list->view_offs % 16 != 0) {
        return false;
    }
    const qsa::attn_args a = attn_args_of(op);
    return a.n_split > 0 && op->src[1]->ne[0] == (int64_t) a.head_size * a.n_head_kv &&
           op->src[2]->ne[0] == op->src[1]->ne[0] &&
           qsa::attn_supported(a.head_size, a.n_head, a.n_head_kv, a.ntop, a.log2r, a.n_split,
                               limits_of(device));
}

}  // namespace

void ggml_cuda_qsa(ggml_backend_cuda_context & ctx, ggml_tensor * dst) {
    const qsa::device_limits limits = limits_of(ctx.device);
    const cudaStream_t       stream = ctx.stream();
    switch (qsa_param_i32(dst, QSA_PARAM_SUB)) {
        case QSA_POOL:
            CUDA_CHECK(qsa::launch_pool(pool_args_of(dst), ggml_cuda_info().devices[ctx.device].nsm, stream));
            break;
        case QSA_SELECT:
            CUDA_CHECK(qsa::launch_select(select_args_of(dst), qsa_param_i32(dst, QSA_PARAM_ROWS), limits, stream));
            break;
        case QSA_ATTN:
            CUDA_CHECK(qsa::launch_attn(attn_args_of(dst), limits, stream));
            break;
        default:
            GGML_ABORT("unknown QSA operation");
    }
}

bool ggml_cuda_qsa_supported(int device, const ggml_tensor * op) {
    switch (qsa_param_i32(op, QSA_PARAM_SUB)) {
        case QSA_POOL:   return pool_is_supported(op);
        case QSA_SELECT: return select_is_supported(device, op);
        case QSA_ATTN:   return attn_is_supported(device, op);
        default:         return false;
    }
}

#else

void ggml_cuda_qsa(ggml_backend_cuda_context &, ggml_tensor *) {
    GGML_ABORT("QSA has kernels for NVIDIA devices only");
}

bool ggml_cuda_qsa_supported(int, const ggml_tensor *) {
    return false;
}

#endif
