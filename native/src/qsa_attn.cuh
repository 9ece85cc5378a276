// Attention over listed blocks on tensor cores (sm_80 on). One CTA: one token, one KV head, one run of cells.
//
// Cache rows go to shared memory as they are (cp.async) and become F16 fragments in registers: contraction order is
// free, so lane c of a quad takes four neighbouring values of a K row (one 32-bit word of a quantised row) and the V
// columns of a warp are dealt out so that a word again feeds four column tiles. Nothing is dequantised into memory.
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

template <int D, int KT, int VT> __host__ __device__ constexpr int attn_smem_bytes() {
    return ATTN_TILE * 4 * (row_words(KT, D, false) + row_words(VT, D, true)) + ATTN_WARPS * 32 * 16 +
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

// A tile of head rows of any type into shared memory, converted to F16.
template <int D>
static __device__ __forceinline__ void fetch_converted(const attn_args & a, const attn_share & s, const int * blocks,
                                                       int tile, char * smem, bool value, int stride) {
    const int type = value ? a.v_type : a.k_type;
    for_type(type, [&](auto t) {
        const size_t row = value ? a.v_row : a.k_row;
        const char * src = (value ? a.v : a.k) + (size_t) s.base * row + s.kv_head * head_bytes(t.value, D);
        for (int i = threadIdx.x; i < ATTN_TILE * (D / 4); i += blockDim.x) {
            const int    cell = i / (D / 4);
            const int    e    = i % (D / 4) * 4;
            const char * p    = src + cell_of(a, s, blocks, tile, cell) * row;
            const half4  h    = reader<t.value>::h(p, e / 32, e % 32);
            *reinterpret_cast<uint2 *>(smem + cell * stride + e * 2) = make_uint2(h.lo, h.hi);
        }
    });
}

template <int D, int KT, int VT, bool converted>
static __global__ void __launch_bounds__(ATTN_WARPS * 32, 3) attn_kernel(const attn_args a) {
#if QSA_SM80
    constexpr int k_stride = row_words(KT, D, false) * 4;
    constexpr int v_stride = row_words(VT, D, true) * 4;
    constexpr int n_groups = ceil_div(D / 32, ATTN_WARPS);  // 32-column groups per warp

    extern __shared__ __align__(16) char smem[];
    char *  k_tile = smem;
    char *  v_tile = k_tile + ATTN_TILE * k_stride;
    uint4 * p_tile = reinterpret_cast<uint4 *>(v_tile + ATTN_TILE * v_stride);  // [warp][lane]: A fragments
    float * row_m  = reinterpret_cast<float *>(p_tile + ATTN_WARPS * 32);      // [warp][row]
    int *   blocks = reinterpret_cast<int *>(row_m + ATTN_WARPS * ATTN_ROWS);

    const int        warp = threadIdx.x / 32;
    const int        lane = threadIdx.x % 32;
    const int        g    = lane / 4;
    const int        c    = lane % 4;
    const attn_share s    = share_of(a, blockIdx.x, blocks);
    __syncthreads();

    const char * k_src = a.k + (size_t) s.base * a.k_row + s.kv_head * head_bytes(KT, D);
    const char * v_src = a.v + (size_t) s.base * a.v_row + s.kv_head * head_bytes(VT, D);
    int          cells[ATTN_ROWS_PER_LANE];

    const auto fetch_k = [&](int tile) {
        if constexpr (converted) {
            fetch_converted<D>(a, s, blocks, tile, k_tile, false, k_stride);
        } else {
#pragma unroll
            for (int i = 0; i < ATTN_ROWS_PER_LANE; ++i) {
                cells[i] = cell_of(a, s, blocks, tile, i * ATTN_ROWS_AT_ONCE + threadIdx.x / ATTN_ROW_LANES);
            }
            fetch_raw<D, KT, false>(k_src, a.k_row, cells, k_tile);
        }
        commit_async();
    };
    const auto fetch_v = [&](int tile) {
        if constexpr (converted) {
            fetch_converted<D>(a, s, blocks, tile, v_tile, true, v_stride);
        } else {
            fetch_raw<D, VT, true>(v_src, a.v_row, cells, v_tile);
        }
        commit_async();
    };
    if (s.tile0 < s.tile1) {
        fetch_k(s.tile0);
        fetch_v(s.tile0);
    }

    // Q fragments, scaled so that exp2 gives the softmax. Rows behind the last head are zero.
    uint4       q[D / 16];
    const float scale = a.scale * 1.44269504f;
#pragma unroll
    for (int j = 0; j < D / 16; ++j) {
        float4 x[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int row = g + 8 * i;
            x[i]          = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            if (row < s.n_heads) {
                const float * p = a.q + s.token * a.q_token + (s.head0 + row) * a.q_head;
                x[i]            = *reinterpret_cast<const float4 *>(p + 16 * j + 4 * c);
            }
        }
        q[j] = make_uint4(pack_half2(x[0].x * scale, x[0].y * scale), pack_half2(x[1].x * scale, x[1].y * scale),
                          pack_half2(x[0].z * scale, x[0].w * scale), pack_half2(x[1].z * scale, x[1].w * scale));
    }

    float o[n_groups][4][4] = {};
    float m[2]              = { -INFINITY, -INFINITY };  // of rows g and g + 8
    float l[2]              = { 0.0f, 0.0f };            // this thread's part of the sum

    for (int tile = s.tile0; tile < s.tile1; ++tile) {
        if (tile == s.tile0) {
            wait_async<1>();
            __syncthreads();
        } else {
            wait_async<0>();
            __syncthreads();  // K is there, and everybody is done with V of the tile before
            fetch_v(tile);
        }

        // scores of this warp's 16 cells; column n of half i is cell 8i + n/2 + 4(n%2), see V below
        float x[2][4] = {};
#pragma unroll
        for (int j = 0; j < D / 16; ++j) {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const char * row = k_tile + (16 * warp + 8 * i + (g >> 1) + 4 * (g & 1)) * k_stride;
                const half4  h   = reader<KT>::h(row, j / 2, j % 2 * 16 + 4 * c);
                mma_16816(x[i], q[j], h.lo, h.hi);
            }
        }
        const int cell0 = tile * ATTN_TILE + 16 * warp + c;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                if (cell0 + 8 * i + 4 * (e & 1) >= s.n_cells) {
                    x[i][e] = -INFINITY;
                }
            }
        }
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            float t = fmaxf(fmaxf(x[0][2 * i], x[0][2 * i + 1]), fmaxf(x[1][2 * i], x[1][2 * i + 1]));
            t       = fmaxf(t, __shfl_xor_sync(0xFFFFFFFF, t, 1));
            t       = fmaxf(t, __shfl_xor_sync(0xFFFFFFFF, t, 2));
            if (c == 0) {
                row_m[warp * ATTN_ROWS + g + 8 * i] = t;
            }
        }
        __syncthreads();  // row maxima are there, and K is free
        if (tile + 1 < s.tile1) {
            fetch_k(tile + 1);
        }
        float p[2][4];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            float t = m[i];
#pragma unroll
            for (int w = 0; w < ATTN_WARPS; ++w) {
                t = fmaxf(t, row_m[w * ATTN_ROWS + g + 8 * i]);
            }
            const float shrink = exp2f(m[i] - t);
            m[i]               = t;
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                p[0][2 * i + e] = exp2f(x[0][2 * i + e] - t);
                p[1][2 * i + e] = exp2f(x[1][2 * i + e] - t);
            }
            l[i] = l[i] * shrink + ((p[0][2 * i] + p[0][2 * i + 1]) + (p[1][2 * i] + p[1][2 * i + 1]));
#pragma unroll
            for (int n = 0; n < n_groups; ++n) {
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    o[n][e][2 * i] *= shrink;
                    o[n][e][2 * i + 1] *= shrink;
                }
            }
        }
        p_tile[warp * 32 + lane] = make_uint4(
            as_u32(__floats2half2_rn(p[0][0], p[0][1])), as_u32(__floats2half2_rn(p[0][2], p[0][3])),
            as_u32(__floats2half2_rn(p[1][0], p[1][1])), as_u32(__floats2half2_rn(p[1][2], p[1][3])));
        if (tile + 1 < s.tile1) {
            wait_async<1>();
        } else {
            wait_async<0>();
        }
        __syncthreads();  // P and V are there

        // column n of tile e of a 32-column group is column 4n + e; lane c holds cells c, c+4, c+8, c+12
#pragma unroll
        for (int kk = 0; kk < ATTN_WARPS; ++kk) {
            const uint4 pa = p_tile[kk * 32 + lane];
#pragma unroll
            for (int n = 0; n < n_groups; ++n) {
                const int group = warp + n * ATTN_WARPS;
                if (D / 32 % ATTN_WARPS == 0 || group < D / 32) {
                    half4 h[4];
#pragma unroll
                    for (int i = 0; i < 4; ++i) {
                        h[i] = reader<VT>::h(v_tile + (16 * kk + c + 4 * i) * v_stride, group, 4 * g);
                    }
                    mma_16816(o[n][0], pa, __byte_perm(h[0].lo, h[1].lo, 0x5410), __byte_perm(h[2].lo, h[3].lo, 0x5410));
                    mma_16816(o[n][1], pa, __byte_perm(h[0].lo, h[1].lo, 0x7632), __byte_perm(h[2].lo, h[3].lo, 0x7632));
                    mma_16816(o[n][2], pa, __byte_perm(h[0].hi, h[1].hi, 0x5410), __byte_perm(h[2].hi, h[3].hi, 0x5410));
                    mma_16816(o[n][3], pa, __byte_perm(h[0].hi, h[1].hi, 0x7632), __byte_perm(h[2].hi, h[3].hi, 0x7632));
                }
            }
        }
    }

    // the sum of a row over the quad and the warps, in a fixed order
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        l[i] += __shfl_xor_sync(0xFFFFFFFF, l[i], 1);
        l[i] += __shfl_xor_sync(0xFFFFFFFF, l[i], 2);
    }
    __syncthreads();
    if (c == 0) {
        row_m[warp * ATTN_ROWS + g]     = l[0];
        row_m[warp * ATTN_ROWS + g + 8] = l[1];
    }
    __syncthreads();

    const size_t n_rows = (size_t) a.n_head * a.n_tokens;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const int row = g + 8 * i;
        if (row >= s.n_heads) {
            continue;
        }
        float sum = 0.0f;
#pragma unroll
        for (int w = 0; w < ATTN_WARPS; ++w) {
            sum += row_m[w * ATTN_ROWS + row];
        }
        const size_t  r    = (size_t) s.token * a.n_head + s.head0 + row;
        const bool    last = a.n_split == 1;
        float *       dst  = last ? a.out + r * D : a.part + (s.split * n_rows + r) * D;
        const float   f    = last ? 1.0f / sum : 1.0f;
#pragma unroll
        for (int n = 0; n < n_groups; ++n) {
            const int group = warp + n * ATTN_WARPS;
            if (D / 32 % ATTN_WARPS == 0 || group < D / 32) {
                float4 * p = reinterpret_cast<float4 *>(dst + 32 * group + 8 * c);
                p[0] = make_float4(o[n][0][2 * i] * f, o[n][1][2 * i] * f, o[n][2][2 * i] * f, o[n][3][2 * i] * f);
                p[1] = make_float4(o[n][0][2 * i + 1] * f, o[n][1][2 * i + 1] * f, o[n][2][2 * i + 1] * f,
                                   o[n][3][2 * i + 1] * f);
            }
        }
        if (!last && warp == 0 && c == 0) {
            float * ml                             = a.part + a.n_split * n_rows * D;
            ml[s.split * n_rows + r]               = m[i];
            ml[(a.n_split + s.split) * n_rows + r] = sum;
        }
    }
#else
    (void) a;
    __trap();
#endif
}

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
