// Reading cache rows of any supported type, four neighbouring values at a time. No ggml header is needed here, so that
// the kernels can also be built alone (benches/kernels_qsa).
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

namespace qsa {

// Values of ggml_type; qsa.cu checks them.
enum cache_type : int {
    T_F32    = 0,
    T_F16    = 1,
    T_Q4_0   = 2,
    T_Q4_1   = 3,
    T_Q5_0   = 6,
    T_Q5_1   = 7,
    T_Q8_0   = 8,
    T_IQ4_NL = 20,
    T_BF16   = 30,
};

// Bytes of 32 values.
__host__ __device__ constexpr int block_bytes(int type) {
    return type == T_F32    ? 128 :
           type == T_F16    ? 64 :
           type == T_BF16   ? 64 :
           type == T_Q4_0   ? 18 :
           type == T_Q4_1   ? 20 :
           type == T_Q5_0   ? 22 :
           type == T_Q5_1   ? 24 :
           type == T_Q8_0   ? 34 :
           type == T_IQ4_NL ? 18 :
                              0;
}

__host__ __device__ constexpr int head_bytes(int type, int n) {
    return block_bytes(type) * (n / 32);
}

// Types whose blocks of 32 are small integers times a scale (plus an offset).
__host__ __device__ constexpr bool block_is_scaled(int type) {
    return type != T_F32 && type != T_F16 && type != T_BF16;
}

// Four halves.
struct half4 {
    uint32_t lo, hi;
};

static __device__ __forceinline__ uint32_t as_u32(__half2 x) {
    return *reinterpret_cast<uint32_t *>(&x);
}

static __device__ __forceinline__ __half2 as_half2(uint32_t x) {
    return *reinterpret_cast<__half2 *>(&x);
}

// F32 -> F16 that cannot make an infinity out of a finite value (BF16 and F32 caches).
static __device__ __forceinline__ uint32_t pack_half2(float a, float b) {
    a = fminf(fmaxf(a, -65504.0f), 65504.0f);
    b = fminf(fmaxf(b, -65504.0f), 65504.0f);
    return as_u32(__floats2half2_rn(a, b));
}

static __device__ __forceinline__ float2 unpack_half2(uint32_t x) {
    return __half22float2(as_half2(x));
}

// Four values as sums of two halves each: good to 2^-22 of themselves, or to 2^-25 where that is more.
struct split4 {
    half4 hi, lo;
};

static __device__ __forceinline__ split4 split_half4(float4 x) {
    split4 r;
    r.hi           = { pack_half2(x.x, x.y), pack_half2(x.z, x.w) };
    const float2 a = unpack_half2(r.hi.lo);
    const float2 b = unpack_half2(r.hi.hi);
    r.lo           = { pack_half2(x.x - a.x, x.y - a.y), pack_half2(x.z - b.x, x.w - b.y) };
    return r;
}

// The four bytes at an even offset of a 4-byte aligned row.
static __device__ __forceinline__ uint32_t word_at(const char * row, int base, int offset) {
    const uint32_t * w = reinterpret_cast<const uint32_t *>(row) + ((base + offset) >> 2);
    return base & 2 ? __byte_perm(w[0], w[1], 0x5432) : w[0];
}

static __device__ __forceinline__ __half half_at(const char * row, int offset) {
    return *reinterpret_cast<const __half *>(row + offset);
}

// Four unsigned bytes minus `zero`, exact in F16: 0x64xx is 1024 + xx.
template <int zero> static __device__ __forceinline__ half4 bytes_to_half4(uint32_t w) {
    const __half2 shift = __half2half2(__ushort_as_half(__half_as_ushort(__float2half(-1024.0f - zero))));
    half4         r;
    r.lo = as_u32(__hadd2(as_half2(__byte_perm(w, 0x64646464, 0x4140)), shift));
    r.hi = as_u32(__hadd2(as_half2(__byte_perm(w, 0x64646464, 0x4342)), shift));
    return r;
}

static __device__ __forceinline__ half4 scaled(half4 q, __half d) {
    const __half2 d2 = __half2half2(d);
    return { as_u32(__hmul2(as_half2(q.lo), d2)), as_u32(__hmul2(as_half2(q.hi), d2)) };
}

// One rounding, as of the exact value.
static __device__ __forceinline__ half4 shifted(half4 q, __half d, __half m) {
    const __half2 d2 = __half2half2(d);
    const __half2 m2 = __half2half2(m);
    return { as_u32(__hfma2(as_half2(q.lo), d2, m2)), as_u32(__hfma2(as_half2(q.hi), d2, m2)) };
}

static __device__ __forceinline__ float4 scaled_f(half4 q, float d, float m) {
    const float2 a = unpack_half2(q.lo);
    const float2 b = unpack_half2(q.hi);
    return make_float4(fmaf(a.x, d, m), fmaf(a.y, d, m), fmaf(b.x, d, m), fmaf(b.y, d, m));
}

// 4-bit codes of values e..e+3 (e a multiple of 4) of a 32-value block whose nibbles start at byte `base`.
static __device__ __forceinline__ uint32_t nibbles(const char * row, int base, int e) {
    return (word_at(row, base, e & 15) >> ((e >> 4) * 4)) & 0x0F0F0F0F;
}

// The fifth bits of values e..e+3, in bit 4 of each byte.
static __device__ __forceinline__ uint32_t fifth_bits(const char * row, int base, int e) {
    const uint32_t b = word_at(row, base, 0) >> e;
    return (b & 1) << 4 | (b & 2) << 11 | (b & 4) << 18 | (b & 8) << 25;
}

// Codebook of IQ4_NL plus 128, so that bytes are unsigned.
static __device__ __forceinline__ uint32_t iq4_nl_bytes(uint32_t code) {
    // -127 -104 -83 -65 | -49 -35 -22 -10 | 1 13 25 38 | 53 69 89 113
    const uint32_t t0 = 0x3F2D1801, t1 = 0x766A5D4F, t2 = 0xA6998D81, t3 = 0xF1D9C5B5;
    // the low three bits of each code as PRMT selectors
    const uint32_t c   = code & 0x07070707;
    const uint32_t sel = (c & 7) | (c >> 4 & 0x70) | (c >> 8 & 0x700) | (c >> 12 & 0x7000);
    const uint32_t a   = __byte_perm(t0, t1, sel);
    const uint32_t b   = __byte_perm(t2, t3, sel);
    const uint32_t m   = ((code >> 3) & 0x01010101) * 0xFF;
    return (a & ~m) | (b & m);
}

// Values blk*32 + e .. + 3 of a row. `row` must be 4-byte aligned; e is a multiple of 4.
template <int type> struct reader {
    // integer part, scale and offset of the quantised types
    static __device__ __forceinline__ half4 codes(const char * row, int blk, int e, __half & d, __half & m) {
        const int b = blk * block_bytes(type);
        m           = __ushort_as_half(0);
        d           = half_at(row, b);
        if constexpr (type == T_Q8_0) {
            return bytes_to_half4<128>(word_at(row, b + 2, e) ^ 0x80808080);
        } else if constexpr (type == T_Q4_0) {
            return bytes_to_half4<8>(nibbles(row, b + 2, e));
        } else if constexpr (type == T_IQ4_NL) {
            return bytes_to_half4<128>(iq4_nl_bytes(nibbles(row, b + 2, e)));
        } else if constexpr (type == T_Q4_1) {
            m = half_at(row, b + 2);
            return bytes_to_half4<0>(nibbles(row, b + 4, e));
        } else if constexpr (type == T_Q5_0) {
            return bytes_to_half4<16>(nibbles(row, b + 6, e) | fifth_bits(row, b + 2, e));
        } else {
            static_assert(type == T_Q5_1, "cache type without a reader");
            m = half_at(row, b + 2);
            return bytes_to_half4<0>(nibbles(row, b + 8, e) | fifth_bits(row, b + 4, e));
        }
    }

    // Values for an exact product: integers of the quantised types, else like h(). scale() gives factor and offset.
    static __device__ __forceinline__ half4 unscaled(const char * row, int blk, int e) {
        if constexpr (block_is_scaled(type)) {
            __half d, m;
            return codes(row, blk, e, d, m);
        } else {
            return h(row, blk, e);
        }
    }

    static __device__ __forceinline__ float2 scale(const char * row, int blk) {
        const int b = blk * block_bytes(type);
        if constexpr (type == T_Q4_1 || type == T_Q5_1) {
            return unpack_half2(*reinterpret_cast<const uint32_t *>(row + b));
        } else {
            return make_float2(__half2float(half_at(row, b)), 0.0f);
        }
    }

    static __device__ __forceinline__ float4 f(const char * row, int blk, int e) {
        if constexpr (type == T_F32) {
            return *reinterpret_cast<const float4 *>(row + (blk * 32 + e) * 4);
        } else if constexpr (type == T_F16) {
            const uint2  w = *reinterpret_cast<const uint2 *>(row + (blk * 32 + e) * 2);
            const float2 a = unpack_half2(w.x);
            const float2 b = unpack_half2(w.y);
            return make_float4(a.x, a.y, b.x, b.y);
        } else if constexpr (type == T_BF16) {
            const uint2 w = *reinterpret_cast<const uint2 *>(row + (blk * 32 + e) * 2);
            return make_float4(__uint_as_float(w.x << 16), __uint_as_float(w.x & 0xFFFF0000),
                               __uint_as_float(w.y << 16), __uint_as_float(w.y & 0xFFFF0000));
        } else {
            __half      d, m;
            const half4 q = codes(row, blk, e, d, m);
            return scaled_f(q, __half2float(d), __half2float(m));
        }
    }

    static __device__ __forceinline__ half4 h(const char * row, int blk, int e) {
        if constexpr (type == T_F16) {
            const uint2 w = *reinterpret_cast<const uint2 *>(row + (blk * 32 + e) * 2);
            return { w.x, w.y };
        } else if constexpr (type == T_Q4_1 || type == T_Q5_1) {
            __half      d, m;
            const half4 q = codes(row, blk, e, d, m);
            return shifted(q, d, m);
        } else if constexpr (type != T_F32 && type != T_BF16) {
            __half      d, m;
            const half4 q = codes(row, blk, e, d, m);
            return scaled(q, d);
        } else {
            const float4 v = f(row, blk, e);
            return { pack_half2(v.x, v.y), pack_half2(v.z, v.w) };
        }
    }
};

template <int type> using type_c = std::integral_constant<int, type>;

// Calls fn(type_c<...>()) for a run-time type.
template <typename F> static __device__ __forceinline__ void for_type(int type, F && fn) {
    switch (type) {
        case T_F32:    fn(type_c<T_F32>()); break;
        case T_F16:    fn(type_c<T_F16>()); break;
        case T_BF16:   fn(type_c<T_BF16>()); break;
        case T_Q8_0:   fn(type_c<T_Q8_0>()); break;
        case T_Q5_1:   fn(type_c<T_Q5_1>()); break;
        case T_Q5_0:   fn(type_c<T_Q5_0>()); break;
        case T_Q4_1:   fn(type_c<T_Q4_1>()); break;
        case T_Q4_0:   fn(type_c<T_Q4_0>()); break;
        case T_IQ4_NL: fn(type_c<T_IQ4_NL>()); break;
        default: break;
    }
}

// Where a token stands, from its global cell.
struct place {
    int64_t base;   // first cell of its stream
    int     n_vis;  // complete blocks it sees
    int     tail;   // cells behind them, itself included
};

static __device__ __forceinline__ place place_of(int64_t idx, int kv_size, int log2r) {
    // a 64-bit division is slow; caches below 2^31 cells need none
    const int c = idx < 0x7FFFFFFF ? (int) ((uint32_t) idx % (uint32_t) kv_size) : (int) (idx % kv_size);
    return { idx - c, (c + 1) >> log2r, (c + 1) & ((1 << log2r) - 1) };
}

static __host__ __device__ constexpr int ceil_div(int a, int b) {
    return (a + b - 1) / b;
}

}  // namespace qsa
