// Attention over listed blocks on tensor cores (sm_80 on). One CTA: one token, one KV head, one run of cells.
//
// Cache rows go to shared memory as they are (cp.async) and become F16 fragments in registers: contraction order is
// free, so lane c of a quad takes four neighbouring values of a K row (one 32-bit word of a quantised row) and the V
// columns of a warp are dealt out so that a word again feeds four column tiles. Nothing is dequantised into memory.
#pragma once

#include "qsa_attn_combine.cuh"
#include "qsa_attn_mma.cuh"

namespace qsa {

// `converted`: tiles are F16 whatever the cache's types are; keys in two parts, the second one in V's place until V comes.
template <int D, int KT, int VT, bool converted>
static __global__ void __launch_bounds__(ATTN_WARPS * 32, 3) attn_kernel(const attn_args a) {
#if QSA_SM80
    constexpr int k_stride = row_words(KT, D, false) * 4;
    constexpr int v_stride = row_words(VT, D, true) * 4;
    constexpr int n_groups = ceil_div(D / 32, ATTN_WARPS);  // 32-column groups per warp

    extern __shared__ __align__(16) char smem[];
    char *   k_tile   = smem;
    char *   v_tile   = k_tile + ATTN_TILE * k_stride;
    uint4 *  p_tile   = reinterpret_cast<uint4 *>(v_tile + ATTN_TILE * v_stride);  // [warp][lane]: A fragments
    float4 * exchange = reinterpret_cast<float4 *>(p_tile);                        // [warp][2][lane], until P is there
    float *  row_m    = reinterpret_cast<float *>(p_tile + ATTN_WARPS * 32 * 2);   // [warp][row]
    int *    blocks   = reinterpret_cast<int *>(row_m + ATTN_WARPS * ATTN_ROWS);

    const int        warp = threadIdx.x / 32;
    const int        lane = threadIdx.x % 32;
    const int        g    = lane / 4;
    const int        c    = lane % 4;
    const attn_share s    = share_of(a, blockIdx.x, blocks);
    if (a.n_split > 1) {
        let_next_kernel_start();
    }
    __syncthreads();

    const char * k_src = a.k + (size_t) s.base * a.k_row + s.kv_head * head_bytes(KT, D);
    const char * v_src = a.v + (size_t) s.base * a.v_row + s.kv_head * head_bytes(VT, D);
    int          cells[ATTN_ROWS_PER_LANE];

    const auto fetch_k = [&](int tile) {
        if constexpr (!converted) {
#pragma unroll
            for (int i = 0; i < ATTN_ROWS_PER_LANE; ++i) {
                cells[i] = cell_of(a, s, blocks, tile, i * ATTN_ROWS_AT_ONCE + threadIdx.x / ATTN_ROW_LANES);
            }
            fetch_raw<D, KT, false>(k_src, a.k_row, cells, k_tile);
            commit_async();
        }
    };
    const auto fetch_v = [&](int tile) {
        if constexpr (!converted) {
            fetch_raw<D, VT, true>(v_src, a.v_row, cells, v_tile);
            commit_async();
        }
    };
    if (s.tile0 < s.tile1) {
        fetch_k(s.tile0);
        fetch_v(s.tile0);
    }
    attn_query<D, KT> q;
    q.load(a, s, warp % ATTN_HALVES, lane);

    float o[n_groups][4][4] = {};
    float m[2]              = { -INFINITY, -INFINITY };  // of rows g and g + 8
    float l[2]              = { 0.0f, 0.0f };            // this thread's part of the sum

    for (int tile = s.tile0; tile < s.tile1; ++tile) {
        if (tile == s.tile0) {
            wait_async<1>();
            __syncthreads();
        } else {
            wait_async<0>();
            __syncthreads();  // K is there, and everybody is done with V of the tile before
            fetch_v(tile);
        }
        if constexpr (converted) {
            fetch_converted<D>(a, s, blocks, tile, false, k_tile, k_stride, v_tile);
            __syncthreads();
        }

        float x[2][4];
        pair_scores<D, KT, converted>(q, k_tile, v_tile, exchange, warp, lane, x);
        const int cell0 = tile * ATTN_TILE + 16 * warp + c;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                if (cell0 + 8 * i + 4 * (e & 1) >= s.n_cells) {
                    x[i][e] = -INFINITY;
                }
            }
        }
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            float t = fmaxf(fmaxf(x[0][2 * i], x[0][2 * i + 1]), fmaxf(x[1][2 * i], x[1][2 * i + 1]));
            t       = fmaxf(t, __shfl_xor_sync(0xFFFFFFFF, t, 1));
            t       = fmaxf(t, __shfl_xor_sync(0xFFFFFFFF, t, 2));
            if (c == 0) {
                row_m[warp * ATTN_ROWS + g + 8 * i] = t;
            }
        }
        __syncthreads();  // row maxima are there, and K is free
        if (tile + 1 < s.tile1) {
            fetch_k(tile + 1);
        }
        if constexpr (converted) {
            fetch_converted<D>(a, s, blocks, tile, true, v_tile, v_stride, nullptr);
        }
        float p[2][4];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            float t = m[i];
#pragma unroll
            for (int w = 0; w < ATTN_WARPS; ++w) {
                t = fmaxf(t, row_m[w * ATTN_ROWS + g + 8 * i]);
            }
            const float shrink = exp2f(m[i] - t);
            m[i]               = t;
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                p[0][2 * i + e] = exp2f(x[0][2 * i + e] - t);
                p[1][2 * i + e] = exp2f(x[1][2 * i + e] - t);
            }
            l[i] = l[i] * shrink + ((p[0][2 * i] + p[0][2 * i + 1]) + (p[1][2 * i] + p[1][2 * i + 1]));
#pragma unroll
            for (int n = 0; n < n_groups; ++n) {
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    o[n][e][2 * i] *= shrink;
                    o[n][e][2 * i + 1] *= shrink;
                }
            }
        }
        p_tile[warp * 32 + lane] = make_uint4(
            as_u32(__floats2half2_rn(p[0][0], p[0][1])), as_u32(__floats2half2_rn(p[0][2], p[0][3])),
            as_u32(__floats2half2_rn(p[1][0], p[1][1])), as_u32(__floats2half2_rn(p[1][2], p[1][3])));
        if (tile + 1 < s.tile1) {
            wait_async<1>();
        } else {
            wait_async<0>();
        }
        __syncthreads();  // P and V are there

        add_values<D, VT>(p_tile, v_tile, warp, lane, o);
    }

    // the sum of a row over the quad and the warps, in a fixed order
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        l[i] += __shfl_xor_sync(0xFFFFFFFF, l[i], 1);
        l[i] += __shfl_xor_sync(0xFFFFFFFF, l[i], 2);
    }
    __syncthreads();
    if (c == 0) {
        row_m[warp * ATTN_ROWS + g]     = l[0];
        row_m[warp * ATTN_ROWS + g + 8] = l[1];
    }
    __syncthreads();

    const size_t n_rows = (size_t) a.n_head * a.n_tokens;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const int row = g + 8 * i;
        if (row >= s.n_heads) {
            continue;
        }
        float sum = 0.0f;
#pragma unroll
        for (int w = 0; w < ATTN_WARPS; ++w) {
            sum += row_m[w * ATTN_ROWS + row];
        }
        const size_t  r    = (size_t) s.token * a.n_head + s.head0 + row;
        const bool    last = a.n_split == 1;
        float *       dst  = last ? a.out + r * D : a.part + (s.split * n_rows + r) * D;
        const float   f    = last ? 1.0f / sum : 1.0f;
#pragma unroll
        for (int n = 0; n < n_groups; ++n) {
            const int group = warp + n * ATTN_WARPS;
            if (D / 32 % ATTN_WARPS == 0 || group < D / 32) {
                float4 * p = reinterpret_cast<float4 *>(dst + 32 * group + 8 * c);
                p[0] = make_float4(o[n][0][2 * i] * f, o[n][1][2 * i] * f, o[n][2][2 * i] * f, o[n][3][2 * i] * f);
                p[1] = make_float4(o[n][0][2 * i + 1] * f, o[n][1][2 * i + 1] * f, o[n][2][2 * i + 1] * f,
                                   o[n][3][2 * i + 1] * f);
            }
        }
        if (!last && warp == 0 && c == 0) {
            float * ml                             = a.part + a.n_split * n_rows * D;
            ml[s.split * n_rows + r]               = m[i];
            ml[(a.n_split + s.split) * n_rows + r] = sum;
        }
    }
#else
    (void) a;
    __trap();
#endif
}

}  // namespace qsa
