// The ntop best keys of a token as an ascending list. One CTA per token. Order is (key descending, block ascending), which
// is total, so no order of execution can change the list.
//
// First a floor that at least ntop keys reach: the ntop-th largest of the maxima of groups of 32 blocks (at least ntop
// groups, so at least ntop keys, reach it), or, with too few groups, the bin of a histogram. Keys that reach the floor
// become candidates in shared memory, usually little more than ntop, and three rounds of histograms over them give the
// exact threshold. Too many candidates (ties): the rounds read all keys. Chosen blocks are marked in a bit map, whose
// ordered read-out is the list.
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

// Calls fn(key, block, is_valid) for all keys; every lane of a warp takes part in every call.
template <typename F> static __device__ __forceinline__ void for_keys(const uint32_t * keys, int n, F && fn) {
    constexpr int step = PICK_THREADS * 4;
    for (int i0 = 0; i0 < n; i0 += 4 * step) {
        uint4 w[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const int i = i0 + j * step + 4 * threadIdx.x;
            w[j]        = i < n ? *reinterpret_cast<const uint4 *>(keys + i) : make_uint4(0, 0, 0, 0);
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

// Adds (key, block) of the lanes that have one to the candidates; all lanes of a warp take part. Past the end only the
// count goes on.
static __device__ __forceinline__ void append(bool has, uint32_t key, int block, pick_candidate * candidates,
                                              int n_max, int * count) {
    const uint32_t all = __ballot_sync(0xFFFFFFFF, has);
    if (all) {
        const int lane  = threadIdx.x % 32;
        int       first = 0;
        if (lane == 0) {
            first = atomicAdd(count, __popc(all));
        }
        first = __shfl_sync(0xFFFFFFFF, first, 0) + __popc(all & ((1u << lane) - 1));
        if (has && first < n_max) {
            candidates[first] = { key, block };
        }
    }
}

static __global__ void __launch_bounds__(PICK_THREADS) pick_kernel(const select_args a, int n_candidates_max) {
    extern __shared__ __align__(16) uint32_t smem_u[];
    __shared__ int warp_sums[32];
    __shared__ int found[3];
    __shared__ int n_candidates;
    __shared__ int n_groups;

    const int        n_words    = pick_map_words(a.n_block_max);
    uint32_t *       bins       = smem_u;
    uint32_t *       above      = bins + PICK_BINS;  // bit map of keys above the threshold
    uint32_t *       equal      = above + n_words;   // bit map of keys equal to it
    pick_candidate * candidates = reinterpret_cast<pick_candidate *>(equal + n_words);

    const int   t    = a.row0 + blockIdx.x;
    const int   tid  = threadIdx.x;
    const int   lane = tid % 32;
    const place p    = place_of(a.k_idxs[t], a.kv_size, a.log2r);
    int32_t *   list = a.list + (size_t) t * a.ntop;
    const int   n    = p.n_vis;
    if (n <= a.ntop) {
        for (int i = tid; i < a.ntop; i += PICK_THREADS) {
            list[i] = i < n ? i : -1;
        }
        return;
    }
    const uint32_t * keys  = a.keys + (size_t) blockIdx.x * a.n_block_max;
    const uint32_t * tops  = a.tops + (size_t) blockIdx.x * SELECT_TOPS;
    const int        n_top = ceil_div(n, SELECT_GROUP);
    int              dummy;

    clear_cta(bins, PICK_BINS + 2 * n_words);
    if (tid == 0) {
        n_candidates = 0;
        n_groups     = 0;
    }
    __syncthreads();

    if (n > n_candidates_max && has_tops(a) && n_top > a.ntop) {
        // two maxima per thread, kept in registers
        uint32_t top[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int g = tid + i * PICK_THREADS;
            top[i]      = g < n_top ? tops[g] : 0;
            if (g < n_top) {
                atomicAdd(&bins[top[i] >> 20], 1);
            }
        }
        __syncthreads();
        int            wanted = a.ntop;
        const uint32_t high   = find_bin(bins, PICK_BINS, wanted, dummy, warp_sums, found);
        __syncthreads();
        clear_cta(bins, 1024);
        __syncthreads();
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            if (tid + i * PICK_THREADS < n_top && top[i] >> 20 == high) {
                atomicAdd(&bins[top[i] >> 10 & 1023], 1);
            }
        }
        __syncthreads();
        const uint32_t floor_key = (high << 10 | find_bin(bins, 1024, wanted, dummy, warp_sums, found)) << 10;
        __syncthreads();
        int * groups = reinterpret_cast<int *>(bins);  // numbers of the groups that reach the floor
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int      g   = tid + i * PICK_THREADS;
            const bool     has = g < n_top && top[i] >= floor_key;
            const uint32_t all = __ballot_sync(0xFFFFFFFF, has);
            int            at  = 0;
            if (all && lane == 0) {
                at = atomicAdd(&n_groups, __popc(all));
            }
            at = __shfl_sync(0xFFFFFFFF, at, 0) + __popc(all & ((1u << lane) - 1));
            if (has) {
                groups[at] = g;
            }
        }
        __syncthreads();
        constexpr int batch = 8;  // groups a warp has in flight
        for (int i0 = tid / 32; i0 < n_groups; i0 += batch * (PICK_THREADS / 32)) {
            uint32_t key[batch];
            int      block[batch];
#pragma unroll
            for (int j = 0; j < batch; ++j) {
                const int i = i0 + j * (PICK_THREADS / 32);
                block[j]    = i < n_groups ? groups[i] * SELECT_GROUP + lane : n;
                key[j]      = block[j] < n ? keys[block[j]] : 0;
            }
#pragma unroll
            for (int j = 0; j < batch; ++j) {
                append(block[j] < n && key[j] >= floor_key, key[j], block[j], candidates, n_candidates_max,
                       &n_candidates);
            }
        }
    } else {
        uint32_t floor_key = 0;
        if (n > n_candidates_max) {
            for_keys(keys, n, [&](uint32_t key, int, bool valid) {
                if (valid) {
                    atomicAdd(&bins[key >> 20], 1);
                }
            });
            __syncthreads();
            int wanted = a.ntop;
            floor_key  = find_bin(bins, PICK_BINS, wanted, dummy, warp_sums, found) << 20;
        }
        for_keys(keys, n, [&](uint32_t key, int block, bool valid) {
            append(valid && key >= floor_key, key, block, candidates, n_candidates_max, &n_candidates);
        });
    }
    __syncthreads();

    const int  count          = n_candidates;
    const bool listed         = count <= n_candidates_max;
    const auto for_candidates = [&](auto && fn) {
        if (listed) {
            for (int i = tid; i < count; i += PICK_THREADS) {
                fn(candidates[i].key, candidates[i].block);
            }
        } else {
            for_keys(keys, n, [&](uint32_t key, int block, bool valid) {
                if (valid) {
                    fn(key, block);
                }
            });
        }
        __syncthreads();
    };
    // bits 30..20, 19..10, 9..0 of the ntop-th largest key; bit 31 is a sign that is never set
    int      wanted    = a.ntop;
    uint32_t threshold = 0;
    int      low       = 31;
    for (int round = 0; round < 3; ++round) {
        const int high   = low;
        const int n_bins = round == 0 ? 2048 : 1024;
        low -= round == 0 ? 11 : 10;
        clear_cta(bins, n_bins);
        __syncthreads();
        for_candidates([&](uint32_t key, int) {
            if (key >> high == threshold) {
                atomicAdd(&bins[key >> low & (n_bins - 1)], 1);
            }
        });
        threshold = threshold * n_bins + find_bin(bins, n_bins, wanted, dummy, warp_sums, found);
        __syncthreads();
    }
    for_candidates([&](uint32_t key, int block) {
        if (key > threshold) {
            atomicOr(&above[block / 32], 1u << block % 32);
        } else if (key == threshold) {
            atomicOr(&equal[block / 32], 1u << block % 32);
        }
    });

    // `wanted` of the equal ones are in, the lowest blocks first
    const int words = ceil_div(ceil_div(n, 32), PICK_THREADS);  // per thread, neighbouring
    const int w0    = tid * words;
    const int w1    = min(w0 + words, n_words);
    int       sum   = 0;
    for (int i = w0; i < w1; ++i) {
        sum += __popc(equal[i]);
    }
    int total;
    int rank = scan_cta(sum, warp_sums, total);
    sum      = 0;
    for (int i = w0; i < w1; ++i) {
        uint32_t e = equal[i];
        uint32_t w = above[i];
        for (; e && rank < wanted; ++rank) {
            w |= e & (0u - e);
            e &= e - 1;
        }
        rank += __popc(e);
        above[i] = w;
        sum += __popc(w);
    }
    int at = scan_cta(sum, warp_sums, total);
    for (int i = w0; i < w1; ++i) {
        for (uint32_t w = above[i]; w; w &= w - 1) {
            list[at++] = 32 * i + __ffs(w) - 1;
        }
    }
}

}  // namespace qsa
