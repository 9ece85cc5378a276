// What the attention kernels get, and how a token's cells map to cache rows.
#pragma once

#include "qsa_async.cuh"

namespace qsa {

struct attn_args {
    const float *   q;       // [D, H, T]
    size_t          q_head;  // floats from head to head
    size_t          q_token;
    const char *    k;
    size_t          k_row;  // bytes from cell to cell
    const char *    v;
    size_t          v_row;
    const int64_t * k_idxs;
    const int32_t * list;  // [ntop, T]
    float *         out;   // [D, H, T]
    float *         part;  // o [D, H, T, n_split], m [H, T, n_split], l [H, T, n_split]
    int             k_type, v_type;
    int             n_tokens, n_head, n_head_kv, head_size, ntop, log2r, n_split, kv_size;
    float           scale;
};

// The share of one CTA: query heads of one KV head of one token, over a run of tiles.
struct attn_share {
    int     token, kv_head, head0, n_heads, split;
    int64_t base;
    int     n_vis, n_listed, n_cells;
    int     tile0, tile1;
};

constexpr int ATTN_TILE = 64;  // cells per tile
constexpr int ATTN_ROWS = 16;  // query heads per CTA at most

static __host__ __device__ inline int attn_row_groups(const attn_args & a) {
    return ceil_div(a.n_head / a.n_head_kv, ATTN_ROWS);
}

// Also loads the token's list into shared memory (a barrier is due), for both reads to be on their way together.
static __device__ __forceinline__ attn_share share_of(const attn_args & a, unsigned cta, int * blocks) {
    attn_share     s;
    const int      group    = a.n_head / a.n_head_kv;
    const unsigned n_groups = attn_row_groups(a);
    s.split                 = cta % a.n_split;
    cta /= a.n_split;
    const int row_group = cta % n_groups;
    cta /= n_groups;
    s.kv_head = cta % a.n_head_kv;
    s.token   = cta / a.n_head_kv;
    s.head0   = s.kv_head * group + row_group * ATTN_ROWS;
    s.n_heads = min(ATTN_ROWS, group - row_group * ATTN_ROWS);

    const int64_t   idx  = a.k_idxs[s.token];
    const int32_t * list = a.list + (size_t) s.token * a.ntop;
    if (a.ntop % 4 == 0) {
        for (int i = threadIdx.x; i < a.ntop / 4; i += blockDim.x) {
            reinterpret_cast<int4 *>(blocks)[i] = reinterpret_cast<const int4 *>(list)[i];
        }
    } else {
        for (int i = threadIdx.x; i < a.ntop; i += blockDim.x) {
            blocks[i] = list[i];
        }
    }
    const place p     = place_of(idx, a.kv_size, a.log2r);
    s.base            = p.base;
    s.n_vis           = p.n_vis;
    s.n_listed        = min(a.ntop, p.n_vis);
    s.n_cells         = (s.n_listed << a.log2r) + p.tail;
    const int n_tiles = ceil_div(s.n_cells, ATTN_TILE);
    s.tile0           = n_tiles * s.split / a.n_split;
    s.tile1           = n_tiles * (s.split + 1) / a.n_split;
    return s;
}

// Cell `i` of a tile, counted from the stream's first; the tail is block n_vis. Cells behind the last one repeat it: they
// are masked, but must be finite.
static __device__ __forceinline__ int cell_of(const attn_args & a, const attn_share & s, const int * blocks, int tile,
                                              int i) {
    const int e     = min(tile * ATTN_TILE + i, s.n_cells - 1);
    const int b     = e >> a.log2r;
    const int block = b < s.n_listed ? blocks[b] : s.n_vis;
    return (block << a.log2r) + (e & ((1 << a.log2r) - 1));
}

static __host__ __device__ inline int attn_blocks_bytes(int ntop) {
    return ceil_div(ntop * 4, 16) * 16;
}

}  // namespace qsa
