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

#include "qsa_pick_exact.cuh"

namespace qsa {

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
    wait_for_kernel_before();
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
