// What the CPU code of the three QSA operations shares: vectors of eight floats, parts of a range, conversion to F32.
#pragma once

#include <cstdint>
#include <cstring>

#include "ggml-cpu.h"
#include "ggml.h"

namespace qsa_cpu {

// Eight lanes are one AVX register; the compiler splits them where registers are narrower.
typedef float f32x8 __attribute__((vector_size(32)));

inline f32x8 load8(const float * p) {
    f32x8 x;
    std::memcpy(&x, p, sizeof(x));
    return x;
}

inline void store8(float * p, f32x8 x) {
    std::memcpy(p, &x, sizeof(x));
}

inline float sum8(const f32x8 & x) {
    return ((x[0] + x[4]) + (x[2] + x[6])) + ((x[1] + x[5]) + (x[3] + x[7]));
}

struct slice {
    int64_t begin, end;
};

// Part ith of nth of [0, n).
inline slice part(int64_t n, int ith, int nth) {
    return { n * ith / nth, n * (ith + 1) / nth };
}

inline void to_f32(ggml_type type, const void * src, float * dst, int64_t n) {
    switch (type) {
        case GGML_TYPE_F32:
            std::memcpy(dst, src, n * sizeof(float));
            break;
        case GGML_TYPE_F16:
            ggml_cpu_fp16_to_fp32((const ggml_fp16_t *) src, dst, n);
            break;
        case GGML_TYPE_BF16:
            ggml_cpu_bf16_to_fp32((const ggml_bf16_t *) src, dst, n);
            break;
        default:
            ggml_get_type_traits(type)->to_float(src, dst, n);
    }
}

// out[i][j] = a_i . b_j for NA rows of a and NB rows of b, n a multiple of 8. A pair's value does not depend on NA, NB.
template <int NA, int NB>
inline void dots(const float * a, size_t a_stride, const float * b, size_t b_stride, int64_t n, float (&out)[NA][NB]) {
    f32x8 acc[NA][NB] = {};
    for (int64_t k = 0; k < n; k += 8) {
        f32x8 y[NB];
        for (int j = 0; j < NB; ++j) {
            y[j] = load8(b + j * b_stride + k);
        }
        for (int i = 0; i < NA; ++i) {
            const f32x8 x = load8(a + i * a_stride + k);
            for (int j = 0; j < NB; ++j) {
                acc[i][j] += x * y[j];
            }
        }
    }
    for (int i = 0; i < NA; ++i) {
        for (int j = 0; j < NB; ++j) {
            out[i][j] = sum8(acc[i][j]);
        }
    }
}
}  // namespace qsa_cpu
