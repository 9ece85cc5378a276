// Move or copy a sequence between the memories of two contexts of one model.
// In general the memory's own state writer runs against a sink that only notes which device bytes it would save, the
// state reader of the other memory against a source that pairs those notes with the bytes it would load, and each pair
// is one copy on the device. A KV cache that can be taken over whole (handover_cells.h) needs no description of its
// cells.
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "handover_copier.h"
#include "handover_spans.h"
#include "llama-context.h"
#include "llama-kv-cache-iswa.h"
#include "llama-kv-cache.h"
#include "llama-memory-hybrid-idx.h"
#include "llama-memory-hybrid-iswa.h"
#include "llama-memory-hybrid.h"
#include "llama-memory-recurrent.h"
#include "llama-model.h"
#include "llama.h"
#include "mg.h"
#include "mg_error.h"
#ifndef MG_NO_SWITCHES
#include "handover_cells.h"
#include "qsa_memory.h"
#endif

using handover::device_copier;
using handover::span_copy;
using handover::span_sink;
using handover::span_source;

namespace {

const llama_kv_cache * attention_of(llama_memory_i * memory) {
    if (auto * hybrid = dynamic_cast<llama_memory_hybrid *>(memory)) {
        return hybrid->get_mem_attn();
    }
    if (auto * hybrid = dynamic_cast<llama_memory_hybrid_iswa *>(memory)) {
        return hybrid->get_mem_attn()->get_base();
    }
    if (auto * iswa = dynamic_cast<llama_kv_cache_iswa *>(memory)) {
        return iswa->get_base();
    }
    return dynamic_cast<llama_kv_cache *>(memory);
}

llama_memory_recurrent * recurrent_of(llama_memory_i * memory) {
    if (auto * hybrid = dynamic_cast<llama_memory_hybrid *>(memory)) {
        return hybrid->get_mem_recr();
    }
    if (auto * hybrid = dynamic_cast<llama_memory_hybrid_iswa *>(memory)) {
        return hybrid->get_mem_recr();
    }
    return dynamic_cast<llama_memory_recurrent *>(memory);
}

// The states of the last tokens, to which a recurrent sequence can be cut back. Saved states leave them out, and a cut
// would then read another sequence's. They are copied; where the source has none, a further cut is refused instead.
void move_rollback(const llama_memory_recurrent & from, llama_seq_id seq_from, llama_memory_recurrent & to,
                   llama_seq_id seq_to, device_copier & copier) {
    const int32_t tail_from = from.cells[seq_from].tail;
    const int32_t tail_to   = to.cells[seq_to].tail;
    if (to.n_rs_seq == 0 || tail_from < 0 || tail_to < 0) {
        return;
    }
    const int32_t  src     = from.cells[tail_from].src;
    const size_t   row     = src >= 0 ? src : tail_from;
    const uint32_t pending = from.n_rs_seq > 0 ? from.rs_idx[seq_from] : 0;
    const bool     whole   = pending == 0 && from.n_rs_seq >= to.n_rs_seq;
    // A group of states for each number of tokens to go back; a pending cut forbids another, as in the source.
    const uint32_t n_group = whole ? to.n_rs_seq : 1;
    for (const auto rows :
         { &llama_memory_recurrent::r_l, &llama_memory_recurrent::s_l, &llama_memory_recurrent::p_l }) {
        for (size_t il = 0; il < (to.*rows).size(); ++il) {
            ggml_tensor * a = (from.*rows)[il];
            ggml_tensor * b = (to.*rows)[il];
            for (uint32_t g = 1; a && b && g <= n_group; ++g) {
                const size_t group = whole ? g : pending;
                copier.copy({ a, (group * from.size + row) * a->nb[1], a->nb[1] },
                            { b, (g * to.size + tail_to) * b->nb[1], b->nb[1] });
            }
        }
    }
    to.set_rs_idx(seq_to, whole ? 0 : 1);
}

int32_t refuse(int32_t code, const std::string & sentence) {
    mg::set_error("a sequence stays where it is: " + sentence);
    return code;
}

std::string number(int64_t n) {
    return std::to_string(n);
}

// 0, or the code of the sentence that says why these two contexts cannot do it.
int32_t check(llama_context * from, int32_t seq_from, llama_context * to, int32_t seq_to) {
    if (!from || !to || from == to) {
        return refuse(MG_MOVE_INVALID, "two different contexts are needed; within one use llama_memory_seq_cp");
    }
    if (&from->get_model() != &to->get_model()) {
        return refuse(MG_MOVE_MODEL,
                      "the contexts belong to different models; load the model once and make both from it");
    }
    llama_memory_i * a = from->get_memory();
    llama_memory_i * b = to->get_memory();
    if (!a || !b) {
        return refuse(MG_MOVE_INVALID, "a context of this model keeps no sequences, so there is nothing to move");
    }
    if (seq_from < 0 || seq_from >= (int32_t) from->n_seq_max() || seq_to < 0 || seq_to >= (int32_t) to->n_seq_max()) {
        return refuse(MG_MOVE_INVALID, "sequence " + number(seq_from) + " of " + number(from->n_seq_max()) + " or " +
                                           number(seq_to) + " of " + number(to->n_seq_max()) +
                                           " does not exist; ids count from 0 and n_seq_max says how many there are");
    }
    const llama_pos last = a->seq_pos_max(seq_from);
    if (last < 0) {
        return refuse(MG_MOVE_EMPTY, "sequence " + number(seq_from) + " of the source holds no tokens");
    }
    if (b->seq_pos_max(seq_to) >= 0) {
        return refuse(MG_MOVE_BUSY, "sequence " + number(seq_to) +
                                        " of the destination holds tokens; remove them first (llama_memory_seq_rm)");
    }
    const llama_kv_cache * kv_a     = attention_of(a);
    const llama_kv_cache * kv_b     = attention_of(b);
    const int64_t          n_tokens = kv_a ? last - kv_a->seq_pos_min(seq_from) + 1 : 0;
    if (n_tokens > to->n_ctx_seq()) {
        return refuse(MG_MOVE_ROOM, "the sequence has " + number(n_tokens) + " tokens, a sequence of the destination " +
                                        number(to->n_ctx_seq()) + "; give it a larger context (-c)");
    }
    if (kv_a && kv_b && (kv_a->type_k() != kv_b->type_k() || kv_a->type_v() != kv_b->type_v())) {
        return refuse(MG_MOVE_CACHE, std::string("the source keeps ") + ggml_type_name(kv_a->type_k()) + "/" +
                                         ggml_type_name(kv_a->type_v()) + ", the destination " +
                                         ggml_type_name(kv_b->type_k()) + "/" + ggml_type_name(kv_b->type_v()) +
                                         "; give both the same -ctk and -ctv");
    }
    if (to->get_cparams().n_rs_seq > 0 && !recurrent_of(b)) {
        return refuse(MG_MOVE_CACHE,
                      "this architecture's memory cannot move states to roll back to; "
                      "make the destination with n_rs_seq = 0");
    }
    return 0;
}

// Pooled keys of native QSA, from one context's index cache to the other's.
void take_pooled(llama_memory_i * a, int32_t seq_from, llama_memory_i * b, int32_t seq_to, device_copier & copier) {
#ifndef MG_NO_SWITCHES
    auto * from = dynamic_cast<llama_memory_hybrid_idx *>(a);
    auto * to   = dynamic_cast<llama_memory_hybrid_idx *>(b);
    if (from && to && from->get_qsa() && to->get_qsa()) {
        to->get_qsa()->forget(seq_to);
        to->get_qsa()->take_over(*from->get_qsa(), seq_from, seq_to,
                                 [&](ggml_tensor * src, size_t at_src, ggml_tensor * dst, size_t at_dst, size_t size) {
                                     copier.copy({ src, at_src, size }, { dst, at_dst, size });
                                 });
    }
#else
    (void) a, (void) seq_from, (void) b, (void) seq_to, (void) copier;
#endif
}

// What a memory would save of a sequence goes where the other one would load it.
void transfer(llama_memory_i * a, int32_t seq_from, llama_memory_i * b, int32_t seq_to, device_copier & copier) {
    span_sink sink;
    a->state_write(sink, seq_from);
    span_source source(sink);
    b->state_read(source, seq_to);
    if (!source.exhausted()) {
        throw std::runtime_error("the destination wants less data than the source has");
    }
    for (const span_copy & c : source.copies) {
        copier.copy(c.from, c.to);
    }
}

void copy(llama_context * from, int32_t seq_from, llama_context * to, int32_t seq_to) {
    llama_memory_i * a = from->get_memory();
    llama_memory_i * b = to->get_memory();
    device_copier    copier(to);
    transfer(a, seq_from, b, seq_to, copier);
    llama_memory_recurrent * rec_a = recurrent_of(a);
    llama_memory_recurrent * rec_b = recurrent_of(b);
    if (rec_a && rec_b) {
        move_rollback(*rec_a, seq_from, *rec_b, seq_to, copier);
    }
    take_pooled(a, seq_from, b, seq_to, copier);
    copier.finish();
}

#ifndef MG_NO_SWITCHES
using cache_pair = std::pair<llama_kv_cache *, llama_kv_cache *>;

// The KV caches of two memories, if they consist of such caches and perhaps a recurrent memory.
std::vector<cache_pair> caches_of(llama_context * from, llama_memory_i * a, llama_memory_i * b) {
    const auto both = [](llama_kv_cache_iswa * x, llama_kv_cache_iswa * y) -> std::vector<cache_pair> {
        return { { x->get_base(), y->get_base() }, { x->get_swa(), y->get_swa() } };
    };
    if (auto * x = dynamic_cast<llama_memory_hybrid_idx *>(a)) {
        auto * y = dynamic_cast<llama_memory_hybrid_idx *>(b);
        if (!y || !x->get_mem_idx() || !y->get_mem_idx() || from->get_model().arch != LLM_ARCH_QWEN4EXP) {
            return {};  // other architectures keep groups of cells besides
        }
        return { { x->get_mem_attn(), y->get_mem_attn() }, { x->get_mem_idx(), y->get_mem_idx() } };
    }
    if (auto * x = dynamic_cast<llama_memory_hybrid *>(a)) {
        auto * y = dynamic_cast<llama_memory_hybrid *>(b);
        return y ? std::vector<cache_pair>{ { x->get_mem_attn(), y->get_mem_attn() } } : std::vector<cache_pair>{};
    }
    if (auto * x = dynamic_cast<llama_memory_hybrid_iswa *>(a)) {
        auto * y = dynamic_cast<llama_memory_hybrid_iswa *>(b);
        return y ? both(x->get_mem_attn(), y->get_mem_attn()) : std::vector<cache_pair>{};
    }
    if (auto * x = dynamic_cast<llama_kv_cache_iswa *>(a)) {
        auto * y = dynamic_cast<llama_kv_cache_iswa *>(b);
        return y ? both(x, y) : std::vector<cache_pair>{};
    }
    auto * x = dynamic_cast<llama_kv_cache *>(a);
    auto * y = dynamic_cast<llama_kv_cache *>(b);
    return x && y ? std::vector<cache_pair>{ { x, y } } : std::vector<cache_pair>{};
}

// Take the KV caches over whole; false, and nothing done, where that cannot be.
bool take(llama_context * from, int32_t seq_from, llama_context * to, int32_t seq_to) {
    llama_memory_i * a     = from->get_memory();
    llama_memory_i * b     = to->get_memory();
    const auto       pairs = caches_of(from, a, b);
    for (const auto & [x, y] : pairs) {
        if (!kv_take::possible(*x, seq_from, *y, seq_to)) {
            return false;
        }
    }
    if (pairs.empty()) {
        return false;
    }
    device_copier            copier(to);
    llama_memory_recurrent * rec_a = recurrent_of(a);
    llama_memory_recurrent * rec_b = recurrent_of(b);
    if (rec_a && rec_b) {
        transfer(rec_a, seq_from, rec_b, seq_to, copier);  // the only part that can fail
        move_rollback(*rec_a, seq_from, *rec_b, seq_to, copier);
    }
    for (const auto & [x, y] : pairs) {
        kv_take::copy(*x, seq_from, *y, seq_to, copier);
    }
    take_pooled(a, seq_from, b, seq_to, copier);
    copier.finish();
    for (const auto & [x, y] : pairs) {
        kv_take::cells(*x, seq_from, *y, seq_to);
    }
    return true;
}
#endif

int32_t carry(const char * name, void * ctx_src, int32_t seq_src, void * ctx_dst, int32_t seq_dst, bool keep) {
    return mg::guarded(name, (int32_t) MG_MOVE_INVALID, [&]() -> int32_t {
        auto *        from = static_cast<llama_context *>(ctx_src);
        auto *        to   = static_cast<llama_context *>(ctx_dst);
        const int32_t code = check(from, seq_src, to, seq_dst);
        if (code != 0) {
            return code;
        }
        from->synchronize();
        to->synchronize();
        // Copies and shifts that were asked for run at the next decode; here they must have run.
        from->memory_update(false);
        to->memory_update(false);
        from->synchronize();
        to->synchronize();
        try {
#ifndef MG_NO_SWITCHES
            if (keep || !take(from, seq_src, to, seq_dst))
#endif
            {
                copy(from, seq_src, to, seq_dst);
            }
        } catch (const std::exception & e) {
            to->get_memory()->seq_rm(seq_dst, -1, -1);
            return refuse(MG_MOVE_ROOM, std::string("the destination cannot take the sequence (") + e.what() +
                                            "); it needs as many free cells as the sequence has tokens, and the same "
                                            "-fa, -ctk, -ctv and -sm as the source");
        }
        if (!keep) {
            from->get_memory()->seq_rm(seq_src, -1, -1);
        }
        return 0;
    });
}

}  // namespace

int32_t mg_seq_move(void * ctx_src, int32_t seq_src, void * ctx_dst, int32_t seq_dst) {
    return carry("mg_seq_move", ctx_src, seq_src, ctx_dst, seq_dst, false);
}

int32_t mg_seq_copy(void * ctx_src, int32_t seq_src, void * ctx_dst, int32_t seq_dst) {
    return carry("mg_seq_copy", ctx_src, seq_src, ctx_dst, seq_dst, true);
}
