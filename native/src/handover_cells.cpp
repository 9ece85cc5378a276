#include "handover_cells.h"

#include "llama-hparams.h"

bool kv_take::possible(const llama_kv_cache & from, llama_seq_id seq_from, const llama_kv_cache & to,
                       llama_seq_id seq_to) {
    if (from.other || to.other || from.n_stream != from.n_seq_max || to.n_stream != to.n_seq_max ||
        from.v_trans != to.v_trans || from.layers.size() != to.layers.size()) {
        return false;
    }
    for (size_t i = 0; i < from.layers.size(); ++i) {
        const auto & a = from.layers[i];
        const auto & b = to.layers[i];
        if (a.il != b.il || a.k->type != b.k->type || !a.v != !b.v || (a.v && a.v->type != b.v->type)) {
            return false;
        }
    }
    const llama_kv_cells & source = from.v_cells[from.seq_to_stream[seq_from]];
    const llama_kv_cells & target = to.v_cells[to.seq_to_stream[seq_to]];
    return target.used.empty() && source.used_max_p1() <= target.size() && !source.has_shift &&
           source.used.size() == source.seq_pos[seq_from].size();
}

void kv_take::copy(const llama_kv_cache & from, llama_seq_id seq_from, const llama_kv_cache & to, llama_seq_id seq_to,
                   handover::device_copier & copier) {
    const uint32_t         s_from = from.seq_to_stream[seq_from];
    const uint32_t         s_to   = to.seq_to_stream[seq_to];
    const llama_kv_cells & cells  = from.v_cells[s_from];
    const size_t           lo     = cells.used_min();
    const size_t           n      = cells.used_max_p1() - lo;
    for (size_t i = 0; i < from.layers.size(); ++i) {
        const auto &  a = from.layers[i];
        const auto &  b = to.layers[i];
        ggml_tensor * k = a.k_stream[s_from];
        copier.copy({ k, lo * k->nb[1], n * k->nb[1] }, { b.k_stream[s_to], lo * k->nb[1], n * k->nb[1] });
        ggml_tensor * v = a.v_stream[s_from];
        if (!v) {
            continue;
        }
        if (!from.v_trans) {
            copier.copy({ v, lo * v->nb[1], n * v->nb[1] }, { b.v_stream[s_to], lo * v->nb[1], n * v->nb[1] });
            continue;
        }
        const size_t el = ggml_type_size(v->type);
        for (size_t row = 0; row < from.hparams.n_embd_v_gqa(a.il); ++row) {
            copier.copy({ v, (lo + row * cells.size()) * el, n * el },
                        { b.v_stream[s_to], (lo + row * to.v_cells[s_to].size()) * el, n * el });
        }
    }
}

void kv_take::cells(llama_kv_cache & from, llama_seq_id seq_from, llama_kv_cache & to, llama_seq_id seq_to) {
    const uint32_t   s_from = from.seq_to_stream[seq_from];
    const uint32_t   s_to   = to.seq_to_stream[seq_to];
    llama_kv_cells & source = from.v_cells[s_from];
    llama_kv_cells & target = to.v_cells[s_to];

    const uint32_t n = source.used_max_p1();
    for (uint32_t i = source.used_min(); i < n; ++i) {
        if (source.pos[i] != -1) {
            target.pos[i] = source.pos[i];
            target.ext[i] = source.ext[i];
            target.seq[i].set(seq_to);
            source.pos[i] = -1;
            source.ext[i].reset();
            source.seq[i].reset();
        }
    }
    target.used.swap(source.used);
    target.seq_pos[seq_to].swap(source.seq_pos[seq_from]);
    to.v_heads[s_to]     = n;
    from.v_heads[s_from] = 0;
}
