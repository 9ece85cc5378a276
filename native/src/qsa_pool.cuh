// One F32 key per complete block: mean of r raw keys, RMS norm, gamma, rope. A warp makes a block.
#pragma once

#include "qsa_types.cuh"

namespace qsa {

struct pool_args {
    const char *    raw;
    size_t          raw_row;
    int             raw_type;
    float *         pooled;  // [d, kv_size/r * n_stream]
    const float *   gamma;
    const int32_t * range;  // [4, n_ranges]: stream, lo, hi, 0
    int             n_ranges, d, log2r, kv_size, n_rot;
    float           eps, theta_scale, freq_scale, ext_factor, magnitude, corr_low, corr_high;
};

constexpr int POOL_WARPS = 8;
constexpr int POOL_MAX_D = 256;

// sin and cos of a large F32 angle. Fast-math sincosf would lose up to 0.02 rad at position 262144: reduce in F64 first.
static __device__ __forceinline__ void sincos_reduced(float angle, float & s, float & c) {
    const double turns = rint((double) angle * 0.15915494309189535);
    const float  rest  = (float) fma(turns, -6.283185307179586, (double) angle);
    sincosf(rest, &s, &c);
}

template <int type>
static __device__ __forceinline__ void pool_block(const pool_args & a, int stream, int b, float * row, int lane) {
    const int    r     = 1 << a.log2r;
    const size_t cell0 = (size_t) stream * a.kv_size + ((size_t) b << a.log2r);
    float4       x[POOL_MAX_D / 128];
    float        square = 0.0f;
#pragma unroll
    for (int i = 0; i < POOL_MAX_D / 128; ++i) {
        const int e = 128 * i + 4 * lane;
        if (e < a.d) {
            float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            for (int j = 0; j < r; ++j) {
                const float4 y = reader<type>::f(a.raw + (cell0 + j) * a.raw_row, e / 32, e % 32);
                sum            = make_float4(sum.x + y.x, sum.y + y.y, sum.z + y.z, sum.w + y.w);
            }
            const float f = 1.0f / r;
            x[i]          = make_float4(sum.x * f, sum.y * f, sum.z * f, sum.w * f);
            square += (x[i].x * x[i].x + x[i].y * x[i].y) + (x[i].z * x[i].z + x[i].w * x[i].w);
        }
    }
#pragma unroll
    for (int d = 16; d > 0; d /= 2) {
        square += __shfl_xor_sync(0xFFFFFFFF, square, d);
    }
    const float norm = 1.0f / sqrtf(square / a.d + a.eps);
    __syncwarp();
#pragma unroll
    for (int i = 0; i < POOL_MAX_D / 128; ++i) {
        const int e = 128 * i + 4 * lane;
        if (e < a.d) {
            const float4 g = *reinterpret_cast<const float4 *>(a.gamma + e);
            *reinterpret_cast<float4 *>(row + e) =
                make_float4(x[i].x * norm * g.x, x[i].y * norm * g.y, x[i].z * norm * g.z, x[i].w * norm * g.w);
        }
    }
    __syncwarp();
    const int half = a.n_rot / 2;
    for (int i = lane; i < half; i += 32) {
        // the frequency is computed as ggml's CUDA rope computes it for q, so that an error in it cancels
        const float angle = (float) (b << a.log2r) * powf(a.theta_scale, (float) i);
        float       theta = a.freq_scale * angle;
        if (a.ext_factor != 0.0f) {
            const float ramp = (i - a.corr_low) / fmaxf(0.001f, a.corr_high - a.corr_low);
            const float mix  = (1.0f - fminf(1.0f, fmaxf(0.0f, ramp))) * a.ext_factor;
            theta            = theta * (1.0f - mix) + angle * mix;
        }
        float sn, cs;
        sincos_reduced(theta, sn, cs);
        sn *= a.magnitude;
        cs *= a.magnitude;
        const float x0 = row[i];
        const float x1 = row[i + half];
        row[i]         = x0 * cs - x1 * sn;
        row[i + half]  = x0 * sn + x1 * cs;
    }
    __syncwarp();
    float * out = a.pooled + ((size_t) stream * (a.kv_size >> a.log2r) + b) * a.d;
    for (int e = 4 * lane; e < a.d; e += 128) {
        *reinterpret_cast<float4 *>(out + e) = *reinterpret_cast<const float4 *>(row + e);
    }
}

template <int type> static __global__ void __launch_bounds__(POOL_WARPS * 32) pool_kernel(const pool_args a) {
    __shared__ __align__(16) float rows[POOL_WARPS][POOL_MAX_D];
    const int warp   = threadIdx.x / 32;
    const int n_all  = gridDim.x * POOL_WARPS;
    int       mine   = blockIdx.x * POOL_WARPS + warp;  // number of the next block, over all ranges
    int       before = 0;
    for (int i = 0; i < a.n_ranges; ++i) {
        const int stream = a.range[4 * i];
        const int lo     = a.range[4 * i + 1];
        const int n      = max(0, a.range[4 * i + 2] - lo);
        for (; mine < before + n; mine += n_all) {
            pool_block<type>(a, stream, lo + mine - before, rows[warp], threadIdx.x % 32);
        }
        before += n;
    }
}

}  // namespace qsa
