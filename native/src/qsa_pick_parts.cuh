// What picking is made of: scans, histograms, walks over keys, the list of candidates. For CTAs of PICK_THREADS.
#pragma once

#include "qsa_select_args.cuh"

namespace qsa {

constexpr int PICK_THREADS = 1024;
constexpr int PICK_BINS    = 2048;

struct pick_candidate {
    uint32_t key;
    int      block;
};

static __host__ __device__ inline int pick_map_words(int n_block_max) {
    return ceil_div(n_block_max, 32);
}

static __host__ __device__ inline int pick_smem_bytes(int n_block_max, int n_candidates) {
    return PICK_BINS * 4 + 2 * pick_map_words(n_block_max) * 4 + n_candidates * (int) sizeof(pick_candidate);
}

// Exclusive prefix sum over the CTA, and the total.
static __device__ __forceinline__ int scan_cta(int x, int * warp_sums, int & total) {
    const int warp = threadIdx.x / 32;
    const int lane = threadIdx.x % 32;
    int       y    = x;
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
        const int t = __shfl_up_sync(0xFFFFFFFF, y, d);
        y += lane >= d ? t : 0;
    }
    __syncthreads();
    if (lane == 31) {
        warp_sums[warp] = y;
    }
    __syncthreads();
    int w = warp_sums[lane];  // PICK_THREADS / 32 == 32 warps
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
        const int t = __shfl_up_sync(0xFFFFFFFF, w, d);
        w += lane >= d ? t : 0;
    }
    total = __shfl_sync(0xFFFFFFFF, w, 31);
    w     = __shfl_sync(0xFFFFFFFF, w, (warp + 31) % 32);
    return y - x + (warp > 0 ? w : 0);
}

// The bin that holds the `wanted`-th largest entry; `wanted` becomes its rank inside the bin, `count` the bin's size.
static __device__ __forceinline__ uint32_t find_bin(const uint32_t * bins, int n_bins, int & wanted, int & count,
                                                    int * warp_sums, int * found) {
    // two bins per thread, the highest first
    const int hi = n_bins - 1 - 2 * (int) threadIdx.x;
    const int x0 = hi >= 0 ? bins[hi] : 0;
    const int x1 = hi >= 1 ? bins[hi - 1] : 0;
    int       total;
    const int before = scan_cta(x0 + x1, warp_sums, total);
    if (before < wanted && wanted <= before + x0) {
        found[0] = hi, found[1] = wanted - before, found[2] = x0;
    } else if (before + x0 < wanted && wanted <= before + x0 + x1) {
        found[0] = hi - 1, found[1] = wanted - before - x0, found[2] = x1;
    }
    __syncthreads();
    wanted = found[1];
    count  = found[2];
    return found[0];
}

static __device__ __forceinline__ void clear_cta(uint32_t * p, int n) {
    for (int i = threadIdx.x; i < n; i += PICK_THREADS) {
        p[i] = 0;
    }
}

// Four neighbouring keys; upper bounds become floats again.
template <bool bounds> static __device__ __forceinline__ uint4 four_keys(const uint32_t * keys, int i) {
    if constexpr (bounds) {
        const uint2 w = *reinterpret_cast<const uint2 *>(reinterpret_cast<const uint16_t *>(keys) + i);
        return make_uint4(wide_key(w.x & 0xFFFF), wide_key(w.x >> 16), wide_key(w.y & 0xFFFF), wide_key(w.y >> 16));
    } else {
        return *reinterpret_cast<const uint4 *>(keys + i);
    }
}

// Calls fn(key, block, is_valid) for all keys; every lane of a warp takes part in every call.
template <bool bounds, typename F>
static __device__ __forceinline__ void for_keys(const uint32_t * keys, int n, F && fn) {
    constexpr int step = PICK_THREADS * 4;
    for (int i0 = 0; i0 < n; i0 += 4 * step) {
        uint4 w[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const int i = i0 + j * step + 4 * threadIdx.x;
            w[j]        = i < n ? four_keys<bounds>(keys, i) : make_uint4(0, 0, 0, 0);
        }
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            if (i0 + j * step >= n) {
                break;
            }
            const int i = i0 + j * step + 4 * threadIdx.x;
            fn(w[j].x, i, i < n);
            fn(w[j].y, i + 1, i + 1 < n);
            fn(w[j].z, i + 2, i + 2 < n);
            fn(w[j].w, i + 3, i + 3 < n);
        }
    }
}

// Adds the lanes' n (key, block) for which has[j] to the candidates; all lanes of a warp take part. One atomic for all n:
// it is the slow part. Past the end of the list only the count goes on.
template <int n>
static __device__ __forceinline__ void append(const bool (&has)[n], const uint32_t (&key)[n], const int (&block)[n],
                                              pick_candidate * candidates, int n_max, int * count) {
    const int lane = threadIdx.x % 32;
    uint32_t  all[n];
    int       sum = 0;
#pragma unroll
    for (int j = 0; j < n; ++j) {
        all[j] = __ballot_sync(0xFFFFFFFF, has[j]);
        sum += __popc(all[j]);
    }
    if (sum == 0) {
        return;
    }
    int at = 0;
    if (lane == 0) {
        at = atomicAdd(count, sum);
    }
    at = __shfl_sync(0xFFFFFFFF, at, 0);
#pragma unroll
    for (int j = 0; j < n; ++j) {
        const int i = at + __popc(all[j] & ((1u << lane) - 1));
        if (has[j] && i < n_max) {
            candidates[i] = { key[j], block[j] };
        }
        at += __popc(all[j]);
    }
}

}  // namespace qsa
