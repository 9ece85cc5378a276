// Scores of all visible blocks. Both kernels accumulate a dot product as one chain of fma over 0 .. d-1 and add heads in
// order, so a score has the same bits whichever of them computes it.
#pragma once

#include "qsa_select_args.cuh"

namespace qsa {

// ---- few tokens: bound by reading the pooled keys once per token ---------------------------------------------------

constexpr int FEW_BLOCKS = 64;  // blocks per CTA, one per thread
constexpr int FEW_SLICE  = 32;  // values per copy group

template <int D> __host__ __device__ constexpr int score_few_smem_bytes(int h) {
    return FEW_BLOCKS * (D + 4) * 4 + h * D * 4;
}

template <int D, int H> static __global__ void __launch_bounds__(FEW_BLOCKS) score_few_kernel(const select_args a) {
    constexpr int stride = D + 4;
    constexpr int slices = D / FEW_SLICE;
    const int     row    = blockIdx.x % a.n_rows;
    const int     block0 = blockIdx.x / a.n_rows * FEW_BLOCKS;
    const place   p      = place_of(a.k_idxs, a.row0 + row, a.kv_size, a.log2r);
    if (p.n_vis <= a.ntop || block0 >= p.n_vis) {
        return;
    }
    extern __shared__ __align__(16) float smem_f[];
    float *       tile = smem_f;                        // [block][D], padded
    float *       q    = smem_f + FEW_BLOCKS * stride;  // [head][D]
    const float * src  = a.pooled + (first_block(p, a.log2r) + block0) * D;
    const int     n    = min(FEW_BLOCKS, p.n_vis - block0);
#pragma unroll
    for (int k = 0; k < slices; ++k) {
#pragma unroll
        for (int j = 0; j < FEW_SLICE / 4; ++j) {
            const int i    = j * FEW_BLOCKS + threadIdx.x;
            const int b    = i / (FEW_SLICE / 4);
            const int part = k * FEW_SLICE + i % (FEW_SLICE / 4) * 4;
            if (b < n) {
                copy_async<16>(tile + b * stride + part, src + b * D + part);
            }
        }
        commit_async();
    }
    const float * q_src = a.q + (a.row0 + row) * a.q_token;
    for (int i = threadIdx.x; i < H * D / 4; i += FEW_BLOCKS) {
        *reinterpret_cast<float4 *>(q + 4 * i) =
            *reinterpret_cast<const float4 *>(q_src + i / (D / 4) * a.q_head + i % (D / 4) * 4);
    }
    float dot[H] = {};
#pragma unroll
    for (int k = 0; k < slices; ++k) {
        if (k == 0) {
            wait_async<slices - 1>();
        } else if (k == 1) {
            wait_async<(slices > 2 ? slices - 2 : 0)>();
        } else if (k == 2) {
            wait_async<(slices > 3 ? slices - 3 : 0)>();
        } else {
            wait_async<0>();
        }
        __syncthreads();
#pragma unroll
        for (int e = k * FEW_SLICE; e < (k + 1) * FEW_SLICE; e += 4) {
            const float4 x = *reinterpret_cast<const float4 *>(tile + threadIdx.x * stride + e);
#pragma unroll
            for (int i = 0; i < H; ++i) {
                const float4 y = *reinterpret_cast<const float4 *>(q + i * D + e);
                dot[i]         = fmaf(x.x, y.x, dot[i]);
                dot[i]         = fmaf(x.y, y.y, dot[i]);
                dot[i]         = fmaf(x.z, y.z, dot[i]);
                dot[i]         = fmaf(x.w, y.w, dot[i]);
            }
        }
    }
    float score = 0.0f;
#pragma unroll
    for (int i = 0; i < H; ++i) {
        score += relu(dot[i]);
    }
    if ((int) threadIdx.x < n) {
        a.keys[(size_t) row * a.n_block_max + block0 + threadIdx.x] = key_of(score);
    }
}

// ---- many tokens: a matrix product in F32 --------------------------------------------------------------------------

constexpr int TILE_BLOCKS  = 128;
constexpr int TILE_TOKENS  = 32;
constexpr int TILE_SLICE   = 16;
constexpr int TILE_THREADS = 256;

template <int C> static __device__ __forceinline__ void read_columns(const float * p, float (&y)[C]) {
    if constexpr (C % 4 == 0) {
#pragma unroll
        for (int j = 0; j < C; j += 4) {
            const float4 t = *reinterpret_cast<const float4 *>(p + j);
            y[j] = t.x, y[j + 1] = t.y, y[j + 2] = t.z, y[j + 3] = t.w;
        }
    } else {
#pragma unroll
        for (int j = 0; j < C; j += 2) {
            const float2 t = *reinterpret_cast<const float2 *>(p + j);
            y[j] = t.x, y[j + 1] = t.y;
        }
    }
}

// A CTA: 128 blocks x 32 tokens x H heads; a thread: 8 blocks x 2 tokens x H heads, so heads meet in registers.
template <int D, int H>
static __global__ void __launch_bounds__(TILE_THREADS, H <= 4 ? 2 : 1) score_tile_kernel(const select_args a) {
    constexpr int cols     = TILE_TOKENS * H;
    constexpr int x_stride = TILE_BLOCKS + 4;
    constexpr int q_stride = cols + 4;
    constexpr int x_loads  = TILE_BLOCKS * TILE_SLICE / 4 / TILE_THREADS;
    constexpr int q_loads  = ceil_div(cols * TILE_SLICE / 4, TILE_THREADS);
    constexpr int n_slices = D / TILE_SLICE;
    constexpr int C        = 2 * H;

    __shared__ __align__(16) float x_s[2][TILE_SLICE][x_stride];
    __shared__ __align__(16) float q_s[2][TILE_SLICE][q_stride];
    __shared__ int64_t             base_s[TILE_TOKENS];
    __shared__ int                 vis_s[TILE_TOKENS];

    const int n_groups = ceil_div(a.n_rows, TILE_TOKENS);
    const int row0     = blockIdx.x % n_groups * TILE_TOKENS;
    const int block0   = blockIdx.x / n_groups * TILE_BLOCKS;
    const int tid      = threadIdx.x;
    const int warp     = tid / 32;
    const int lane     = tid % 32;
    const int tm       = warp % 2 * 8 + lane % 8;   // blocks 4*tm .. and 64 + 4*tm ..
    const int tn       = warp / 2 * 4 + lane / 8;   // tokens 2*tn, 2*tn + 1

    if (tid < TILE_TOKENS) {
        base_s[tid] = -1;
        vis_s[tid]  = 0;
        if (row0 + tid < a.n_rows) {
            const place p = place_of(a.k_idxs, a.row0 + row0 + tid, a.kv_size, a.log2r);
            base_s[tid]   = p.base;
            vis_s[tid]    = p.n_vis <= a.ntop ? 0 : p.n_vis;
        }
    }
    __syncthreads();

    // Tokens of one stream share the keys: one pass per stream among the tokens, nearly always one.
    uint32_t todo = __ballot_sync(0xFFFFFFFF, vis_s[lane] > block0);
    while (todo) {
        const int64_t  base = base_s[__ffs(todo) - 1];
        const uint32_t now  = __ballot_sync(0xFFFFFFFF, base_s[lane] == base) & todo;
        todo &= ~now;
        const float * src = a.pooled + (size_t) (base >> a.log2r) * D;

        float4     x_r[x_loads], q_r[q_loads];
        const auto load = [&](int k) {
#pragma unroll
            for (int i = 0; i < x_loads; ++i) {
                const int n = i * TILE_THREADS + tid;
                const int b = min(block0 + n / (TILE_SLICE / 4), a.n_block_max - 1);
                x_r[i] = *reinterpret_cast<const float4 *>(src + (size_t) b * D + k + n % (TILE_SLICE / 4) * 4);
            }
#pragma unroll
            for (int i = 0; i < q_loads; ++i) {
                const int n   = i * TILE_THREADS + tid;
                const int col = n / (TILE_SLICE / 4);
                const int row = row0 + col / H;
                q_r[i]        = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
                if (col < cols && row < a.n_rows) {
                    q_r[i] = *reinterpret_cast<const float4 *>(a.q + (a.row0 + row) * a.q_token + col % H * a.q_head +
                                                               k + n % (TILE_SLICE / 4) * 4);
                }
            }
        };
        const auto store = [&](int stage) {
#pragma unroll
            for (int i = 0; i < x_loads; ++i) {
                const int n = i * TILE_THREADS + tid;
                float *   p = &x_s[stage][n % (TILE_SLICE / 4) * 4][n / (TILE_SLICE / 4)];
                p[0]            = x_r[i].x;
                p[x_stride]     = x_r[i].y;
                p[2 * x_stride] = x_r[i].z;
                p[3 * x_stride] = x_r[i].w;
            }
#pragma unroll
            for (int i = 0; i < q_loads; ++i) {
                const int n = i * TILE_THREADS + tid;
                if (n / (TILE_SLICE / 4) < cols) {
                    float * p = &q_s[stage][n % (TILE_SLICE / 4) * 4][n / (TILE_SLICE / 4)];
                    p[0]            = q_r[i].x;
                    p[q_stride]     = q_r[i].y;
                    p[2 * q_stride] = q_r[i].z;
                    p[3 * q_stride] = q_r[i].w;
                }
            }
        };

        float dot[8][C] = {};
        load(0);
        __syncthreads();
        store(0);
        __syncthreads();
#pragma unroll 1
        for (int k = 0; k < n_slices; ++k) {
            if (k + 1 < n_slices) {
                load((k + 1) * TILE_SLICE);
            }
#pragma unroll
            for (int e = 0; e < TILE_SLICE; ++e) {
                float        x[8], y[C];
                const float4 x0 = *reinterpret_cast<const float4 *>(&x_s[k & 1][e][4 * tm]);
                const float4 x1 = *reinterpret_cast<const float4 *>(&x_s[k & 1][e][64 + 4 * tm]);
                x[0] = x0.x, x[1] = x0.y, x[2] = x0.z, x[3] = x0.w;
                x[4] = x1.x, x[5] = x1.y, x[6] = x1.z, x[7] = x1.w;
                read_columns<C>(&q_s[k & 1][e][C * tn], y);
#pragma unroll
                for (int i = 0; i < 8; ++i) {
#pragma unroll
                    for (int j = 0; j < C; ++j) {
                        dot[i][j] = fmaf(x[i], y[j], dot[i][j]);
                    }
                }
            }
            if (k + 1 < n_slices) {
                store((k + 1) & 1);
            }
            __syncthreads();
        }
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            const int row = 2 * tn + j;
            if (!(now >> row & 1)) {
                continue;
            }
            uint32_t * keys = a.keys + (size_t) (row0 + row) * a.n_block_max;
#pragma unroll
            for (int i = 0; i < 8; i += 4) {
                uint32_t key[4];
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    float score = 0.0f;
#pragma unroll
                    for (int t = 0; t < H; ++t) {
                        score += relu(dot[i + e][j * H + t]);
                    }
                    key[e] = key_of(score);
                }
                const int b = block0 + 16 * i + 4 * tm;  // n_block_max is a multiple of 4
                if (b < a.n_block_max) {
                    *reinterpret_cast<uint4 *>(keys + b) = make_uint4(key[0], key[1], key[2], key[3]);
                }
            }
        }
    }
}

}  // namespace qsa
