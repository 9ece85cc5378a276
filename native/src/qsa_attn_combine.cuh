// The pieces that several CTAs made of one token, put together.
#pragma once

#include "qsa_attn_args.cuh"

namespace qsa {

constexpr int ATTN_MAX_SPLIT = 64;

// The pieces of one head of one token, in ascending order. A thread per column; all loads are independent.
static __global__ void attn_combine_kernel(const attn_args a) {
    constexpr int batch  = 17;  // loads in flight; 33 pieces are two batches
    const size_t  n_rows = (size_t) a.n_head * a.n_tokens;
    const size_t  r      = blockIdx.x;
    const int     lane   = threadIdx.x % 32;
    const float * ms     = a.part + a.n_split * n_rows * a.head_size;
    const float * ls     = ms + a.n_split * n_rows;
    float         w[2], l[2], m = -INFINITY;
    wait_for_kernel_before();
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const int s = lane + 32 * i;
        w[i]        = s < a.n_split ? ms[s * n_rows + r] : -INFINITY;
        l[i]        = s < a.n_split ? ls[s * n_rows + r] : 0.0f;
        m           = fmaxf(m, w[i]);
    }
#pragma unroll
    for (int d = 16; d > 0; d /= 2) {
        m = fmaxf(m, __shfl_xor_sync(0xFFFFFFFF, m, d));
    }
    w[0]      = exp2f(w[0] - m);
    w[1]      = exp2f(w[1] - m);
    float sum = w[0] * l[0] + w[1] * l[1];
#pragma unroll
    for (int d = 16; d > 0; d /= 2) {
        sum += __shfl_xor_sync(0xFFFFFFFF, sum, d);
    }
    float o = 0.0f;
    for (int s0 = 0; s0 < a.n_split; s0 += batch) {
        float v[batch];
#pragma unroll
        for (int j = 0; j < batch; ++j) {
            v[j] = s0 + j < a.n_split ? a.part[((s0 + j) * n_rows + r) * a.head_size + threadIdx.x] : 0.0f;
        }
#pragma unroll
        for (int j = 0; j < batch; ++j) {
            const int s = s0 + j;
            o           = fmaf(__shfl_sync(0xFFFFFFFF, s < 32 ? w[0] : w[1], s % 32), v[j], o);
        }
    }
    a.out[r * a.head_size + threadIdx.x] = o / sum;
}

}  // namespace qsa
