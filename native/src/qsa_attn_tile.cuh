// Tiles of cache rows in shared memory, for the attention on tensor cores.
#pragma once

#include "qsa_attn_args.cuh"

namespace qsa {

constexpr int ATTN_WARPS = 4;

// Shared-memory row strides without bank conflicts for the fragment reads below.
__host__ __device__ constexpr int row_words(int type, int n, bool value) {
    const bool wide = type == T_F16 || type == T_BF16;
    int        s    = (head_bytes(type, n) + 15) / 16 * 4;
    while (!(value || wide ? s % 32 == 8 || s % 32 == 24 : s % 8 == 4)) {
        s += 4;
    }
    return s;
}

// K tile, V tile, what warps exchange, row maxima.
template <int D, int KT, int VT> __host__ __device__ constexpr int attn_smem_bytes() {
    return ATTN_TILE * 4 * (row_words(KT, D, false) + row_words(VT, D, true)) + ATTN_WARPS * 32 * 2 * 16 +
           ATTN_WARPS * ATTN_ROWS * 4;
}

// Eight lanes copy a row, so neighbouring lanes touch neighbouring bytes; a thread serves ROWS_PER_THREAD rows of a tile.
constexpr int ATTN_ROW_LANES      = 8;
constexpr int ATTN_ROWS_AT_ONCE   = ATTN_WARPS * 32 / ATTN_ROW_LANES;
constexpr int ATTN_ROWS_PER_LANE  = ATTN_TILE / ATTN_ROWS_AT_ONCE;

// A tile of head rows into shared memory, as they are. `cells`: this thread's rows, counted from `src`.
template <int D, int type, bool value>
static __device__ __forceinline__ void fetch_raw(const char * src, size_t row_bytes,
                                                 const int (&cells)[ATTN_ROWS_PER_LANE], char * smem) {
    constexpr int bytes  = head_bytes(type, D);
    constexpr int chunk  = bytes % 16 == 0 ? 16 : bytes % 8 == 0 ? 8 : 4;
    constexpr int n      = bytes / chunk;
    constexpr int stride = row_words(type, D, value) * 4;
    const int     first  = threadIdx.x % ATTN_ROW_LANES;
    char *        dst    = smem + threadIdx.x / ATTN_ROW_LANES * stride + first * chunk;
#pragma unroll
    for (int i = 0; i < ATTN_ROWS_PER_LANE; ++i) {
        const char * p = src + cells[i] * row_bytes + first * chunk;
#pragma unroll
        for (int j = 0; j < n; j += ATTN_ROW_LANES) {
            if (j + ATTN_ROW_LANES <= n || first < n - j) {
                copy_async<chunk>(dst + i * ATTN_ROWS_AT_ONCE * stride + j * chunk, p + j * chunk);
            }
        }
    }
}

// A tile of head rows of any type into shared memory, converted to F16. With `rest`, what the rounding took away as well.
template <int D>
static __device__ __forceinline__ void fetch_converted(const attn_args & a, const attn_share & s, const int * blocks,
                                                       int tile, bool value, char * smem, int stride, char * rest) {
    for_type(value ? a.v_type : a.k_type, [&](auto t) {
        const size_t row = value ? a.v_row : a.k_row;
        const char * src = (value ? a.v : a.k) + (size_t) s.base * row + s.kv_head * head_bytes(t.value, D);
        for (int i = threadIdx.x; i < ATTN_TILE * (D / 4); i += blockDim.x) {
            const int    cell = i / (D / 4);
            const int    e    = i % (D / 4) * 4;
            const float4 x    = reader<t.value>::f(src + cell_of(a, s, blocks, tile, cell) * row, e / 32, e % 32);
            const split4 h    = split_half4(x);
            *reinterpret_cast<uint2 *>(smem + cell * stride + e * 2) = make_uint2(h.hi.lo, h.hi.hi);
            if (rest) {
                *reinterpret_cast<uint2 *>(rest + cell * stride + e * 2) = make_uint2(h.lo.lo, h.lo.hi);
            }
        }
    });
}

}  // namespace qsa
