// The ntop best keys of a token as an ascending list. One CTA per token. Order is (key descending, block ascending), which
// is total, so no order of execution can change the list.
//
// First a floor that at least ntop keys reach: the ntop-th largest of the maxima of groups of 32 blocks (at least ntop
// groups, so at least ntop keys, reach it), or, with too few groups, the bin of a histogram. Keys that reach the floor
// become candidates in shared memory, usually little more than ntop, and three rounds of histograms over them give the
// exact threshold. Too many candidates (ties): the rounds read all keys. Chosen blocks are marked in a bit map, whose
// ordered read-out is the list.
//
// With `bounds` the keys are upper bounds: the floor then comes from lower bounds, and candidates get their exact scores
// here (all blocks do, if there are too many candidates).
#pragma once

#include "qsa_score_mma.cuh"

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

constexpr int PICK_MAX_D = 128;  // of exact scores

// Sum over the heads of the norm of a query in shared memory, rows of d + 4.
static __device__ __forceinline__ float query_norm(const float * q_s, int h, int d) {
    const int lane = threadIdx.x % 32;
    float     sum  = 0.0f;
    for (int i = 0; i < h; ++i) {
        float square = 0.0f;
        for (int e = lane; e < d; e += 32) {
            const float x = q_s[i * (d + 4) + e];
            square += x * x;
        }
#pragma unroll
        for (int j = 16; j > 0; j /= 2) {
            square += __shfl_xor_sync(0xFFFFFFFF, square, j);
        }
        sum += sqrtf(square);
    }
    return sum;
}

// Exact scores of blocks block_of(0 .. n-1), given to give(i, key). Four lanes share a block, one head each.
template <typename B, typename G>
static __device__ __forceinline__ void exact_scores(const select_args & a, const float * pooled, const float * q_s, int n,
                                                    B && block_of, G && give) {
    const int     lane = threadIdx.x % 32;
    const int     head = lane % MMA_HEADS;
    const float * y_s  = q_s + min(head, a.h - 1) * (a.d + 4);
    for (int i0 = 0; i0 + (int) threadIdx.x / 32 * 8 < n; i0 += PICK_THREADS / MMA_HEADS) {
        const int     i = i0 + threadIdx.x / MMA_HEADS;
        const float * p = pooled + (size_t) block_of(min(i, n - 1)) * a.d;
        float         dot = 0.0f;
        for (int e0 = 0; e0 < a.d; e0 += 32) {
            float4 x[8];
#pragma unroll
            for (int j = 0; j < 8; ++j) {
                x[j] = *reinterpret_cast<const float4 *>(p + e0 + 4 * j);
            }
#pragma unroll
            for (int j = 0; j < 8; ++j) {
                const float4 y = *reinterpret_cast<const float4 *>(y_s + e0 + 4 * j);
                dot            = fmaf(x[j].x, y.x, dot);
                dot            = fmaf(x[j].y, y.y, dot);
                dot            = fmaf(x[j].z, y.z, dot);
                dot            = fmaf(x[j].w, y.w, dot);
            }
        }
        dot         = relu(dot);
        float score = 0.0f;
        for (int j = 0; j < a.h; ++j) {
            score += __shfl_sync(0xFFFFFFFF, dot, (lane & ~(MMA_HEADS - 1)) + j);
        }
        if (i < n && head == 0) {
            give(i, key_of(score));
        }
    }
}

// Candidates that are chosen whatever their exact score: those whose lower bound passes the (ntop + 1)-th largest upper
// bound, for at most ntop blocks can score that much. They are marked in `above` and leave the list; returns their number.
static __device__ __forceinline__ int take_sure(const select_args & a, float q_norm, uint32_t * bins, uint32_t * above,
                                                pick_candidate * candidates, int count, int * warp_sums, int * found,
                                                int * n_left, int * n_sure) {
    constexpr int  per_thread = 4;  // 4096 candidates
    const int      tid        = threadIdx.x;
    uint32_t       key[per_thread];
    int            block[per_thread];
    bool           here[per_thread], left[per_thread];
    uint32_t       rival  = 0;
    int            wanted = a.ntop + 1, dummy;
    __syncthreads();  // everybody has read the count
    clear_cta(bins, PICK_BINS);
    if (tid == 0) {
        *n_left = 0;
        *n_sure = 0;
    }
#pragma unroll
    for (int j = 0; j < per_thread; ++j) {
        const int i = tid + j * PICK_THREADS;
        here[j]     = i < count;
        key[j]      = here[j] ? candidates[i].key : 0;
        block[j]    = here[j] ? candidates[i].block : 0;
    }
    __syncthreads();
    if (count > a.ntop) {
#pragma unroll
        for (int j = 0; j < per_thread; ++j) {
            if (here[j]) {
                atomicAdd(&bins[key[j] >> 20], 1);
            }
        }
        __syncthreads();
        const uint32_t high = find_bin(bins, PICK_BINS, wanted, dummy, warp_sums, found);
        __syncthreads();
        clear_cta(bins, 32);
        __syncthreads();
#pragma unroll
        for (int j = 0; j < per_thread; ++j) {
            if (here[j] && key[j] >> 20 == high) {
                atomicAdd(&bins[key[j] >> 15 & 31], 1);
            }
        }
        __syncthreads();
        rival = high << 20 | find_bin(bins, 32, wanted, dummy, warp_sums, found) << 15;
    }
    int n = 0;
#pragma unroll
    for (int j = 0; j < per_thread; ++j) {
        left[j] = false;
        if (here[j]) {
            const float error = score_error(q_norm, bound_norms(a, blockIdx.x)[block[j] / SELECT_GROUP]);
            const float lower = BOUND_ROUNDING * __uint_as_float(key[j]) - 2.0f * error;
            left[j]           = count > a.ntop && !(lower > __uint_as_float(rival));
            if (!left[j]) {
                atomicOr(&above[block[j] / 32], 1u << block[j] % 32);
            }
        }
        n += __popc(__ballot_sync(0xFFFFFFFF, here[j] && !left[j]));
    }
    if (tid % 32 == 0 && n) {
        atomicAdd(n_sure, n);
    }
    append(left, key, block, candidates, PICK_THREADS * per_thread, n_left);
    __syncthreads();
    return *n_sure;
}

template <bool bounds>
static __global__ void __launch_bounds__(PICK_THREADS) pick_kernel(const select_args a, int n_candidates_max) {
    extern __shared__ __align__(16) uint32_t smem_u[];
    __shared__ int warp_sums[32];
    __shared__ int found[3];
    __shared__ int n_candidates;
    __shared__ int n_groups;
    __shared__ int top_norm;  // bits of a float
    __shared__ __align__(16) float q_s[bounds ? MMA_HEADS * (PICK_MAX_D + 4) : 4];

    const int        n_words    = pick_map_words(a.n_block_max);
    uint32_t *       bins       = smem_u;
    uint32_t *       above      = bins + PICK_BINS;  // bit map of keys above the threshold
    uint32_t *       equal      = above + n_words;   // bit map of keys equal to it
    pick_candidate * candidates = reinterpret_cast<pick_candidate *>(equal + n_words);

    const int   t    = a.row0 + blockIdx.x;
    const int   tid  = threadIdx.x;
    const int   lane = tid % 32;
    const int64_t idx = a.k_idxs[t];
    clear_cta(bins, PICK_BINS + 2 * n_words);  // while the position travels
    const place p    = place_of(idx, a.kv_size, a.log2r);
    int32_t *   list = a.list + (size_t) t * a.ntop;
    const int   n    = p.n_vis;
    if (n <= a.ntop) {
        for (int i = tid; i < a.ntop; i += PICK_THREADS) {
            list[i] = i < n ? i : -1;
        }
        return;
    }
    uint32_t *       keys  = a.keys + (size_t) blockIdx.x * a.n_block_max;
    const uint32_t * tops  = a.tops + (size_t) blockIdx.x * SELECT_TOPS;
    const int        n_top = ceil_div(n, SELECT_GROUP);
    int              dummy;

    if (tid == 0) {
        n_candidates = 0;
        n_groups     = 0;
        top_norm     = 0;
    }
    if constexpr (bounds) {
        for (int i = tid; i < a.h * a.d / 4; i += PICK_THREADS) {
            const int head = i / (a.d / 4);
            const int e    = i % (a.d / 4) * 4;
            *reinterpret_cast<float4 *>(q_s + head * (a.d + 4) + e) =
                *reinterpret_cast<const float4 *>(a.q + t * a.q_token + head * a.q_head + e);
        }
    }
    __syncthreads();
    const float q_norm = bounds ? query_norm(q_s, a.h, a.d) : 0.0f;

    if ((bounds || n > n_candidates_max) && has_tops(a) && n_top > a.ntop) {
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
            if (bounds && g < n_top) {
                top[i] = bound_uppers(a, blockIdx.x)[g];
            }
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
            bool     has[batch];
#pragma unroll
            for (int j = 0; j < batch; ++j) {
                const int i = i0 + j * (PICK_THREADS / 32);
                block[j]    = i < n_groups ? groups[i] * SELECT_GROUP + lane : n;
                key[j]      = block[j] >= n ? 0 :
                              bounds        ? wide_key(bound_keys(a, blockIdx.x)[block[j]]) :
                                              keys[block[j]];
            }
#pragma unroll
            for (int j = 0; j < batch; ++j) {
                has[j] = block[j] < n && key[j] >= floor_key;
            }
            append(has, key, block, candidates, n_candidates_max, &n_candidates);
        }
    } else {
        uint32_t floor_key = 0;
        if (bounds || n > n_candidates_max) {
            for_keys<bounds>(keys, n, [&](uint32_t key, int, bool valid) {
                if (valid) {
                    atomicAdd(&bins[key >> 20], 1);
                }
            });
            __syncthreads();
            int wanted = a.ntop;
            floor_key  = find_bin(bins, PICK_BINS, wanted, dummy, warp_sums, found) << 20;
            if constexpr (bounds) {
                // the other five bits of an upper bound
                __syncthreads();
                clear_cta(bins, 32);
                for (int i = tid; i < n_top; i += PICK_THREADS) {
                    atomicMax(&top_norm, __float_as_int(bound_norms(a, blockIdx.x)[i]));
                }
                __syncthreads();
                for_keys<bounds>(keys, n, [&](uint32_t key, int, bool valid) {
                    if (valid && key >> 20 == floor_key >> 20) {
                        atomicAdd(&bins[key >> 15 & 31], 1);
                    }
                });
                __syncthreads();
                floor_key |= find_bin(bins, 32, wanted, dummy, warp_sums, found) << 15;
                // ntop blocks have such an upper bound; two errors below it is a lower bound
                const float error = score_error(q_norm, __int_as_float(top_norm));
                floor_key = key_of(fmaxf(0.0f, BOUND_ROUNDING * __uint_as_float(floor_key) - 2.0f * error));
            }
        }
        constexpr int step = PICK_THREADS * 4;
        for (int i0 = 0; i0 < n; i0 += step) {
            const int      i        = i0 + 4 * tid;
            const uint4    w        = i < n ? four_keys<bounds>(keys, i) : make_uint4(0, 0, 0, 0);
            const uint32_t key[4]   = { w.x, w.y, w.z, w.w };
            const int      block[4] = { i, i + 1, i + 2, i + 3 };
            bool           has[4];
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                has[j] = block[j] < n && key[j] >= floor_key;
            }
            append(has, key, block, candidates, n_candidates_max, &n_candidates);
        }
    }
    __syncthreads();

    int        count  = n_candidates;
    const bool listed = count <= n_candidates_max;
    int        wanted = a.ntop;  // of the candidates
    if constexpr (bounds) {
        if (listed) {
            wanted -= take_sure(a, q_norm, bins, above, candidates, count, warp_sums, found, &n_candidates, &n_groups);
            count = n_candidates;
        }
        const float * pooled = a.pooled + first_block(p, a.log2r) * a.d;
        if (listed) {
            exact_scores(
                a, pooled, q_s, count, [&](int i) { return candidates[i].block; },
                [&](int i, uint32_t key) { candidates[i].key = key; });
        } else {
            exact_scores(
                a, pooled, q_s, n, [](int i) { return i; }, [&](int i, uint32_t key) { keys[i] = key; });
        }
        __syncthreads();
    }
    const auto for_candidates = [&](auto && fn) {
        if (listed) {
            for (int i = tid; i < count; i += PICK_THREADS) {
                fn(candidates[i].key, candidates[i].block);
            }
        } else {
            for_keys<false>(keys, n, [&](uint32_t key, int block, bool valid) {
                if (valid) {
                    fn(key, block);
                }
            });
        }
        __syncthreads();
    };
    // bits 30..20, 19..10, 9..0 of the ntop-th largest key; bit 31 is a sign that is never set
    uint32_t threshold = wanted > 0 ? 0 : 0xFFFFFFFF;
    int      low       = 31;
    for (int round = 0; round < 3 && wanted > 0; ++round) {
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
