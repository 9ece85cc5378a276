// SELECT on the CPU: every thread scores blocks or tokens of its own; picking counts key bits, so it is O(blocks).
#include <algorithm>
#include <cstring>

#include "ggml-cpu-impl.h"
#include "qsa_cpu_parts.h"
#include "qsa_cpu_vec.h"

namespace qsa_cpu {

namespace {

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

}  // namespace

void select(const ggml_compute_params * params, ggml_tensor * op) {
    const selection s(op);
    if (s.n_tokens < params->nth && s.n_tokens <= s.n_rows) {
        select_by_blocks(params, s);
    } else {
        select_by_tokens(params, s);
    }
}

}  // namespace qsa_cpu
