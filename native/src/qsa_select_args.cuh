// What the selection kernels get.
#pragma once

#include "qsa_async.cuh"

namespace qsa {

struct select_args {
    const float *   q;       // [d, h, T]
    size_t          q_head;  // floats from head to head
    size_t          q_token;
    const float *   pooled;  // [d, n_block_max * n_stream]
    const int64_t * k_idxs;
    int32_t *       list;  // [ntop, T]
    uint32_t *      keys;  // [n_block_max, rows]
    uint32_t *      tops;  // [SELECT_TOPS, rows]: largest key of every SELECT_GROUP visible blocks
    int             d, h, n_tokens, ntop, log2r, kv_size, n_block_max;
    int             row0, n_rows;  // tokens of this chunk
};

constexpr int SELECT_GROUP = 32;
constexpr int SELECT_TOPS  = 2048;

// Longer caches than this have no group maxima: their workspace has no room for them.
static __host__ __device__ inline bool has_tops(const select_args & a) {
    return a.n_block_max <= SELECT_GROUP * SELECT_TOPS;
}

// When scores are bounds (qsa_score_mma.cuh), a row of keys holds: upper bounds u16 [n_block_max], bits 30..15 of a float
// rounded up, then per group the largest upper bound u32 [n_block_max/32] and the largest norm of a key f32 [n_block_max/32];
// tops holds the largest lower bound. Half of a row is more than enough for the two.
constexpr float BOUND_ROUNDING = 0.996f;  // undoes the rounding up: less than 1 / (1 + 2^-8)

static __device__ __forceinline__ uint16_t round_up_key(float x) {
    return (uint16_t) ((min(__float_as_uint(x), 0x7F800000u) + 0x7FFF) >> 15);
}

static __device__ __forceinline__ uint32_t wide_key(uint32_t key) {
    return key << 15;
}

static __device__ __forceinline__ uint16_t * bound_keys(const select_args & a, int row) {
    return reinterpret_cast<uint16_t *>(a.keys + (size_t) row * a.n_block_max);
}

static __device__ __forceinline__ uint32_t * bound_uppers(const select_args & a, int row) {
    return a.keys + (size_t) row * a.n_block_max + a.n_block_max / 2;
}

static __device__ __forceinline__ float * bound_norms(const select_args & a, int row) {
    return reinterpret_cast<float *>(bound_uppers(a, row) + (a.n_block_max + SELECT_GROUP - 1) / SELECT_GROUP);
}

// Scores are not negative, so their bits compare like the values.
static __device__ __forceinline__ uint32_t key_of(float score) {
    return __float_as_uint(score);
}

static __device__ __forceinline__ float relu(float x) {
    return x > 0.0f ? x : 0.0f;
}

// First pooled row of a stream.
static __device__ __forceinline__ size_t first_block(const place & p, int log2r) {
    return (size_t) (p.base >> log2r);
}

}  // namespace qsa
