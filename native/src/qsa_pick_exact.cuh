// From bounds to exact scores: which candidates need one, and the scores themselves, bit-equal to qsa_score.cuh's.
#pragma once

#include "qsa_pick_parts.cuh"
#include "qsa_score_mma.cuh"

namespace qsa {

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

}  // namespace qsa
