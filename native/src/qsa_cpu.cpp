// The QSA operations on the CPU: reference for the other backends, and what a machine without a GPU runs.
// Results do not depend on the number of threads nor on how tokens are cut into ubatches: every score and every sum has
// one order of accumulation, whichever path computes it.
#include "qsa_cpu.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "ggml-cpu-impl.h"
#include "ggml-cpu.h"
#include "ggml.h"
#include "vec.h"

namespace {

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
slice part(int64_t n, int ith, int nth) {
    return { n * ith / nth, n * (ith + 1) / nth };
}

void to_f32(ggml_type type, const void * src, float * dst, int64_t n) {
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

// ---- POOL ----------------------------------------------------------------------------------------------------------

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

// ---- SELECT --------------------------------------------------------------------------------------------------------

// Scores of blocks as order-preserving integers. H is the number of heads, 0 for any.
template <int NB>
inline void score_some(const float * q, size_t q_stride, int64_t h, const float * keys, int64_t d, uint32_t * out) {
    float sum[NB] = {};
    for (int64_t i = 0; i < h; ++i) {
        float s[1][NB];
        dots<1, NB>(q + i * q_stride, 0, keys, d, d, s);
        for (int j = 0; j < NB; ++j) {
            sum[j] += s[0][j] > 0.0f ? s[0][j] : 0.0f;
        }
    }
    std::memcpy(out, sum, sizeof(sum));
}

template <int H, int NB>
inline void score_heads(const float * q, size_t q_stride, const float * keys, int64_t d, uint32_t * out) {
    float s[H][NB];
    dots<H, NB>(q, q_stride, keys, d, d, s);
    float sum[NB] = {};
    for (int i = 0; i < H; ++i) {
        for (int j = 0; j < NB; ++j) {
            sum[j] += s[i][j] > 0.0f ? s[i][j] : 0.0f;
        }
    }
    std::memcpy(out, sum, sizeof(sum));
}

void score(const float * q, size_t q_stride, int64_t h, const float * keys, int64_t d, int64_t n, uint32_t * out) {
    int64_t b = 0;
    if (h == 4) {
        for (; b + 2 <= n; b += 2) {
            score_heads<4, 2>(q, q_stride, keys + b * d, d, out + b);
        }
        for (; b < n; ++b) {
            score_heads<4, 1>(q, q_stride, keys + b * d, d, out + b);
        }
    } else if (h == 2) {
        for (; b + 4 <= n; b += 4) {
            score_heads<2, 4>(q, q_stride, keys + b * d, d, out + b);
        }
        for (; b < n; ++b) {
            score_heads<2, 1>(q, q_stride, keys + b * d, d, out + b);
        }
    } else {
        for (; b + 8 <= n; b += 8) {
            score_some<8>(q, q_stride, h, keys + b * d, d, out + b);
        }
        for (; b < n; ++b) {
            score_some<1>(q, q_stride, h, keys + b * d, d, out + b);
        }
    }
}

// Ascending numbers of the ntop largest keys; of equal ones at the edge the first. Needs n > ntop.
// Three rounds of counting find the ntop-th largest key: bits 30..20, 19..10, 9..0 (bit 31 is a sign that never is
// set).
void pick(const uint32_t * keys, int64_t n, int32_t ntop, uint32_t * bins, int32_t * list) {
    uint32_t prefix = 0;
    int64_t  wanted = ntop;  // how many of the keys that share the prefix are wanted
    int      low    = 31;
    for (const int width : { 11, 10, 10 }) {
        const int      high = low;
        const uint32_t mask = (1u << width) - 1;
        low -= width;
        std::memset(bins, 0, sizeof(uint32_t) << width);
        for (int64_t i = 0; i < n; ++i) {
            if (keys[i] >> high == prefix) {
                ++bins[keys[i] >> low & mask];
            }
        }
        uint32_t bin = mask;
        while (bins[bin] < wanted) {
            wanted -= bins[bin--];
        }
        prefix = prefix << width | bin;
    }
    int64_t n_listed = 0;
    for (int64_t i = 0; i < n && n_listed < ntop; ++i) {
        if (keys[i] > prefix || (keys[i] == prefix && wanted-- > 0)) {
            list[n_listed++] = (int32_t) i;
        }
    }
}

struct selection {
    explicit selection(const ggml_tensor * op)
        : q(op->src[0]),
          h(q->ne[1]),
          d(q->ne[0]),
          pooled((const float *) op->src[1]->data),
          k_idxs((const int64_t *) op->src[2]->data),
          n_tokens(op->src[2]->ne[0]),
          r(qsa_param_i32(op, QSA_PARAM_R)),
          kv_size(qsa_param_i32(op, QSA_PARAM_KV_SIZE)),
          n_block_max(kv_size / r),
          n_rows(qsa_param_i32(op, QSA_PARAM_ROWS)),
          ntop(qsa_param_i32(op, QSA_PARAM_NTOP)),
          lists((int32_t *) op->data),
          keys((uint32_t *) op->data + qsa_select_ws_offset(ntop, n_tokens)),
          bins(keys + n_rows * n_block_max) {}

    int64_t n_visible(int64_t t) const {
        return (k_idxs[t] % kv_size + 1) / r;
    }

    // Blocks that need a score: none while all visible ones fit into the list.
    int64_t n_scored(int64_t t) const {
        return n_visible(t) <= ntop ? 0 : n_visible(t);
    }

    uint32_t * row(int64_t i) const {
        return keys + i * n_block_max;
    }

    void score_blocks(int64_t t, int64_t begin, int64_t end, uint32_t * out) const {
        const float * query = (const float *) ((const char *) q->data + t * q->nb[2]);
        const float * block = pooled + (size_t) (k_idxs[t] / kv_size * n_block_max + begin) * d;
        score(query, q->nb[1] / sizeof(float), h, block, d, end - begin, out + begin);
    }

    void write_list(int64_t t, const uint32_t * scores, uint32_t * row_bins) const {
        int32_t *     list = lists + t * ntop;
        const int64_t n    = n_visible(t);
        if (n > ntop) {
            pick(scores, n, ntop, row_bins, list);
            return;
        }
        for (int32_t i = 0; i < ntop; ++i) {
            list[i] = i < n ? i : -1;
        }
    }

    const ggml_tensor * q;
    int64_t             h, d;
    const float *       pooled;
    const int64_t *     k_idxs;
    int64_t             n_tokens, r, kv_size, n_block_max, n_rows;
    int32_t             ntop;
    int32_t *           lists;
    uint32_t *          keys;
    uint32_t *          bins;
};

// Few tokens: all threads score parts of every token's blocks, then each picks for some tokens.
void select_by_blocks(const ggml_compute_params * params, const selection & s) {
    for (int64_t t = 0; t < s.n_tokens; ++t) {
        const slice mine = part(s.n_scored(t), params->ith, params->nth);
        if (mine.begin < mine.end) {
            s.score_blocks(t, mine.begin, mine.end, s.row(t));
        }
    }
    ggml_barrier(params->threadpool);
    for (int64_t t = params->ith; t < s.n_tokens; t += params->nth) {
        s.write_list(t, s.row(t), s.bins + t * QSA_BINS);
    }
}

// Many tokens: each thread takes a run of them, in groups that share a tile of blocks while it is in the cache.
void select_by_tokens(const ggml_compute_params * params, const selection & s) {
    constexpr int64_t n_tile   = 64;
    const int         n_worker = (int) std::min<int64_t>(params->nth, s.n_rows);
    if (params->ith >= n_worker) {
        return;
    }
    const int64_t n_group = s.n_rows / n_worker;
    const int64_t first   = params->ith * n_group;
    const slice   mine    = part(s.n_tokens, params->ith, n_worker);
    for (int64_t t0 = mine.begin; t0 < mine.end; t0 += n_group) {
        const int64_t t1        = std::min(t0 + n_group, mine.end);
        int64_t       n_deepest = 0;
        for (int64_t t = t0; t < t1; ++t) {
            n_deepest = std::max(n_deepest, s.n_scored(t));
        }
        for (int64_t b = 0; b < n_deepest; b += n_tile) {
            for (int64_t t = t0; t < t1; ++t) {
                const int64_t end = std::min(b + n_tile, s.n_scored(t));
                if (b < end) {
                    s.score_blocks(t, b, end, s.row(first + t - t0));
                }
            }
        }
        for (int64_t t = t0; t < t1; ++t) {
            s.write_list(t, s.row(first + t - t0), s.bins + first * QSA_BINS);
        }
    }
}

void select(const ggml_compute_params * params, ggml_tensor * op) {
    const selection s(op);
    if (s.n_tokens < params->nth && s.n_tokens <= s.n_rows) {
        select_by_blocks(params, s);
    } else {
        select_by_tokens(params, s);
    }
}

// ---- ATTN ----------------------------------------------------------------------------------------------------------

// A token's cells are cut into pieces; each gives a partial softmax, and these are added up in order. The pieces are
// the same whether one thread walks through them or many share them.
struct attention {
    explicit attention(const ggml_tensor * op)
        : q(op->src[0]),
          k(op->src[1]),
          v(op->src[2]),
          k_idxs((const int64_t *) op->src[3]->data),
          list(op->src[4]),
          n_tokens(op->src[3]->ne[0]),
          D(q->ne[0]),
          H(q->ne[1]),
          HKV(qsa_param_i32(op, QSA_PARAM_N_KV_HEAD)),
          G(H / HKV),
          r(qsa_param_i32(op, QSA_PARAM_R)),
          kv_size(qsa_param_i32(op, QSA_PARAM_KV_SIZE)),
          ntop(qsa_param_i32(op, QSA_PARAM_NTOP)),
          n_split(qsa_param_i32(op, QSA_PARAM_N_SPLIT)),
          n_piece_block(std::max<int64_t>(16, (ntop + 31) / 32)),
          n_piece((ntop + n_piece_block - 1) / n_piece_block + 1),  // the tail is a piece of its own
          n_piece_cell(n_piece_block * r),
          scale(qsa_param_f32(op, QSA_PARAM_SCALE)),
          out((float *) op->data) {}

    // Floats: K rows, V rows, scores, a piece's sums, the token's sums, cells (64-bit), m and l of both.
    size_t n_scratch() const {
        return (n_row_k + n_row_v) * D + G * n_piece_cell + 2 * G * D + 2 * n_piece_cell + 4 * G;
    }

    static constexpr int64_t n_row_k = 4;  // rows dequantised at a time: they stay in the first cache level
    static constexpr int64_t n_row_v = 16;

    const ggml_tensor * q;
    const ggml_tensor * k;
    const ggml_tensor * v;
    const int64_t *     k_idxs;
    const ggml_tensor * list;
    int64_t             n_tokens, D, H, HKV, G, r, kv_size, ntop, n_split, n_piece_block, n_piece, n_piece_cell;
    float               scale;
    float *             out;
};

// Running softmax of the G query heads of one KV head: o [G][D], m [G], l [G].
struct partial {
    float * o;
    float * m;
    float * l;
};

// Cells of piece i of token t. The last piece is the tail.
int64_t piece_cells(const attention & a, int64_t t, int64_t i, int64_t * cells) {
    const int64_t idx  = a.k_idxs[t];
    const int64_t c    = idx % a.kv_size;
    const int64_t base = idx - c;
    int64_t       n    = 0;
    if (i == a.n_piece - 1) {
        for (int64_t cell = base + (c + 1) / a.r * a.r; cell <= idx; ++cell) {
            cells[n++] = cell;
        }
        return n;
    }
    const int32_t * list = (const int32_t *) ((const char *) a.list->data + t * a.list->nb[1]);
    const int64_t   end  = std::min((i + 1) * a.n_piece_block, a.ntop);
    for (int64_t b = i * a.n_piece_block; b < end && list[b] >= 0; ++b) {
        for (int64_t j = 0; j < a.r; ++j) {
            cells[n++] = base + list[b] * a.r + j;
        }
    }
    return n;
}

inline const char * cell_row(const ggml_tensor * storage, int64_t cell, int64_t kv_head, int64_t D) {
    return (const char *) storage->data + (size_t) cell * storage->nb[1] + ggml_row_size(storage->type, kv_head * D);
}

// scores[g][j] = scale * q_g . k_j
void piece_scores(const attention & a, int64_t t, int64_t kv_head, const int64_t * cells, int64_t n, float * rows,
                  float * scores) {
    const char * q0       = (const char *) a.q->data + t * a.q->nb[2] + kv_head * a.G * a.q->nb[1];
    const size_t q_stride = a.q->nb[1] / sizeof(float);
    for (int64_t j = 0; j < n; j += a.n_row_k) {
        const int64_t n_row = std::min(a.n_row_k, n - j);
        for (int64_t i = 0; i < n_row; ++i) {
            to_f32(a.k->type, cell_row(a.k, cells[j + i], kv_head, a.D), rows + i * a.D, a.D);
        }
        int64_t g = 0;
        for (; n_row == a.n_row_k && g + 2 <= a.G; g += 2) {
            float s[2][4];
            dots<2, 4>((const float *) (q0 + g * a.q->nb[1]), q_stride, rows, a.D, a.D, s);
            for (int i = 0; i < 8; ++i) {
                scores[(g + i / 4) * a.n_piece_cell + j + i % 4] = s[i / 4][i % 4] * a.scale;
            }
        }
        for (; g < a.G; ++g) {
            for (int64_t i = 0; i < n_row; ++i) {
                float s[1][1];
                dots<1, 1>((const float *) (q0 + g * a.q->nb[1]), 0, rows + i * a.D, 0, a.D, s);
                scores[g * a.n_piece_cell + j + i] = s[0][0] * a.scale;
            }
        }
    }
}

// o_g += sum over rows j of p[g][j] * v_j, NG heads and NX times 8 dimensions at a time.
template <int NG, int NX>
inline void add_values(const float * p, size_t p_stride, const float * rows, int64_t n_row, int64_t D, int64_t x,
                       float * o) {
    f32x8 acc[NG][NX];
    for (int g = 0; g < NG; ++g) {
        for (int i = 0; i < NX; ++i) {
            acc[g][i] = load8(o + g * D + x + 8 * i);
        }
    }
    for (int64_t j = 0; j < n_row; ++j) {
        f32x8 y[NX];
        for (int i = 0; i < NX; ++i) {
            y[i] = load8(rows + j * D + x + 8 * i);
        }
        for (int g = 0; g < NG; ++g) {
            const float w = p[g * p_stride + j];
            for (int i = 0; i < NX; ++i) {
                acc[g][i] += w * y[i];
            }
        }
    }
    for (int g = 0; g < NG; ++g) {
        for (int i = 0; i < NX; ++i) {
            store8(o + g * D + x + 8 * i, acc[g][i]);
        }
    }
}

void piece_values(const attention & a, int64_t kv_head, const int64_t * cells, int64_t n, const float * p, float * rows,
                  float * o) {
    std::memset(o, 0, a.G * a.D * sizeof(float));
    for (int64_t j = 0; j < n; j += a.n_row_v) {
        const int64_t n_row = std::min(a.n_row_v, n - j);
        for (int64_t i = 0; i < n_row; ++i) {
            to_f32(a.v->type, cell_row(a.v, cells[j + i], kv_head, a.D), rows + i * a.D, a.D);
        }
        int64_t g = 0;
        for (; g + 4 <= a.G; g += 4) {
            for (int64_t x = 0; x < a.D; x += 16) {
                add_values<4, 2>(p + g * a.n_piece_cell + j, a.n_piece_cell, rows, n_row, a.D, x, o + g * a.D);
            }
        }
        for (; g < a.G; ++g) {
            for (int64_t x = 0; x < a.D; x += 32) {
                add_values<1, 4>(p + g * a.n_piece_cell + j, a.n_piece_cell, rows, n_row, a.D, x, o + g * a.D);
            }
        }
    }
}

// Partial softmax over piece i; m is -inf when the piece is empty.
void attend_piece(const attention & a, int64_t t, int64_t kv_head, int64_t i, float * scratch, const partial & to) {
    float *   rows_k = scratch;
    float *   rows_v = rows_k + a.n_row_k * a.D;
    float *   scores = rows_v + a.n_row_v * a.D;
    int64_t * cells  = (int64_t *) (scores + a.G * a.n_piece_cell);

    const int64_t n = piece_cells(a, t, i, cells);
    if (n == 0) {
        std::fill(to.m, to.m + a.G, -INFINITY);
        return;
    }
    piece_scores(a, t, kv_head, cells, n, rows_k, scores);
    for (int64_t g = 0; g < a.G; ++g) {
        float * s = scores + g * a.n_piece_cell;
        to.m[g]   = *std::max_element(s, s + n);
        to.l[g]   = (float) ggml_vec_soft_max_f32((int) n, s, s, to.m[g]);
    }
    piece_values(a, kv_head, cells, n, scores, rows_v, to.o);
}

void merge(const attention & a, const partial & from, const partial & to) {
    for (int64_t g = 0; g < a.G; ++g) {
        if (from.m[g] == -INFINITY) {
            continue;
        }
        const float m      = std::max(from.m[g], to.m[g]);
        const float w_from = expf(from.m[g] - m);
        const float w_to   = expf(to.m[g] - m);
        for (int64_t x = 0; x < a.D; ++x) {
            to.o[g * a.D + x] = to.o[g * a.D + x] * w_to + from.o[g * a.D + x] * w_from;
        }
        to.l[g] = to.l[g] * w_to + from.l[g] * w_from;
        to.m[g] = m;
    }
}

// Add up the pieces of (t, kv_head), which piece(i) yields in order, and write the output rows.
template <typename F>
void attend(const attention & a, int64_t t, int64_t kv_head, const partial & sum, F && piece) {
    std::memset(sum.o, 0, a.G * a.D * sizeof(float));
    std::fill(sum.m, sum.m + a.G, -INFINITY);
    std::fill(sum.l, sum.l + a.G, 0.0f);
    for (int64_t i = 0; i < a.n_piece; ++i) {
        merge(a, piece(i), sum);
    }
    float * out = a.out + (t * a.H + kv_head * a.G) * a.D;
    for (int64_t g = 0; g < a.G; ++g) {
        for (int64_t x = 0; x < a.D; ++x) {
            out[g * a.D + x] = sum.o[g * a.D + x] / sum.l[g];
        }
    }
}

void attn(const ggml_compute_params * params, ggml_tensor * op, float * scratch) {
    const attention a(op);

    // Behind what attend_piece() uses.
    float *       own   = scratch + (a.n_row_k + a.n_row_v) * a.D + a.G * a.n_piece_cell + 2 * a.n_piece_cell;
    float *       m     = own + 2 * a.G * a.D;
    const partial piece = { own, m, m + a.G };
    const partial sum   = { own + a.G * a.D, m + 2 * a.G, m + 3 * a.G };

    const int64_t n_task = a.n_tokens * a.HKV;
    if (n_task >= params->nth || a.n_split < a.n_piece) {
        const slice mine = part(n_task, params->ith, params->nth);
        for (int64_t i = mine.begin; i < mine.end; ++i) {
            attend(a, i / a.HKV, i % a.HKV, sum, [&](int64_t p) {
                attend_piece(a, i / a.HKV, i % a.HKV, p, scratch, piece);
                return piece;
            });
        }
        return;
    }

    // Fewer tasks than threads: pieces go to the workspace of the result.
    float *    o_all  = a.out + a.D * a.H * a.n_tokens;
    float *    m_all  = o_all + a.D * a.H * a.n_tokens * a.n_split;
    float *    l_all  = m_all + a.H * a.n_tokens * a.n_split;
    const auto stored = [&](int64_t task, int64_t p) -> partial {
        const int64_t head = (p * a.n_tokens + task / a.HKV) * a.H + task % a.HKV * a.G;
        return { o_all + head * a.D, m_all + head, l_all + head };
    };
    for (int64_t i = params->ith; i < n_task * a.n_piece; i += params->nth) {
        attend_piece(a, i / a.n_piece / a.HKV, i / a.n_piece % a.HKV, i % a.n_piece, scratch,
                     stored(i / a.n_piece, i % a.n_piece));
    }
    ggml_barrier(params->threadpool);
    for (int64_t i = params->ith; i < n_task; i += params->nth) {
        attend(a, i / a.HKV, i % a.HKV, sum, [&](int64_t p) { return stored(i, p); });
    }
}

// Bytes per thread, in whole cache lines.
size_t scratch_per_thread(const ggml_tensor * op) {
    size_t n = 0;
    switch (qsa_param_i32(op, QSA_PARAM_SUB)) {
        case QSA_POOL:
            n = pool_scratch(op);
            break;
        case QSA_ATTN:
            n = attention(op).n_scratch();
            break;
        default:
            break;
    }
    return GGML_PAD(n * sizeof(float), 64);
}

}  // namespace

size_t ggml_qsa_work_size(const ggml_tensor * op, int n_tasks) {
    return scratch_per_thread(op) * n_tasks;
}

void ggml_compute_forward_qsa(const ggml_compute_params * params, ggml_tensor * op) {
    float * scratch = (float *) ((char *) params->wdata + scratch_per_thread(op) * params->ith);
    switch (qsa_param_i32(op, QSA_PARAM_SUB)) {
        case QSA_POOL:
            pool(params, op, scratch);
            break;
        case QSA_SELECT:
            select(params, op);
            break;
        case QSA_ATTN:
            attn(params, op, scratch);
            break;
        default:
            GGML_ABORT("QSA: unknown operation");
    }
}
