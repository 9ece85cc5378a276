// Bounds of scores on tensor cores (sm_80 on), for many tokens. F16 products are too coarse to choose by, but their error is
// bounded, so they tell which few blocks are worth an exact score; qsa_pick.cuh computes those in F32, in the order of
// accumulation of qsa_score.cuh. The choice is exact, and independent of how it was found.
//
// |f16 dot - F32 dot| <= (2^-10 + small) * |q_head| * |key| + 2^-24-ish terms of what F16 flushes, so with Q the sum of the
// heads' norms: error(b) = BOUND_REL * Q * |key_b| + BOUND_ABS * (Q + 4 |key_b|). Norms beyond F16's range: infinite.
#pragma once

#include "qsa_select_args.cuh"

namespace qsa {

constexpr float BOUND_REL   = 1.25f / 1024;
constexpr float BOUND_ABS   = 1e-6f;
constexpr float BOUND_RANGE = 60000.0f;

constexpr int MMA_WARPS  = 8;
constexpr int MMA_BLOCKS = MMA_WARPS * SELECT_GROUP;  // a warp: one group of 32 blocks
constexpr int MMA_TOKENS = 32;
constexpr int MMA_HEADS  = 4;  // missing heads are zero

__host__ __device__ constexpr int score_mma_smem_bytes(int d) {
    return MMA_TOKENS * MMA_HEADS * d * 2;
}

static __device__ __forceinline__ float score_error(float q_norm, float key_norm) {
    const float e = BOUND_REL * q_norm * key_norm + BOUND_ABS * (q_norm + MMA_HEADS * key_norm);
    return q_norm < BOUND_RANGE && key_norm < BOUND_RANGE ? e : INFINITY;
}

// A CTA: 256 blocks, whose keys stay in registers as A fragments, times up to 32 tokens from shared memory.
template <int D> static __global__ void __launch_bounds__(MMA_WARPS * 32, 2) score_mma_kernel(const select_args a) {
#if QSA_SM80
    constexpr int steps = D / 16;
    extern __shared__ __align__(16) uint4 q_s[];  // [token pair][steps / 2][lane]: B fragments of two steps
    __shared__ float   norm_s[MMA_TOKENS];
    __shared__ int64_t base_s[MMA_TOKENS];
    __shared__ int     vis_s[MMA_TOKENS];
    __shared__ int     any_s;

    const int tid    = threadIdx.x;
    const int warp   = tid / 32;
    const int lane   = tid % 32;
    const int g      = lane / 4;
    const int c      = lane % 4;
    const int n_sets = ceil_div(a.n_rows, MMA_TOKENS);
    const int row0   = blockIdx.x % n_sets * MMA_TOKENS;
    const int first  = blockIdx.x / n_sets * MMA_BLOCKS;
    const int rows   = min(MMA_TOKENS, a.n_rows - row0);
    const int pairs  = ceil_div(rows, 2);

    if (tid < MMA_TOKENS) {
        place p = {};
        if (tid < rows) {
            p = place_of(a.k_idxs[a.row0 + row0 + tid], a.kv_size, a.log2r);
        }
        base_s[tid] = p.base;
        vis_s[tid]  = p.n_vis <= a.ntop ? 0 : p.n_vis;
    }
    if (tid == 0) {
        any_s = 0;
    }
    let_next_kernel_start();
    __syncthreads();
    if (tid < MMA_TOKENS && vis_s[tid] > first) {
        any_s = 1;
    }
    __syncthreads();
    if (!any_s) {
        return;
    }
    // a warp: eight columns at a time, four heads of two tokens
    for (int pair = warp; pair < pairs; pair += MMA_WARPS) {
        const int     row    = 2 * pair + g / MMA_HEADS;
        const int     head   = g % MMA_HEADS;
        const bool    real   = row < rows && head < a.h;
        const float * q      = a.q + (a.row0 + row0 + min(row, rows - 1)) * a.q_token + min(head, a.h - 1) * a.q_head;
        float         square = 0.0f;
        float4        x[steps];
#pragma unroll
        for (int j = 0; j < steps; ++j) {
            x[j] = real ? *reinterpret_cast<const float4 *>(q + 16 * j + 4 * c) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            square += x[j].x * x[j].x + x[j].y * x[j].y + x[j].z * x[j].z + x[j].w * x[j].w;
        }
#pragma unroll
        for (int j = 0; j < steps; j += 2) {
            q_s[(pair * (steps / 2) + j / 2) * 32 + lane] =
                make_uint4(pack_half2(x[j].x, x[j].y), pack_half2(x[j].z, x[j].w),
                           pack_half2(x[j + 1].x, x[j + 1].y), pack_half2(x[j + 1].z, x[j + 1].w));
        }
        square += __shfl_xor_sync(0xFFFFFFFF, square, 1);
        square += __shfl_xor_sync(0xFFFFFFFF, square, 2);
        float norm = sqrtf(square);
        norm += __shfl_xor_sync(0xFFFFFFFF, norm, 4);
        norm += __shfl_xor_sync(0xFFFFFFFF, norm, 8);
        if (c == 0 && head == 0) {
            norm_s[row] = norm < BOUND_RANGE ? norm : INFINITY;
        }
    }
    __syncthreads();

    const int block0 = first + warp * SELECT_GROUP;
    if (block0 >= a.n_block_max) {
        return;
    }
    // One pass per stream among the tokens, nearly always one.
    uint32_t todo = __ballot_sync(0xFFFFFFFF, vis_s[lane] > block0);
    while (todo) {
        const int64_t  base = base_s[__ffs(todo) - 1];
        const uint32_t now  = __ballot_sync(0xFFFFFFFF, base_s[lane] == base) & todo;
        todo &= ~now;
        const int vis_max = __reduce_max_sync(0xFFFFFFFF, now >> lane & 1 ? vis_s[lane] : 0);
        const float * src = a.pooled + (size_t) (base >> a.log2r) * D;

        // rows 8i + g of the group; lane c holds values 16j + 4c .. + 3, the contraction order being free
        uint4 x[2][steps];
        float error_q[4], error_1[4];  // error of a row's score: error_q * Q + error_1
        float norm_max = 0.0f;         // over rows that some token sees: others may never have been written
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float * p = src + (size_t) min(block0 + 8 * i + g, a.n_block_max - 1) * D + 4 * c;
            float         square = 0.0f;
#pragma unroll
            for (int j = 0; j < steps; ++j) {
                const float4 v = *reinterpret_cast<const float4 *>(p + 16 * j);
                square += v.x * v.x + v.y * v.y + v.z * v.z + v.w * v.w;
                const uint32_t lo = pack_half2(v.x, v.y);
                const uint32_t hi = pack_half2(v.z, v.w);
                if (i % 2 == 0) {
                    x[i / 2][j].x = lo, x[i / 2][j].z = hi;
                } else {
                    x[i / 2][j].y = lo, x[i / 2][j].w = hi;
                }
            }
            square += __shfl_xor_sync(0xFFFFFFFF, square, 1);
            square += __shfl_xor_sync(0xFFFFFFFF, square, 2);
            const float norm = sqrtf(square);
            error_q[i]       = norm < BOUND_RANGE ? BOUND_REL * norm + BOUND_ABS : INFINITY;
            error_1[i]       = BOUND_ABS * MMA_HEADS * norm;
            if (block0 + 8 * i + g < vis_max) {
                norm_max = norm <= norm_max ? norm_max : norm;  // keeps a NaN
            }
        }
        norm_max = norm_max < BOUND_RANGE ? norm_max : INFINITY;
        norm_max = __uint_as_float(__reduce_max_sync(0xFFFFFFFF, __float_as_uint(norm_max)));

        for (int pair = 0; pair < pairs; ++pair) {
            if (!(now >> 2 * pair & 3)) {
                continue;
            }
            float dot[2][4] = {};
#pragma unroll
            for (int j = 0; j < steps; j += 2) {
                const uint4 b = q_s[(pair * (steps / 2) + j / 2) * 32 + lane];
                mma_16816(dot[0], x[0][j], b.x, b.y);
                mma_16816(dot[1], x[1][j], b.x, b.y);
                mma_16816(dot[0], x[0][j + 1], b.z, b.w);
                mma_16816(dot[1], x[1][j + 1], b.z, b.w);
            }
            // lanes c = 0, 1 hold two heads each of the first token, 2 and 3 of the second
            const int   row    = 2 * pair + c / 2;
            const int   vis    = now >> row & 1 ? vis_s[row] : 0;
            const float q_norm = norm_s[row];
            uint16_t *  keys   = bound_keys(a, row0 + row) + block0 + g;
            float       bound  = 0.0f;  // the largest upper one in lanes of even c, the largest lower one in the others
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                float s = relu(dot[i / 2][i % 2 * 2]) + relu(dot[i / 2][i % 2 * 2 + 1]);
                s += __shfl_xor_sync(0xFFFFFFFF, s, 1);
                if (block0 + 8 * i + g < vis) {
                    const float e = fmaf(q_norm, error_q[i], error_1[i]);
                    bound         = fmaxf(bound, c % 2 == 0 ? s + e : s - e);
                    if (c % 2 == i % 2) {
                        keys[8 * i] = round_up_key(s + e);
                    }
                }
            }
#pragma unroll
            for (int d = 4; d < 32; d *= 2) {
                bound = fmaxf(bound, __shfl_xor_sync(0xFFFFFFFF, bound, d));
            }
            if (block0 < vis && g == 0) {
                const int group = block0 / SELECT_GROUP;
                if (c % 2 == 0) {
                    bound_uppers(a, row0 + row)[group] = key_of(bound);
                    bound_norms(a, row0 + row)[group]  = norm_max;
                } else {
                    a.tops[(row0 + row) * SELECT_TOPS + group] = key_of(bound);
                }
            }
        }
    }
#else
    (void) a;
    __trap();
#endif
}

}  // namespace qsa
