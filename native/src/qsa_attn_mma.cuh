// The two products of the attention on tensor cores, and their operands in registers.
//
// The error of a score becomes the relative error of a weight. Queries rounded to F16 alone can put the result off by 1e-3 of
// its largest value, keys rounded to F16 by nearly as much. So a query is the sum of two F16 numbers, and a quantised key
// stays an integer until its block of 32 is summed, then gets its scale. Weights and values are rounded to F16: 3e-4, 5e-4.
#pragma once

#include "qsa_attn_tile.cuh"

namespace qsa {

// Warps 2i and 2i + 1 score the same 32 cells, each over one half of the head; each ends up with the sums of 16 cells.
constexpr int ATTN_HALVES = 2;

template <int D, int KT> struct attn_query {
    static constexpr int  n_blocks = D / 32 / ATTN_HALVES;  // blocks of 32 values in a half
    static constexpr bool shifted  = KT == T_Q4_1 || KT == T_Q5_1;

    uint4 hi[2 * n_blocks], lo[2 * n_blocks];      // A fragments of 16 values
    float sum[shifted ? n_blocks : 1][2];          // of a block's values, rows g and g + 8

    // One half of the queries of a CTA, scaled so that exp2 gives the softmax. Rows behind the last head are zero.
    __device__ __forceinline__ void load(const attn_args & a, const attn_share & s, int half, int lane) {
        const float scale = a.scale * 1.44269504f;
        const int   g     = lane / 4;
        const int   c     = lane % 4;
#pragma unroll
        for (int j = 0; j < 2 * n_blocks; ++j) {
            split4 x[2];
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const int row = g + 8 * i;
                float4    y   = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
                if (row < s.n_heads) {
                    const float * p = a.q + s.token * a.q_token + (s.head0 + row) * a.q_head;
                    y = *reinterpret_cast<const float4 *>(p + half * (D / ATTN_HALVES) + 16 * j + 4 * c);
                }
                y    = make_float4(y.x * scale, y.y * scale, y.z * scale, y.w * scale);
                x[i] = split_half4(y);
                if constexpr (shifted) {
                    const float t = (y.x + y.y) + (y.z + y.w);
                    sum[j / 2][i] = j % 2 == 0 ? t : sum[j / 2][i] + t;
                }
            }
            hi[j] = make_uint4(x[0].hi.lo, x[1].hi.lo, x[0].hi.hi, x[1].hi.hi);
            lo[j] = make_uint4(x[0].lo.lo, x[1].lo.lo, x[0].lo.hi, x[1].lo.hi);
        }
        if constexpr (shifted) {
#pragma unroll
            for (int b = 0; b < n_blocks; ++b) {
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    sum[b][i] += __shfl_xor_sync(0xFFFFFFFF, sum[b][i], 1);
                    sum[b][i] += __shfl_xor_sync(0xFFFFFFFF, sum[b][i], 2);
                }
            }
        }
    }
};

// Scores of 16 cells over one half of the head. Column n of x[i] is cell 8i + n/2 + 4(n%2), see add_values. `rest`: what
// rounding to F16 took from the keys.
template <int D, int KT, bool with_rest>
static __device__ __forceinline__ void half_scores(const attn_query<D, KT> & q, const char * k_tile, const char * rest,
                                                   int cell0, int half, int lane, float (&x)[2][4]) {
    constexpr int  n_blocks = attn_query<D, KT>::n_blocks;
    constexpr int  stride   = row_words(KT, D, false) * 4;
    constexpr bool scaled   = block_is_scaled(KT);
    const int      g        = lane / 4;
    const int      c        = lane % 4;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            x[i][e] = 0.0f;
        }
    }
#pragma unroll
    for (int b = 0; b < n_blocks; ++b) {
        const int blk       = half * n_blocks + b;
        float     dot[2][4] = {};
#pragma unroll
        for (int j = 0; j < 2; ++j) {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const int   at = (cell0 + 8 * i + (g >> 1) + 4 * (g & 1)) * stride;
                const half4 h  = reader<KT>::unscaled(k_tile + at, blk, 16 * j + 4 * c);
                auto &      to = scaled ? dot[i] : x[i];
                mma_16816(to, q.hi[2 * b + j], h.lo, h.hi);
                mma_16816(to, q.lo[2 * b + j], h.lo, h.hi);
                if constexpr (with_rest) {
                    const half4 r = reader<KT>::unscaled(rest + at, blk, 16 * j + 4 * c);
                    mma_16816(to, q.hi[2 * b + j], r.lo, r.hi);
                }
            }
        }
        if constexpr (scaled) {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
#pragma unroll
                for (int n = 0; n < 2; ++n) {
                    const float2 f = reader<KT>::scale(k_tile + (cell0 + 8 * i + c + 4 * n) * stride, blk);
                    if constexpr (attn_query<D, KT>::shifted) {
                        x[i][n] += f.y * q.sum[b][0];
                        x[i][n + 2] += f.y * q.sum[b][1];
                    }
                    x[i][n]     = fmaf(f.x, dot[i][n], x[i][n]);
                    x[i][n + 2] = fmaf(f.x, dot[i][n + 2], x[i][n + 2]);
                }
            }
        }
    }
}

// Scores of the 16 cells of this warp. The pair's other warp gets its half of the sums through shared memory.
template <int D, int KT, bool with_rest>
static __device__ __forceinline__ void pair_scores(const attn_query<D, KT> & q, const char * k_tile, const char * rest,
                                                   float4 * exchange, int warp, int lane, float (&x)[2][4]) {
    const int half  = warp % ATTN_HALVES;
    const int other = warp ^ 1;
    half_scores<D, KT, with_rest>(q, k_tile, rest, 16 * other, half, lane, x);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        exchange[(2 * other + i) * 32 + lane] = make_float4(x[i][0], x[i][1], x[i][2], x[i][3]);
    }
    half_scores<D, KT, with_rest>(q, k_tile, rest, 16 * warp, half, lane, x);
    if (warp < ATTN_HALVES) {
        sync_warps<1, 32 * ATTN_HALVES>();
    } else {
        sync_warps<2, 32 * ATTN_HALVES>();
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const float4 y = exchange[(2 * warp + i) * 32 + lane];
        x[i][0] += y.x;
        x[i][1] += y.y;
        x[i][2] += y.z;
        x[i][3] += y.w;
    }
}

// o += P V for the 32-column groups of this warp. Column n of tile e of a group is column 4n + e of the head; lane c holds
// cells c, c+4, c+8, c+12 of every 16.
template <int D, int VT, int n_groups>
static __device__ __forceinline__ void add_values(const uint4 * p_tile, const char * v_tile, int warp, int lane,
                                                  float (&o)[n_groups][4][4]) {
    constexpr int stride = row_words(VT, D, true) * 4;
    const int     g      = lane / 4;
    const int     c      = lane % 4;
#pragma unroll
    for (int kk = 0; kk < ATTN_WARPS; ++kk) {
        const uint4 p = p_tile[kk * 32 + lane];
#pragma unroll
        for (int n = 0; n < n_groups; ++n) {
            const int group = warp + n * ATTN_WARPS;
            if (D / 32 % ATTN_WARPS == 0 || group < D / 32) {
                half4 h[4];
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    h[i] = reader<VT>::h(v_tile + (16 * kk + c + 4 * i) * stride, group, 4 * g);
                }
                mma_16816(o[n][0], p, __byte_perm(h[0].lo, h[1].lo, 0x5410), __byte_perm(h[2].lo, h[3].lo, 0x5410));
                mma_16816(o[n][1], p, __byte_perm(h[0].lo, h[1].lo, 0x7632), __byte_perm(h[2].lo, h[3].lo, 0x7632));
                mma_16816(o[n][2], p, __byte_perm(h[0].hi, h[1].hi, 0x5410), __byte_perm(h[2].hi, h[3].hi, 0x5410));
                mma_16816(o[n][3], p, __byte_perm(h[0].hi, h[1].hi, 0x7632), __byte_perm(h[2].hi, h[3].hi, 0x7632));
            }
        }
    }
}

}  // namespace qsa
