// Block-sparse attention of qwen4exp ("QSA") as three graph operations over whole cache storages.
//
// One operation code, GGML_OP_QSA; op_params[0] says which of the three it is:
// - POOL: raw index keys -> one F32 key per complete block of r cells: mean, RMS norm * gamma, rope. Written in place.
// - SELECT: index queries x pooled keys -> the ntop best visible blocks of every token, as an ascending list.
// - ATTN: attention of every token over the cells of its listed blocks plus its tail.
//
// Names. r: cells per block. kv_size: cells per stream, a multiple of r. n_stream: streams of the cache (not of the
// ubatch). T: tokens in the ubatch. S: streams in the ubatch. d: index key size. h: index query heads. D: head size.
// H, HKV: query and KV heads; query head i reads KV head i / (H/HKV). All rows are contiguous inside.
//
// Where a token is. k_idxs[t] (I64) is the global cell the token was written to. The graph is built only for ubatches
// in which cell == position in every stream, so with idx = k_idxs[t]
//   c       = idx % kv_size      position of the token
//   base    = idx - c            first cell of its stream; base / r is its first row of the pooled storage
//   n_vis   = (c + 1) / r        complete blocks the token sees: block b holds cells base + b*r .. base + b*r + r - 1
//   tail    = base + n_vis*r .. idx   0 to r - 1 cells, always attended, never counted in ntop
// A complete block that contains the token itself competes on its score like every other one. There is no mask. T and S
// fix the shapes; depth does not, so a kernel must take its launch shape from tensors alone and read counts on the
// device.
//
// Offsets. kv_size * n_stream * row size passes 2^31: 64-bit row offsets. Never use nb[2] or nb[3] of a storage.
#ifndef LLAMAMG_QSA_H
#define LLAMAMG_QSA_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "ggml.h"
#include "mg_switch.h"

#ifdef __cplusplus
extern "C" {
#endif

// Indices into ggml_tensor::op_params, an int32_t[16]; the ones marked F hold the bits of a float.
enum qsa_param {
    QSA_PARAM_SUB     = 0,  // enum qsa_sub
    QSA_PARAM_R       = 1,
    QSA_PARAM_KV_SIZE = 2,

    // POOL
    QSA_PARAM_N_ROT       = 3,   // rotated dimensions; pairs are (i, i + n_rot/2), dimensions from n_rot on stay
    QSA_PARAM_N_CTX_ORIG  = 4,   // for YaRN
    QSA_PARAM_EPS         = 5,   // F
    QSA_PARAM_FREQ_BASE   = 6,   // F
    QSA_PARAM_FREQ_SCALE  = 7,   // F
    QSA_PARAM_EXT_FACTOR  = 8,   // F
    QSA_PARAM_ATTN_FACTOR = 9,   // F
    QSA_PARAM_BETA_FAST   = 10,  // F
    QSA_PARAM_BETA_SLOW   = 11,  // F

    // SELECT and ATTN
    QSA_PARAM_NTOP = 3,
    // SELECT
    QSA_PARAM_ROWS = 4,  // tokens that share the workspace at a time
    // ATTN
    QSA_PARAM_N_KV_HEAD = 4,
    QSA_PARAM_N_SPLIT   = 5,
    QSA_PARAM_SCALE     = 6,  // F
};

enum qsa_sub {
    // src[0] raw      [d, kv_size*n_stream] F32 F16 BF16 or quantised: the set_rows result of the index cache
    //                 (3-D [d, kv_size, 1] when n_stream is 1). Unrotated keys; row stride nb[1].
    // src[1] pooled   F32 [d, kv_size/r * n_stream], a leaf that lives as long as the cache
    // src[2] gamma    F32 [d]
    // src[3] range    I32 [4, S]: {stream, lo, hi, 0}: blocks lo <= b < hi of that stream are to be written; lo >= hi:
    // none.
    //                 Usually T/r + 1 blocks in all, but every block of the cache after a restore: launch by T and S
    //                 (QSA_POOL has no T: use S) with a grid-stride loop over device-read ranges.
    // dst             view of src[1] (same data), so that SELECT depends on it
    // Order of arithmetic: sum of the r rows in ascending cell order, times 1/r; times 1/sqrt(mean(x^2) + eps);
    // times gamma; rope at position r*b, the same in every section (so plain NEOX pairing with the formulas of
    // rope_yarn; theta of pair i is r*b * freq_base^(-2i/n_rot)).
    QSA_POOL = 0,

    // src[0] q        F32 [d, h, T], normed and rotated; nb[0] is 4, nb[1] and nb[2] are free (multiples of 16)
    // src[1] pooled   F32 [d, kv_size/r * n_stream], result of QSA_POOL
    // src[2] k_idxs   I64 [T]
    // dst             I32 1-D, qsa_select_size() elements: the lists [ntop, T], then workspace. Consumers read the view
    //                 [ntop, T] at offset 0 only.
    // score(b) = sum over heads 0..h-1 in that order of relu(q_head . pooled_b), F32, where relu is x > 0 ? x : 0
    // (NaN becomes 0). One fixed order of accumulation for every T: scores are bit-equal however a prompt was cut.
    // List: the min(ntop, n_vis) best blocks by (score descending, block ascending), written as ascending block numbers
    // inside the stream (0-based, not global rows), then -1. For n_vis <= ntop that is 0..n_vis-1, without scoring.
    // Scores are >= 0, so their bits compare as u32. Ties are common: about 2^-h of all blocks score exactly 0.
    // Workspace, shared by rows t, t + 1 .. t + R - 1 of a chunk (R = op_params[QSA_PARAM_ROWS]); its contents before
    // and after the operation mean nothing:
    //   keys  u32 [kv_size/r, R]   at element qsa_select_ws_offset()
    //   bins  u32 [QSA_BINS, R]    right behind the keys
    QSA_SELECT = 1,

    // src[0] q        F32 [D, H, T]; nb[0] is 4, nb[1] and nb[2] are free (multiples of 16)
    // src[1] K        [D*HKV, kv_size*n_stream], set_rows result of the attention cache: F32 F16 BF16 Q8_0 Q5_1 Q5_0
    //                 Q4_1 Q4_0 IQ4_NL; row stride nb[1]; 3-D when n_stream is 1. Already rotated like q if the cache
    //                 is.
    // src[2] V        likewise, its type may differ
    // src[3] k_idxs   I64 [T]
    // src[4] list     I32 [ntop, T], view of QSA_SELECT's result, rows contiguous
    // dst             F32 1-D, qsa_attn_size() elements: the output [D, H, T], then workspace
    // out = softmax(scale * q.K) V over the r cells of each listed block (up to the first -1) and the tail.
    // A token always attends to at least one cell: itself (in its tail, or in a complete block that may be unlisted
    // only
    // when ntop others are listed).
    // Workspace when n_split > 1, at element D*H*T; n_split pieces of a token's cells, combined in a fixed order:
    //   o  F32 [D, H, T, n_split], then  m  F32 [H, T, n_split] (-inf: empty piece), then  l  F32 [H, T, n_split]
    QSA_ATTN = 2,
};

#define QSA_BINS 2048
#define QSA_MAX_ROWS 128
#define QSA_MAX_SPLIT 33
#define QSA_MAX_NTOP 1024
#define QSA_MAX_R 16

static inline int32_t qsa_param_i32(const struct ggml_tensor * op, enum qsa_param p) {
    return op->op_params[p];
}

static inline float qsa_param_f32(const struct ggml_tensor * op, enum qsa_param p) {
    union {
        int32_t i;
        float   f;
    } u;
    u.i = op->op_params[p];
    return u.f;
}

// ---- sizes, in elements of 4 bytes ---------------------------------------------------------------------------------

static inline int64_t qsa_select_rows(int64_t n_tokens) {
    return n_tokens < QSA_MAX_ROWS ? n_tokens : QSA_MAX_ROWS;
}

// The lists are padded so that the workspace starts on a 128-byte boundary of the tensor.
static inline int64_t qsa_select_ws_offset(int64_t ntop, int64_t n_tokens) {
    return (ntop * n_tokens + 31) / 32 * 32;
}

static inline int64_t qsa_select_size(int64_t ntop, int64_t n_tokens, int64_t n_block_max) {
    return qsa_select_ws_offset(ntop, n_tokens) + qsa_select_rows(n_tokens) * (n_block_max + QSA_BINS);
}

// Pieces a token's cells are cut into, so that few tokens still fill a GPU. Depends on shapes alone.
static inline int64_t qsa_attn_n_split(int64_t n_head_kv, int64_t n_tokens) {
    const int64_t n = (264 + n_head_kv * n_tokens - 1) / (n_head_kv * n_tokens);
    return n < 1 ? 1 : n > QSA_MAX_SPLIT ? QSA_MAX_SPLIT : n;
}

static inline int64_t qsa_attn_size(int64_t head_size, int64_t n_head, int64_t n_tokens, int64_t n_split) {
    return head_size * n_head * n_tokens + (n_split > 1 ? n_split * n_head * n_tokens * (head_size + 2) : 0);
}

// ---- constructors (compiled into ggml-base) ------------------------------------------------------------------------
// They check shapes with GGML_ASSERT: qsa_shapes_ok() must have said yes for the model.

struct qsa_rope {
    int32_t n_rot, n_ctx_orig;
    float   freq_base, freq_scale, ext_factor, attn_factor, beta_fast, beta_slow;
};

// What the operations can do at all; a model outside runs on upstream's graph.
MG_API bool qsa_shapes_ok(int64_t r, int64_t ntop, int64_t d, int64_t h, int64_t n_rot, int64_t head_size,
                          int64_t n_head, int64_t n_head_kv);

// Cache types that POOL and ATTN read.
MG_API bool qsa_type_ok(enum ggml_type type);

MG_API struct ggml_tensor * ggml_qsa_pool(struct ggml_context * ctx, struct ggml_tensor * raw,
                                          struct ggml_tensor * pooled, struct ggml_tensor * gamma,
                                          struct ggml_tensor * range, int32_t r, int32_t kv_size, float eps,
                                          const struct qsa_rope * rope);

// Returns the 1-D tensor with workspace; ggml_qsa_select_list() gives the [ntop, T] view.
MG_API struct ggml_tensor * ggml_qsa_select(struct ggml_context * ctx, struct ggml_tensor * q,
                                            struct ggml_tensor * pooled, struct ggml_tensor * k_idxs, int32_t r,
                                            int32_t kv_size, int32_t ntop);
MG_API struct ggml_tensor * ggml_qsa_select_list(struct ggml_context * ctx, struct ggml_tensor * select);

// Returns the 1-D tensor with workspace; ggml_qsa_attn_out() gives the [D*H, T] view.
MG_API struct ggml_tensor * ggml_qsa_attn(struct ggml_context * ctx, struct ggml_tensor * q, struct ggml_tensor * k,
                                          struct ggml_tensor * v, struct ggml_tensor * k_idxs,
                                          struct ggml_tensor * list, int32_t r, int32_t kv_size, int32_t n_head_kv,
                                          float scale);
MG_API struct ggml_tensor * ggml_qsa_attn_out(struct ggml_context * ctx, struct ggml_tensor * attn);

#ifdef __cplusplus
}
#endif

#endif
