// ATTN on the CPU: a cell is read once for all query heads of its KV head, and softmax goes piece by piece.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "ggml-cpu-impl.h"
#include "qsa_cpu_parts.h"
#include "qsa_cpu_vec.h"
#include "vec.h"

namespace qsa_cpu {

namespace {

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

}  // namespace

size_t attn_scratch(const ggml_tensor * op) {
    return attention(op).n_scratch();
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

}  // namespace qsa_cpu
