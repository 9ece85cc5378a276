// Attention over listed blocks without tensor cores (sm_70, sm_75): same shares, F32 arithmetic throughout. Correct
// and as sparse as the other one, not tuned.
#pragma once

#include "qsa_attn_args.cuh"

namespace qsa {

constexpr int PLAIN_HALF = ATTN_TILE / 2;  // cells staged at a time: 64 KiB of shared memory is all sm_75 has

template <int D> __host__ __device__ constexpr int plain_stride() {
    return D * 4 + 16;  // 16 bytes behind a row keep a column of rows off one bank
}

template <int D> __host__ __device__ constexpr int attn_plain_smem_bytes() {
    return ATTN_ROWS * D * 4 + PLAIN_HALF * plain_stride<D>() + ATTN_ROWS * PLAIN_HALF * 4 + 2 * ATTN_ROWS * 4;
}

// 32 cells, first one `cell0` of tile `tile`.
template <int D>
static __device__ __forceinline__ void plain_fetch(const attn_args & a, const attn_share & s, const int * blocks,
                                                   int tile, int cell0, char * smem, bool value) {
    for_type(value ? a.v_type : a.k_type, [&](auto t) {
        const size_t row = value ? a.v_row : a.k_row;
        const char * src = (value ? a.v : a.k) + (size_t) s.base * row + s.kv_head * head_bytes(t.value, D);
        for (int i = threadIdx.x; i < PLAIN_HALF * (D / 4); i += blockDim.x) {
            const int cell = i / (D / 4);
            const int e    = i % (D / 4) * 4;
            *reinterpret_cast<float4 *>(smem + cell * plain_stride<D>() + e * 4) =
                reader<t.value>::f(src + cell_of(a, s, blocks, tile, cell0 + cell) * row, e / 32, e % 32);
        }
    });
}

template <int D> static __global__ void __launch_bounds__(128) attn_plain_kernel(const attn_args a) {
    constexpr int n_cols = ceil_div(D, 128);
    extern __shared__ __align__(16) char smem[];
    float * q      = reinterpret_cast<float *>(smem);                    // [row][D]
    char *  tile_s = smem + ATTN_ROWS * D * 4;                           // K, then V
    float * p      = reinterpret_cast<float *>(tile_s + PLAIN_HALF * plain_stride<D>());  // [row][cell]
    float * shrink = p + ATTN_ROWS * PLAIN_HALF;                         // [row]
    float * sum_s  = shrink + ATTN_ROWS;
    int *   blocks = reinterpret_cast<int *>(sum_s + ATTN_ROWS);

    const int        warp = threadIdx.x / 32;
    const int        lane = threadIdx.x % 32;
    const attn_share s    = share_of(a, blockIdx.x, blocks);

    for (int i = threadIdx.x; i < ATTN_ROWS * D; i += 128) {
        const int row = i / D;
        q[i] = row < s.n_heads ? a.scale * 1.44269504f *
                                     a.q[s.token * a.q_token + (s.head0 + row) * a.q_head + i % D] :
                                 0.0f;
    }
    float o[n_cols][ATTN_ROWS] = {};
    float m[4]                 = { -INFINITY, -INFINITY, -INFINITY, -INFINITY };  // rows warp + 4i, one copy per lane
    float l[4]                 = {};

    for (int half = 2 * s.tile0; half < 2 * s.tile1 && half * PLAIN_HALF < s.n_cells; ++half) {
        __syncthreads();
        plain_fetch<D>(a, s, blocks, half / 2, half % 2 * PLAIN_HALF, tile_s, false);
        __syncthreads();
        float x[4] = {};
        for (int e = 0; e < D; e += 4) {
            const float4 k = *reinterpret_cast<const float4 *>(tile_s + lane * plain_stride<D>() + e * 4);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float4 y = *reinterpret_cast<const float4 *>(q + (warp + 4 * i) * D + e);
                x[i]           = fmaf(k.w, y.w, fmaf(k.z, y.z, fmaf(k.y, y.y, fmaf(k.x, y.x, x[i]))));
            }
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int row = warp + 4 * i;
            if (half * PLAIN_HALF + lane >= s.n_cells) {
                x[i] = -INFINITY;
            }
            float t = x[i];
#pragma unroll
            for (int d = 16; d > 0; d /= 2) {
                t = fmaxf(t, __shfl_xor_sync(0xFFFFFFFF, t, d));
            }
            t             = fmaxf(t, m[i]);
            const float f = exp2f(m[i] - t);
            m[i]          = t;
            const float y = exp2f(x[i] - t);
            l[i]          = l[i] * f + y;
            p[row * PLAIN_HALF + lane] = y;
            if (lane == 0) {
                shrink[row] = f;
            }
        }
        __syncthreads();
        plain_fetch<D>(a, s, blocks, half / 2, half % 2 * PLAIN_HALF, tile_s, true);
        __syncthreads();
#pragma unroll
        for (int n = 0; n < n_cols; ++n) {
            const int col = threadIdx.x + 128 * n;
            if (D % 128 != 0 && col >= D) {
                break;
            }
#pragma unroll
            for (int row = 0; row < ATTN_ROWS; ++row) {
                o[n][row] *= shrink[row];
            }
            for (int cell = 0; cell < PLAIN_HALF; ++cell) {
                const float v = *reinterpret_cast<const float *>(tile_s + cell * plain_stride<D>() + col * 4);
#pragma unroll
                for (int row = 0; row < ATTN_ROWS; ++row) {
                    o[n][row] = fmaf(p[row * PLAIN_HALF + cell], v, o[n][row]);
                }
            }
        }
    }

    const size_t n_rows = (size_t) a.n_head * a.n_tokens;
    const size_t r0     = (size_t) s.token * a.n_head + s.head0;
    const bool   last   = a.n_split == 1;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const int row = warp + 4 * i;
#pragma unroll
        for (int d = 16; d > 0; d /= 2) {
            l[i] += __shfl_xor_sync(0xFFFFFFFF, l[i], d);
        }
        if (lane == 0) {
            sum_s[row] = l[i];
            if (!last && row < s.n_heads) {
                float * ml                                  = a.part + a.n_split * n_rows * D;
                ml[s.split * n_rows + r0 + row]               = m[i];
                ml[(a.n_split + s.split) * n_rows + r0 + row] = l[i];
            }
        }
    }
    __syncthreads();
#pragma unroll
    for (int n = 0; n < n_cols; ++n) {
        const int col = threadIdx.x + 128 * n;
        if (D % 128 != 0 && col >= D) {
            break;
        }
#pragma unroll
        for (int row = 0; row < ATTN_ROWS; ++row) {
            if (row < s.n_heads) {
                float * dst = last ? a.out + (r0 + row) * D : a.part + (s.split * n_rows + r0 + row) * D;
                dst[col]    = last ? o[n][row] / sum_s[row] : o[n][row];
            }
        }
    }
}

}  // namespace qsa
