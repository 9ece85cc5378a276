// POOL on the CPU: blocks are shared among the threads.
#include <algorithm>
#include <cmath>

#include "ggml-cpu-impl.h"
#include "qsa_cpu_parts.h"
#include "qsa_cpu_vec.h"

namespace qsa_cpu {

namespace {

struct rope_table {
    explicit rope_table(const ggml_tensor * op)
        : n_rot(qsa_param_i32(op, QSA_PARAM_N_ROT)),
          freq_scale(qsa_param_f32(op, QSA_PARAM_FREQ_SCALE)),
          ext_factor(qsa_param_f32(op, QSA_PARAM_EXT_FACTOR)),
          magnitude(qsa_param_f32(op, QSA_PARAM_ATTN_FACTOR)),
          decay(powf(qsa_param_f32(op, QSA_PARAM_FREQ_BASE), -2.0f / n_rot)) {
        ggml_rope_yarn_corr_dims(n_rot, qsa_param_i32(op, QSA_PARAM_N_CTX_ORIG), qsa_param_f32(op, QSA_PARAM_FREQ_BASE),
                                 qsa_param_f32(op, QSA_PARAM_BETA_FAST), qsa_param_f32(op, QSA_PARAM_BETA_SLOW), corr);
        if (ext_factor != 0.0f) {
            magnitude *= 1.0f + 0.1f * logf(1.0f / freq_scale);
        }
    }

    // Rotate x in place as a token at pos. The angle shrinks step by step, as in ggml's CPU rope: equal bits.
    void rotate(float * x, int64_t pos) const {
        float angle = (float) pos;
        for (int i = 0; i < n_rot / 2; ++i) {
            float theta = freq_scale * angle;
            if (ext_factor != 0.0f) {
                const float ramp = (i - corr[0]) / std::max(0.001f, corr[1] - corr[0]);
                const float mix  = (1.0f - std::min(1.0f, std::max(0.0f, ramp))) * ext_factor;
                theta            = theta * (1.0f - mix) + angle * mix;
            }
            const float c    = cosf(theta) * magnitude;
            const float s    = sinf(theta) * magnitude;
            const float x0   = x[i];
            const float x1   = x[i + n_rot / 2];
            x[i]             = x0 * c - x1 * s;
            x[i + n_rot / 2] = x0 * s + x1 * c;
            angle *= decay;
        }
    }

    int32_t n_rot;
    float   freq_scale, ext_factor, magnitude, decay;
    float   corr[2];
};

void pool_block(const ggml_tensor * op, const rope_table & rope, int64_t stream, int64_t b, float * row) {
    const ggml_tensor * raw     = op->src[0];
    const int64_t       r       = qsa_param_i32(op, QSA_PARAM_R);
    const int64_t       kv_size = qsa_param_i32(op, QSA_PARAM_KV_SIZE);
    const int64_t       d       = raw->ne[0];
    const float *       gamma   = (const float *) op->src[2]->data;
    float *             out     = (float *) op->data + (size_t) (stream * (kv_size / r) + b) * d;
    const char *        cell    = (const char *) raw->data + (size_t) (stream * kv_size + b * r) * raw->nb[1];

    to_f32(raw->type, cell, out, d);
    for (int64_t j = 1; j < r; ++j) {
        to_f32(raw->type, cell + j * raw->nb[1], row, d);
        for (int64_t i = 0; i < d; ++i) {
            out[i] += row[i];
        }
    }
    const float share = 1.0f / (float) r;
    double      sum   = 0.0;
    for (int64_t i = 0; i < d; ++i) {
        out[i] *= share;
        sum += (double) (out[i] * out[i]);
    }
    const float mean  = (float) (sum / d);
    const float scale = 1.0f / sqrtf(mean + qsa_param_f32(op, QSA_PARAM_EPS));
    for (int64_t i = 0; i < d; ++i) {
        out[i] = out[i] * scale * gamma[i];
    }
    rope.rotate(out, b * r);
}

}  // namespace

size_t pool_scratch(const ggml_tensor * op) {
    return op->src[0]->ne[0];
}

void pool(const ggml_compute_params * params, ggml_tensor * op, float * scratch) {
    const int32_t * range = (const int32_t *) op->src[3]->data;
    const int64_t   n     = op->src[3]->ne[1];
    const auto      count = [&](int64_t s) { return (int64_t) std::max(0, range[4 * s + 2] - range[4 * s + 1]); };

    int64_t total = 0;
    for (int64_t s = 0; s < n; ++s) {
        total += count(s);
    }
    if (total == 0) {
        return;
    }
    const rope_table rope(op);
    const slice      mine  = part(total, params->ith, params->nth);
    int64_t          first = 0;  // number of the range's first block, over all ranges
    for (int64_t s = 0; s < n; ++s) {
        const int64_t begin = std::max(mine.begin, first);
        const int64_t end   = std::min(mine.end, first + count(s));
        for (int64_t i = begin; i < end; ++i) {
            pool_block(op, rope, range[4 * s], range[4 * s + 1] + (i - first), scratch);
        }
        first += count(s);
    }
}

}  // namespace qsa_cpu
