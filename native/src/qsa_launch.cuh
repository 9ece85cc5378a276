// Launches of the QSA kernels. Grids depend on shapes alone; nothing allocates or waits, so a CUDA graph can capture them.
#pragma once

#include "qsa_attn.cuh"
#include "qsa_attn_plain.cuh"
#include "qsa_pick.cuh"
#include "qsa_pool.cuh"
#include "qsa_score.cuh"

namespace qsa {

// What the device offers, as the caller read it.
struct device_limits {
    int    cc;          // 900 for sm_90: the newest compiled architecture that this device runs
    size_t smem_block;  // bytes of shared memory a block may opt into
};

// Raises a kernel's limit of dynamic shared memory; cheap, and legal while a graph is captured. The 48 KiB that need no
// permission hold the static part too: picking in a cache of 131072 cells wants exactly 48 KiB beside it.
template <typename K> static cudaError_t allow_smem(K kernel, int bytes) {
    if (bytes <= 40 * 1024) {
        return cudaSuccess;
    }
    return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
}

// For a kernel that calls wait_for_kernel_before(): from sm_90 on its launch overlaps with the kernel before it.
template <typename... P, typename... A>
static cudaError_t launch_early(void (*kernel)(P...), int grid, int threads, int smem, const device_limits & dev,
                                cudaStream_t stream, const A &... args) {
#if CUDART_VERSION >= 11080
    cudaLaunchAttribute early                      = {};
    early.id                                       = cudaLaunchAttributeProgrammaticStreamSerialization;
    early.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config                      = {};
    config.gridDim                                 = dim3(grid);
    config.blockDim                                = dim3(threads);
    config.dynamicSmemBytes                        = smem;
    config.stream                                  = stream;
    config.attrs                                   = &early;
    config.numAttrs                                = dev.cc >= 900 ? 1 : 0;
    return cudaLaunchKernelEx(&config, kernel, args...);
#else
    (void) dev;
    kernel<<<grid, threads, smem, stream>>>(args...);
    return cudaGetLastError();
#endif
}

// ---- ATTN ----------------------------------------------------------------------------------------------------------

// Cache types read as they are; every other pair goes through F16 tiles.
static inline bool attn_is_direct(int k_type, int v_type) {
    return k_type == v_type && k_type != T_F32;
}

template <int D, int type, bool converted> static cudaError_t launch_attn_mma(const attn_args & a, cudaStream_t stream) {
    const auto kernel = attn_kernel<D, type, type, converted>;
    const int  smem   = attn_smem_bytes<D, type, type>() + attn_blocks_bytes(a.ntop);
    const int  grid   = a.n_tokens * a.n_head_kv * attn_row_groups(a) * a.n_split;
    const cudaError_t e = allow_smem(kernel, smem);
    if (e != cudaSuccess) {
        return e;
    }
    kernel<<<grid, ATTN_WARPS * 32, smem, stream>>>(a);
    return cudaGetLastError();
}

template <int D> static cudaError_t launch_attn_plain(const attn_args & a, cudaStream_t stream) {
    const auto kernel = attn_plain_kernel<D>;
    const int  smem   = attn_plain_smem_bytes<D>() + attn_blocks_bytes(a.ntop);
    const int  grid   = a.n_tokens * a.n_head_kv * attn_row_groups(a) * a.n_split;
    const cudaError_t e = allow_smem(kernel, smem);
    if (e != cudaSuccess) {
        return e;
    }
    kernel<<<grid, 128, smem, stream>>>(a);
    return cudaGetLastError();
}

template <int D> static cudaError_t launch_attn_d(const attn_args & a, const device_limits & dev, cudaStream_t stream) {
    cudaError_t e;
    if (dev.cc < 800) {
        e = launch_attn_plain<D>(a, stream);
    } else if (!attn_is_direct(a.k_type, a.v_type)) {
        e = launch_attn_mma<D, T_F16, true>(a, stream);
    } else {
        switch (a.k_type) {
            case T_F16:    e = launch_attn_mma<D, T_F16, false>(a, stream); break;
            case T_BF16:   e = launch_attn_mma<D, T_BF16, false>(a, stream); break;
            case T_Q8_0:   e = launch_attn_mma<D, T_Q8_0, false>(a, stream); break;
            case T_Q5_1:   e = launch_attn_mma<D, T_Q5_1, false>(a, stream); break;
            case T_Q5_0:   e = launch_attn_mma<D, T_Q5_0, false>(a, stream); break;
            case T_Q4_1:   e = launch_attn_mma<D, T_Q4_1, false>(a, stream); break;
            case T_Q4_0:   e = launch_attn_mma<D, T_Q4_0, false>(a, stream); break;
            case T_IQ4_NL: e = launch_attn_mma<D, T_IQ4_NL, false>(a, stream); break;
            default:       return cudaErrorInvalidValue;
        }
    }
    if (e == cudaSuccess && a.n_split > 1) {
        e = launch_early(attn_combine_kernel, a.n_tokens * a.n_head, D, 0, dev, stream, a);
    }
    return e;
}

static inline bool attn_supported(int head_size, int n_head, int n_head_kv, int ntop, int log2r, int n_split,
                                  const device_limits & dev) {
    const bool   shape = (head_size == 64 || head_size == 128 || head_size == 256) && n_head_kv > 0 &&
                       n_head % n_head_kv == 0 && log2r >= 1 && log2r <= 4 && ntop <= 1024 && n_split >= 1 &&
                       n_split <= ATTN_MAX_SPLIT;
    const size_t smem = dev.cc < 800 ? attn_plain_smem_bytes<256>() : attn_smem_bytes<256, T_F16, T_F16>();
    return shape && smem + attn_blocks_bytes(ntop) <= dev.smem_block;
}

static inline cudaError_t launch_attn(const attn_args & a, const device_limits & dev, cudaStream_t stream) {
    switch (a.head_size) {
        case 64:  return launch_attn_d<64>(a, dev, stream);
        case 128: return launch_attn_d<128>(a, dev, stream);
        case 256: return launch_attn_d<256>(a, dev, stream);
        default:  return cudaErrorInvalidValue;
    }
}

// ---- POOL ----------------------------------------------------------------------------------------------------------

static inline bool pool_supported(int d, int n_rot, int log2r) {
    return d % 32 == 0 && d > 0 && d <= POOL_MAX_D && n_rot % 2 == 0 && n_rot <= d && log2r >= 1 && log2r <= 4;
}

// One launch serves both one new block per stream and the whole cache after a restore.
static inline cudaError_t launch_pool(const pool_args & a, int n_sm, cudaStream_t stream) {
    const int grid = n_sm > 32 ? n_sm : 32;
    const int threads = POOL_WARPS * 32;
    switch (a.raw_type) {
        case T_F32:    pool_kernel<T_F32><<<grid, threads, 0, stream>>>(a); break;
        case T_F16:    pool_kernel<T_F16><<<grid, threads, 0, stream>>>(a); break;
        case T_BF16:   pool_kernel<T_BF16><<<grid, threads, 0, stream>>>(a); break;
        case T_Q8_0:   pool_kernel<T_Q8_0><<<grid, threads, 0, stream>>>(a); break;
        case T_Q5_1:   pool_kernel<T_Q5_1><<<grid, threads, 0, stream>>>(a); break;
        case T_Q5_0:   pool_kernel<T_Q5_0><<<grid, threads, 0, stream>>>(a); break;
        case T_Q4_1:   pool_kernel<T_Q4_1><<<grid, threads, 0, stream>>>(a); break;
        case T_Q4_0:   pool_kernel<T_Q4_0><<<grid, threads, 0, stream>>>(a); break;
        case T_IQ4_NL: pool_kernel<T_IQ4_NL><<<grid, threads, 0, stream>>>(a); break;
        default:       return cudaErrorInvalidValue;
    }
    return cudaGetLastError();
}

// ---- SELECT --------------------------------------------------------------------------------------------------------

constexpr int SELECT_FEW = 8;  // up to this many tokens each reads the keys for itself

static inline int pick_candidates(int n_block_max, const device_limits & dev) {
    const int fixed = pick_smem_bytes(n_block_max, 0) + 4096;  // and the static part
    const int n     = ((int) dev.smem_block - fixed) / (int) sizeof(pick_candidate);
    return n < 0 ? 0 : n > 4096 ? 4096 : n;
}

static inline bool select_supported(int d, int h, int ntop, int log2r, int n_block_max, const device_limits & dev) {
    return (d == 64 || d == PICK_MAX_D) && h >= 1 && h <= MMA_HEADS && ntop <= 1024 && log2r >= 1 && log2r <= 4 &&
           n_block_max % 4 == 0 && n_block_max < (1 << 24) && pick_candidates(n_block_max, dev) > 0;
}

// Scores in F16 first, exact ones for what may be chosen. Wants tensor cores and room for the bounds.
static inline bool uses_bounds(const select_args & a, const device_limits & dev) {
    return dev.cc >= 800 && a.n_tokens > SELECT_FEW && has_tops(a) && a.n_block_max >= SELECT_GROUP;
}

template <int D, int H> static cudaError_t launch_score(const select_args & a, cudaStream_t stream) {
    cudaError_t e = cudaSuccess;
    if (a.n_tokens <= SELECT_FEW) {
        const int grid = a.n_rows * ceil_div(a.n_block_max, FEW_BLOCKS);
        score_few_kernel<D, H><<<grid, FEW_BLOCKS, score_few_smem_bytes<D>(H), stream>>>(a);
    } else {
        const int grid = ceil_div(a.n_rows, TILE_TOKENS) * ceil_div(a.n_block_max, TILE_BLOCKS);
        const int smem = score_tile_smem_bytes(H);
        e              = allow_smem(score_tile_kernel<D, H>, smem);
        if (e == cudaSuccess) {
            score_tile_kernel<D, H><<<grid, TILE_THREADS, smem, stream>>>(a);
        }
    }
    return e != cudaSuccess ? e : cudaGetLastError();
}

template <int D> static cudaError_t launch_score_d(const select_args & a, const device_limits & dev, cudaStream_t stream) {
    if (uses_bounds(a, dev)) {
        const int         grid = ceil_div(a.n_rows, MMA_TOKENS) * ceil_div(a.n_block_max, MMA_BLOCKS);
        const cudaError_t e    = allow_smem(score_mma_kernel<D>, score_mma_smem_bytes(D));
        if (e != cudaSuccess) {
            return e;
        }
        score_mma_kernel<D><<<grid, MMA_WARPS * 32, score_mma_smem_bytes(D), stream>>>(a);
        return cudaGetLastError();
    }
    switch (a.h) {
        case 1:  return launch_score<D, 1>(a, stream);
        case 2:  return launch_score<D, 2>(a, stream);
        case 3:  return launch_score<D, 3>(a, stream);
        case 4:  return launch_score<D, 4>(a, stream);
        default: return cudaErrorInvalidValue;
    }
}

static inline cudaError_t launch_scores(const select_args & a, const device_limits & dev, cudaStream_t stream) {
    return a.d == 64 ? launch_score_d<64>(a, dev, stream) : launch_score_d<128>(a, dev, stream);
}

static inline cudaError_t launch_pick(const select_args & a, const device_limits & dev, cudaStream_t stream) {
    const int         n_candidates = pick_candidates(a.n_block_max, dev);
    const int         smem         = pick_smem_bytes(a.n_block_max, n_candidates);
    const auto        kernel       = uses_bounds(a, dev) ? pick_kernel<true> : pick_kernel<false>;
    const cudaError_t e            = allow_smem(kernel, smem);
    if (e != cudaSuccess) {
        return e;
    }
    return launch_early(kernel, a.n_rows, PICK_THREADS, smem, dev, stream, a, n_candidates);
}

// `rows`: tokens that share the workspace at a time.
static inline cudaError_t launch_select(select_args a, int rows, const device_limits & dev, cudaStream_t stream) {
    cudaError_t e = cudaSuccess;
    a.tops        = a.keys + (size_t) rows * a.n_block_max;
    for (a.row0 = 0; a.row0 < a.n_tokens && e == cudaSuccess; a.row0 += rows) {
        a.n_rows = a.n_tokens - a.row0 < rows ? a.n_tokens - a.row0 : rows;
        e        = launch_scores(a, dev, stream);
        if (e == cudaSuccess) {
            e = launch_pick(a, dev, stream);
        }
    }
    return e;
}

}  // namespace qsa
