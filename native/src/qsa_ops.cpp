// Constructors of the QSA operations. Compiled into ggml-base, so that graph builders, tests and every backend see one
// set.
#include "qsa.h"

#include <cstring>

namespace {

ggml_tensor * new_op(ggml_tensor * dst, qsa_sub sub, int32_t r, int32_t kv_size) {
    dst->op                           = GGML_OP_QSA;
    dst->op_params[QSA_PARAM_SUB]     = sub;
    dst->op_params[QSA_PARAM_R]       = r;
    dst->op_params[QSA_PARAM_KV_SIZE] = kv_size;
    return dst;
}

void set_f32(ggml_tensor * op, qsa_param p, float value) {
    std::memcpy(&op->op_params[p], &value, sizeof(value));
}

// A storage of kv_size cells per stream, whole streams only.
bool is_storage(const ggml_tensor * t, int32_t kv_size) {
    return t->ne[3] == 1 && t->ne[1] * t->ne[2] % kv_size == 0 && (t->ne[2] == 1 || ggml_is_contiguous(t));
}

}  // namespace

bool qsa_type_ok(enum ggml_type type) {
    switch (type) {
        case GGML_TYPE_F32:
        case GGML_TYPE_F16:
        case GGML_TYPE_BF16:
        case GGML_TYPE_Q8_0:
        case GGML_TYPE_Q5_1:
        case GGML_TYPE_Q5_0:
        case GGML_TYPE_Q4_1:
        case GGML_TYPE_Q4_0:
        case GGML_TYPE_IQ4_NL:
            return true;
        default:
            return false;
    }
}

bool qsa_shapes_ok(int64_t r, int64_t ntop, int64_t d, int64_t h, int64_t n_rot, int64_t head_size, int64_t n_head,
                   int64_t n_head_kv) {
    return (r == 2 || r == 4 || r == 8 || r == QSA_MAX_R) && ntop > 0 && ntop <= QSA_MAX_NTOP && d > 0 && d % 8 == 0 &&
           d <= 1024 && h > 0 && h <= 64 && n_rot > 0 && n_rot % 2 == 0 && n_rot <= d && head_size > 0 &&
           head_size % 32 == 0 && head_size <= 1024 && n_head_kv > 0 && n_head % n_head_kv == 0;
}

ggml_tensor * ggml_qsa_pool(ggml_context * ctx, ggml_tensor * raw, ggml_tensor * pooled, ggml_tensor * gamma,
                            ggml_tensor * range, int32_t r, int32_t kv_size, float eps, const qsa_rope * rope) {
    GGML_ASSERT(kv_size % r == 0);
    GGML_ASSERT(qsa_type_ok(raw->type) && is_storage(raw, kv_size));
    GGML_ASSERT(pooled->type == GGML_TYPE_F32 && ggml_is_contiguous(pooled) && pooled->ne[0] == raw->ne[0]);
    GGML_ASSERT(ggml_nrows(pooled) == ggml_nrows(raw) / r);
    GGML_ASSERT(gamma->type == GGML_TYPE_F32 && gamma->ne[0] == raw->ne[0]);
    GGML_ASSERT(range->type == GGML_TYPE_I32 && range->ne[0] == 4 && ggml_is_contiguous(range));
    GGML_ASSERT(rope->n_rot % 2 == 0 && rope->n_rot <= raw->ne[0]);

    ggml_tensor * dst = new_op(ggml_view_tensor(ctx, pooled), QSA_POOL, r, kv_size);

    dst->op_params[QSA_PARAM_N_ROT]      = rope->n_rot;
    dst->op_params[QSA_PARAM_N_CTX_ORIG] = rope->n_ctx_orig;
    set_f32(dst, QSA_PARAM_EPS, eps);
    set_f32(dst, QSA_PARAM_FREQ_BASE, rope->freq_base);
    set_f32(dst, QSA_PARAM_FREQ_SCALE, rope->freq_scale);
    set_f32(dst, QSA_PARAM_EXT_FACTOR, rope->ext_factor);
    set_f32(dst, QSA_PARAM_ATTN_FACTOR, rope->attn_factor);
    set_f32(dst, QSA_PARAM_BETA_FAST, rope->beta_fast);
    set_f32(dst, QSA_PARAM_BETA_SLOW, rope->beta_slow);
    dst->src[0] = raw;
    dst->src[1] = pooled;
    dst->src[2] = gamma;
    dst->src[3] = range;
    return dst;
}

ggml_tensor * ggml_qsa_select(ggml_context * ctx, ggml_tensor * q, ggml_tensor * pooled, ggml_tensor * k_idxs,
                              int32_t r, int32_t kv_size, int32_t ntop) {
    const int64_t n_tokens = k_idxs->ne[0];
    GGML_ASSERT(q->type == GGML_TYPE_F32 && q->nb[0] == sizeof(float) && q->ne[0] == pooled->ne[0]);
    GGML_ASSERT(q->ne[0] % 8 == 0 && q->ne[2] == n_tokens && q->ne[3] == 1);
    GGML_ASSERT(pooled->type == GGML_TYPE_F32 && ggml_is_contiguous(pooled) && kv_size % r == 0);
    GGML_ASSERT(ggml_nrows(pooled) % (kv_size / r) == 0);
    GGML_ASSERT(k_idxs->type == GGML_TYPE_I64);
    GGML_ASSERT(ntop > 0 && ntop <= QSA_MAX_NTOP);

    ggml_tensor * dst = ggml_new_tensor_1d(ctx, GGML_TYPE_I32, qsa_select_size(ntop, n_tokens, kv_size / r));
    new_op(dst, QSA_SELECT, r, kv_size);
    dst->op_params[QSA_PARAM_NTOP] = ntop;
    dst->op_params[QSA_PARAM_ROWS] = (int32_t) qsa_select_rows(n_tokens);
    dst->src[0]                    = q;
    dst->src[1]                    = pooled;
    dst->src[2]                    = k_idxs;
    return dst;
}

ggml_tensor * ggml_qsa_select_list(ggml_context * ctx, ggml_tensor * select) {
    const int32_t ntop = qsa_param_i32(select, QSA_PARAM_NTOP);
    return ggml_view_2d(ctx, select, ntop, select->src[2]->ne[0], ntop * sizeof(int32_t), 0);
}

ggml_tensor * ggml_qsa_attn(ggml_context * ctx, ggml_tensor * q, ggml_tensor * k, ggml_tensor * v, ggml_tensor * k_idxs,
                            ggml_tensor * list, int32_t r, int32_t kv_size, int32_t n_head_kv, float scale) {
    const int64_t n_tokens = k_idxs->ne[0];
    GGML_ASSERT(q->type == GGML_TYPE_F32 && q->nb[0] == sizeof(float) && q->ne[2] == n_tokens && q->ne[3] == 1);
    GGML_ASSERT(q->ne[0] % 32 == 0 && q->ne[1] % n_head_kv == 0);
    GGML_ASSERT(qsa_type_ok(k->type) && is_storage(k, kv_size) && k->ne[0] == q->ne[0] * n_head_kv);
    GGML_ASSERT(qsa_type_ok(v->type) && is_storage(v, kv_size) && v->ne[0] == q->ne[0] * n_head_kv);
    GGML_ASSERT(k_idxs->type == GGML_TYPE_I64);
    GGML_ASSERT(list->type == GGML_TYPE_I32 && list->nb[0] == sizeof(int32_t) && list->ne[1] == n_tokens);

    const int64_t n_split = qsa_attn_n_split(n_head_kv, n_tokens);
    ggml_tensor * dst = ggml_new_tensor_1d(ctx, GGML_TYPE_F32, qsa_attn_size(q->ne[0], q->ne[1], n_tokens, n_split));
    new_op(dst, QSA_ATTN, r, kv_size);
    dst->op_params[QSA_PARAM_NTOP]      = (int32_t) list->ne[0];
    dst->op_params[QSA_PARAM_N_KV_HEAD] = n_head_kv;
    dst->op_params[QSA_PARAM_N_SPLIT]   = (int32_t) n_split;
    set_f32(dst, QSA_PARAM_SCALE, scale);
    dst->src[0] = q;
    dst->src[1] = k;
    dst->src[2] = v;
    dst->src[3] = k_idxs;
    dst->src[4] = list;
    return dst;
}

ggml_tensor * ggml_qsa_attn_out(ggml_context * ctx, ggml_tensor * attn) {
    const ggml_tensor * q = attn->src[0];
    return ggml_view_2d(ctx, attn, q->ne[0] * q->ne[1], q->ne[2], q->ne[0] * q->ne[1] * sizeof(float), 0);
}
