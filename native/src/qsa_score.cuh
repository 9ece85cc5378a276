// Scores of all visible blocks. Both kernels accumulate a dot product as one chain of fma over 0 .. d-1 and add heads in
// order, so a score has the same bits whichever of them computes it.
#pragma once

#include "qsa_select_args.cuh"

namespace qsa {

// ---- few tokens: bound by reading the pooled keys once per token ---------------------------------------------------

constexpr int FEW_BLOCKS = 32;  // blocks per CTA, one per thread
constexpr int FEW_SLICE  = 32;  // values per stage
constexpr int FEW_STAGES = 2;
constexpr int FEW_STRIDE = FEW_SLICE + 4;

template <int D> __host__ __device__ constexpr int score_few_smem_bytes(int h) {
    return FEW_STAGES * FEW_BLOCKS * FEW_STRIDE * 4 + h * D * 4;
}

// Few stages, so that all CTAs of 65536 blocks are on the device at once.
template <int D, int H> static __global__ void __launch_bounds__(FEW_BLOCKS) score_few_kernel(const select_args a) {
    constexpr int slices = D / FEW_SLICE;
    const int     row    = blockIdx.x % a.n_rows;
    const int     block0 = blockIdx.x / a.n_rows * FEW_BLOCKS;
    const place   p      = place_of(a.k_idxs[a.row0 + row], a.kv_size, a.log2r);
    let_next_kernel_start();
    if (p.n_vis <= a.ntop || block0 >= p.n_vis) {
        return;
    }
    extern __shared__ __align__(16) float smem_f[];
    float *       q   = smem_f + FEW_STAGES * FEW_BLOCKS * FEW_STRIDE;  // [head][D]; before it [stage][block], padded
    const float * src   = a.pooled + (first_block(p, a.log2r) + block0) * D;
    const int     n     = min(FEW_BLOCKS, p.n_vis - block0);
    const auto    fetch = [&](int k) {
        float * tile = smem_f + k % FEW_STAGES * FEW_BLOCKS * FEW_STRIDE;
#pragma unroll
        for (int j = 0; j < FEW_SLICE / 4; ++j) {
            const int i = j * FEW_BLOCKS + threadIdx.x;
            const int b = i / (FEW_SLICE / 4);
            const int e = i % (FEW_SLICE / 4) * 4;
            if (b < n) {
                copy_async<16>(tile + b * FEW_STRIDE + e, src + b * D + k * FEW_SLICE + e);
            }
        }
    };
#pragma unroll
    for (int k = 0; k < FEW_STAGES; ++k) {
        if (k < slices) {
            fetch(k);
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
        wait_async<FEW_STAGES - 1>();
        __syncthreads();
        const float * x_s = smem_f + (k % FEW_STAGES * FEW_BLOCKS + threadIdx.x) * FEW_STRIDE;
#pragma unroll
        for (int e = 0; e < FEW_SLICE; e += 4) {
            const float4 x = *reinterpret_cast<const float4 *>(x_s + e);
#pragma unroll
            for (int i = 0; i < H; ++i) {
                const float4 y = *reinterpret_cast<const float4 *>(q + i * D + k * FEW_SLICE + e);
                dot[i]         = fmaf(x.x, y.x, dot[i]);
                dot[i]         = fmaf(x.y, y.y, dot[i]);
                dot[i]         = fmaf(x.z, y.z, dot[i]);
                dot[i]         = fmaf(x.w, y.w, dot[i]);
            }
        }
        if (k + FEW_STAGES < slices) {
            __syncthreads();
            fetch(k + FEW_STAGES);
        }
        commit_async();
    }
    float score = 0.0f;
#pragma unroll
    for (int i = 0; i < H; ++i) {
        score += relu(dot[i]);
    }
    const bool visible = (int) threadIdx.x < n;
    uint32_t   top     = visible ? key_of(score) : 0;
    if (visible) {
        a.keys[(size_t) row * a.n_block_max + block0 + threadIdx.x] = top;
    }
    if (has_tops(a)) {
#pragma unroll
        for (int d = 16; d > 0; d /= 2) {
            top = max(top, __shfl_xor_sync(0xFFFFFFFF, top, d));
        }
        if (threadIdx.x % 32 == 0 && visible) {
            a.tops[row * SELECT_TOPS + (block0 + threadIdx.x) / SELECT_GROUP] = top;
        }
    }
}

// ---- many tokens: a matrix product in F32 --------------------------------------------------------------------------

constexpr int TILE_BLOCKS  = 64;
constexpr int TILE_TOKENS  = 32;
constexpr int TILE_SLICE   = 16;  // values of a dot product per stage
constexpr int TILE_STRIDE  = TILE_SLICE + 4;
constexpr int TILE_STAGES  = 3;
constexpr int TILE_THREADS = 128;

__host__ __device__ constexpr int score_tile_smem_bytes(int h) {
    return TILE_STAGES * (TILE_BLOCKS + TILE_TOKENS * h) * TILE_STRIDE * 4;
}

// A CTA: 64 blocks x 32 tokens x H heads. A thread: 8 blocks x 2 tokens x H heads, so that heads meet in registers. A
// warp: all 64 blocks (lane % 8 + 8i) of 8 tokens, so that the maxima of groups meet in a warp.
template <int D, int H>
static __global__ void __launch_bounds__(TILE_THREADS, 3) score_tile_kernel(const select_args a) {
    constexpr int cols     = TILE_TOKENS * H;
    constexpr int parts    = TILE_SLICE / 4;  // 16-byte pieces of a row in a stage
    constexpr int n_slices = D / TILE_SLICE;
    constexpr int C        = 2 * H;
    constexpr int stage    = (TILE_BLOCKS + cols) * TILE_STRIDE;

    extern __shared__ __align__(16) float smem_f[];
    __shared__ int64_t base_s[TILE_TOKENS];
    __shared__ int     vis_s[TILE_TOKENS];

    const int n_groups = ceil_div(a.n_rows, TILE_TOKENS);
    const int row0     = blockIdx.x % n_groups * TILE_TOKENS;
    const int block0   = blockIdx.x / n_groups * TILE_BLOCKS;
    const int tid      = threadIdx.x;
    const int lane     = tid % 32;
    const int tm       = lane % 8;                   // blocks tm + 8i
    const int tn       = tid / 32 * 4 + lane / 8;    // tokens 2*tn, 2*tn + 1

    if (tid < TILE_TOKENS) {
        base_s[tid] = -1;
        vis_s[tid]  = 0;
        if (row0 + tid < a.n_rows) {
            const place p = place_of(a.k_idxs[a.row0 + row0 + tid], a.kv_size, a.log2r);
            base_s[tid]   = p.base;
            vis_s[tid]    = p.n_vis <= a.ntop ? 0 : p.n_vis;
        }
    }
    __syncthreads();
    let_next_kernel_start();

    // Tokens of one stream share the keys: one pass per stream among the tokens, nearly always one.
    uint32_t todo = __ballot_sync(0xFFFFFFFF, vis_s[lane] > block0);
    while (todo) {
        const int64_t  base = base_s[__ffs(todo) - 1];
        const uint32_t now  = __ballot_sync(0xFFFFFFFF, base_s[lane] == base) & todo;
        todo &= ~now;
        const float * src = a.pooled + (size_t) (base >> a.log2r) * D;

        // rows behind the last block or token repeat it; nobody reads what comes of them
        const auto fetch = [&](int slice) {
            float *   x = smem_f + slice % TILE_STAGES * stage;
            const int e = tid % parts * 4;
#pragma unroll
            for (int i = 0; i < TILE_BLOCKS * parts / TILE_THREADS; ++i) {
                const int b = i * (TILE_THREADS / parts) + tid / parts;
                copy_async<16>(x + b * TILE_STRIDE + e,
                               src + min(block0 + b, a.n_block_max - 1) * (size_t) D + slice * TILE_SLICE + e);
            }
#pragma unroll
            for (int i = 0; i < ceil_div(cols * parts, TILE_THREADS); ++i) {
                const int col = i * (TILE_THREADS / parts) + tid / parts;
                const int row = a.row0 + min(row0 + col / H, a.n_rows - 1);
                copy_async<16>(x + (TILE_BLOCKS + col) * TILE_STRIDE + e,
                               a.q + row * a.q_token + col % H * a.q_head + slice * TILE_SLICE + e);
            }
        };

        float dot[8][C] = {};
        __syncthreads();  // the pass before is done with the stages
#pragma unroll
        for (int k = 0; k < TILE_STAGES - 1; ++k) {
            fetch(k);
            commit_async();
        }
#pragma unroll 1
        for (int k = 0; k < n_slices; ++k) {
            wait_async<TILE_STAGES - 2>();
            __syncthreads();
            if (k + TILE_STAGES - 1 < n_slices) {
                fetch(k + TILE_STAGES - 1);
            }
            commit_async();
            const float * x_s = smem_f + k % TILE_STAGES * stage + tm * TILE_STRIDE;
            const float * q_s = smem_f + k % TILE_STAGES * stage + (TILE_BLOCKS + C * tn) * TILE_STRIDE;
#pragma unroll 1  // one round of loads at a time, or they push the sums out of the registers
            for (int e = 0; e < TILE_SLICE; e += 4) {
                float4 x[8];
#pragma unroll
                for (int i = 0; i < 8; ++i) {
                    x[i] = *reinterpret_cast<const float4 *>(x_s + 8 * i * TILE_STRIDE + e);
                }
#pragma unroll
                for (int j = 0; j < C; ++j) {
                    const float4 y = *reinterpret_cast<const float4 *>(q_s + j * TILE_STRIDE + e);
#pragma unroll
                    for (int i = 0; i < 8; ++i) {
                        dot[i][j] = fmaf(x[i].x, y.x, dot[i][j]);
                    }
#pragma unroll
                    for (int i = 0; i < 8; ++i) {
                        dot[i][j] = fmaf(x[i].y, y.y, dot[i][j]);
                    }
#pragma unroll
                    for (int i = 0; i < 8; ++i) {
                        dot[i][j] = fmaf(x[i].z, y.z, dot[i][j]);
                    }
#pragma unroll
                    for (int i = 0; i < 8; ++i) {
                        dot[i][j] = fmaf(x[i].w, y.w, dot[i][j]);
                    }
                }
            }
        }
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            const int  row  = 2 * tn + j;
            const int  vis  = now >> row & 1 ? vis_s[row] : 0;
            uint32_t * keys = a.keys + (size_t) (row0 + row) * a.n_block_max;
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                uint32_t top = 0;
#pragma unroll
                for (int i = 4 * half; i < 4 * half + 4; ++i) {
                    float score = 0.0f;
#pragma unroll
                    for (int t = 0; t < H; ++t) {
                        score += relu(dot[i][j * H + t]);
                    }
                    const int b = block0 + 8 * i + tm;
                    if (b < vis) {
                        keys[b] = key_of(score);
                        top     = max(top, key_of(score));
                    }
                }
                if (has_tops(a)) {
#pragma unroll
                    for (int d = 4; d > 0; d /= 2) {
                        top = max(top, __shfl_xor_sync(0xFFFFFFFF, top, d));
                    }
                    const int b = block0 + SELECT_GROUP * half;
                    if (tm == 0 && b < vis) {
                        a.tops[(row0 + row) * SELECT_TOPS + b / SELECT_GROUP] = top;
                    }
                }
            }
        }
    }
}

}  // namespace qsa
