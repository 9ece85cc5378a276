#include "mmq_fixup.h"

#include <cuda_runtime.h>

#include <algorithm>

#include "mg_switch.h"
#include "mg_trace.h"

#if !defined(GGML_USE_HIP) && !defined(GGML_USE_MUSA)

namespace mmq_fixup {
namespace {

constexpr int n_threads = 256;
constexpr int n_each    = 2;  // elements of a tile that a thread adds up
constexpr int n_ahead   = 8;  // parts of each that it reads before it needs the first

// One CUDA block adds up a piece of the tile that ends in one range.
template <int height> __global__ void __launch_bounds__(n_threads) add_parts(const product p) {
    extern __shared__ int begins[];  // of the range that ends the tile, of the one before it, and so on

    const int  last = p.range_of_block(blockIdx.x);
    const int  from = p.begin_of(last) / p.n_inner * p.n_inner;
    if (!p.is_split(last)) {
        return;
    }

    const place at       = p.place_of(from / p.n_inner);
    const int   column_0 = p.ids_dst ? p.expert_bounds[at.channel] : 0;
    const int   n_column = p.ids_dst ? p.expert_bounds[at.channel + 1] - column_0 : p.n_columns;
    if (at.column * p.width >= n_column) {
        return;  // the expert has fewer columns: nobody has computed this tile
    }

    int n_parts = 1;  // the first of them began before the tile or with it
#pragma unroll 1
    for (int base = 0; base <= last; base += n_threads) {
        const int back   = base + threadIdx.x;
        bool      inside = false;
        if (back <= last) {
            begins[back] = p.begin_of(last - back);
            inside       = back > 0 && begins[back] > from;
        }
        n_parts += __syncthreads_count(inside);
    }

    const int n_in  = p.width * height;
    const int first = blockIdx.y * n_each * n_threads + threadIdx.x;

    // What is there is read now, with the first parts, and not when their sum is known.
    bool    wanted[n_each];
    int64_t to[n_each];
    float   own[n_each], sum[n_each];
#pragma unroll
    for (int e = 0; e < n_each; ++e) {
        const int i      = first + e * n_threads;
        const int column = at.column * p.width + i / height;
        const int row    = at.row * height + i % height;
        wanted[e]        = i < n_in && column < n_column && row < p.n_rows;
        to[e]            = 0;
        if (wanted[e]) {
            to[e] = p.ids_dst ? p.ids_dst[column_0 + column] * p.stride_column :
                                at.sample * p.stride_sample + at.channel * p.stride_channel + column * p.stride_column;
            to[e] += row;
        }
        own[e] = wanted[e] ? p.dst[to[e]] : 0.0f;
        sum[e] = 0.0f;
    }

    for (int back = 1; back <= n_parts; back += n_ahead) {
        float part[n_ahead][n_each];
#pragma unroll
        for (int a = 0; a < n_ahead; ++a) {
            // A range that is empty has written nothing.
            const bool    is_one = back + a <= n_parts && begins[back + a] != begins[back + a - 1];
            const float * of     = p.parts + int64_t(last - back - a) * n_in;
#pragma unroll
            for (int e = 0; e < n_each; ++e) {
                part[a][e] = is_one && wanted[e] ? of[first + e * n_threads] : -0.0f;
            }
        }
        // Adding -0 leaves the bits of any sum.
#pragma unroll
        for (int a = 0; a < n_ahead; ++a) {
#pragma unroll
            for (int e = 0; e < n_each; ++e) {
                sum[e] += part[a][e];
            }
        }
    }

#pragma unroll
    for (int e = 0; e < n_each; ++e) {
        if (wanted[e]) {
            p.dst[to[e]] = own[e] + sum[e];
        }
    }
}

}  // namespace

bool queue(const product & p, void * stream) {
    if (!mg_switch_value(MG_QUICK_FIXUP) || (p.height != 64 && p.height != 128)) {
        return false;
    }
    constexpr int n_piece = n_each * n_threads;
    const dim3    grid(std::min(p.n_tiles, p.n_ranges), (p.width * p.height + n_piece - 1) / n_piece);
    const size_t  n_shared = sizeof(int) * p.n_ranges;
    const auto    kernel   = p.height == 64 ? add_parts<64> : add_parts<128>;
    kernel<<<grid, n_threads, n_shared, cudaStream_t(stream)>>>(p);
    mg_trace_host(MG_TRACE_FIXUP, p.n_tiles);
    return true;
}

}  // namespace mmq_fixup

#endif
