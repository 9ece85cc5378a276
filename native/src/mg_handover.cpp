// Move a sequence between the memories of two contexts of one model. The memory's own state writer runs against a sink
// that keeps its small host data and only notes which device bytes it would save; the state reader of the other memory
// runs against a source that pairs those notes with the bytes it would load. Then each pair is one copy on the device.
#include <algorithm>
#include <cstring>
#include <set>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "ggml-backend-impl.h"
#include "ggml-cpp.h"
#include "llama-context.h"
#include "llama-io.h"
#include "llama-kv-cache-iswa.h"
#include "llama-kv-cache.h"
#include "llama-memory-hybrid-idx.h"
#include "llama-memory-hybrid-iswa.h"
#include "llama-memory-hybrid.h"
#include "llama-memory-recurrent.h"
#include "llama.h"
#include "mg.h"
#include "mg_error.h"
#ifndef MG_NO_SWITCHES
#include "qsa_memory.h"
#endif

namespace {

struct span {
    ggml_tensor * tensor;
    size_t        offset;
    size_t        size;
};

struct span_copy {
    span from;
    span to;  // as long as from
};

ggml_backend_buffer_t buffer_of(const ggml_tensor * t) {
    return t->view_src ? t->view_src->buffer : t->buffer;
}

// A state writer that copies no tensor.
class span_sink : public llama_io_write_i {
public:
    void write(const void * src, size_t size) override {
        const auto * bytes = static_cast<const uint8_t *>(src);
        host.insert(host.end(), bytes, bytes + size);
    }

    void write_tensor(ggml_tensor * tensor, size_t offset, size_t size) override {
        if (size > 0) {
            spans.push_back({ tensor, offset, size });
            n_device += size;
        }
    }

    size_t n_bytes() override {
        return host.size() + n_device;
    }

    std::vector<uint8_t> host;
    std::vector<span>    spans;
    size_t               n_device = 0;
};

// A state reader over what a sink holds. Both sides enumerate the same bytes in the same order, cut differently where
// the cells of one side are fragmented.
class span_source : public llama_io_read_i {
public:
    explicit span_source(const span_sink & sink) : sink(sink) {}

    void read(void * dst, size_t size) override {
        if (size > sink.host.size() - i_host) {
            throw std::runtime_error("the caches describe their state differently");
        }
        std::memcpy(dst, sink.host.data() + i_host, size);
        i_host += size;
    }

    void read_tensor(ggml_tensor * tensor, size_t offset, size_t size) override {
        n_device += size;
        while (size > 0) {
            if (i_span == sink.spans.size()) {
                throw std::runtime_error("the destination wants more data than the source has");
            }
            const span & from = sink.spans[i_span];
            const size_t n    = std::min(size, from.size - i_byte);
            copies.push_back({ { from.tensor, from.offset + i_byte, n }, { tensor, offset, n } });
            offset += n;
            size -= n;
            i_byte += n;
            if (i_byte == from.size) {
                i_byte = 0;
                ++i_span;
            }
        }
    }

    void discard() override {
        copies.clear();
    }

    size_t n_bytes() override {
        return i_host + n_device;
    }

    bool exhausted() const {
        return i_host == sink.host.size() && i_span == sink.spans.size();
    }

    std::vector<span_copy> copies;

private:
    const span_sink & sink;
    size_t            i_host = 0, i_span = 0, i_byte = 0, n_device = 0;
};

// Copies between device buffers, queued on the destination's own streams where the backend can do that.
class device_copier {
public:
    explicit device_copier(llama_context * ctx) : sched(ctx->get_sched()) {}

    void copy(const span & from, const span & to) {
        ggml_context_ptr headers(ggml_init({ 2 * ggml_tensor_overhead(), nullptr, true }));
        ggml_tensor *    src = raw(headers.get(), from);
        ggml_tensor *    dst = raw(headers.get(), to);
        ggml_backend_t   via = queue(buffer_of(from.tensor), buffer_of(to.tensor));
        if (via && via->iface.cpy_tensor_async(via, via, src, dst)) {
            busy.insert(via);
        } else {
            ggml_backend_tensor_copy(src, dst);
        }
    }

    void finish() {
        for (ggml_backend_t backend : busy) {
            ggml_backend_synchronize(backend);
        }
        busy.clear();
    }

private:
    // Bytes: rows of quantized types are not a number of elements of any ggml view.
    static ggml_tensor * raw(ggml_context * ctx, const span & s) {
        ggml_tensor * t = ggml_new_tensor_1d(ctx, GGML_TYPE_I8, (int64_t) s.size);
        t->buffer       = buffer_of(s.tensor);
        t->data         = static_cast<char *>(s.tensor->data) + s.offset;
        return t;
    }

    // The destination's backend when both buffers are on its device and it can queue copies.
    ggml_backend_t queue(ggml_backend_buffer_t a, ggml_backend_buffer_t b) const {
        ggml_backend_dev_t dev = ggml_backend_buft_get_device(ggml_backend_buffer_get_type(b));
        if (!sched || !dev || ggml_backend_buft_get_device(ggml_backend_buffer_get_type(a)) != dev) {
            return nullptr;
        }
        for (int i = 0; i < ggml_backend_sched_get_n_backends(sched); ++i) {
            ggml_backend_t backend = ggml_backend_sched_get_backend(sched, i);
            if (ggml_backend_get_device(backend) == dev && backend->iface.cpy_tensor_async) {
                return backend;
            }
        }
        return nullptr;
    }

    ggml_backend_sched_t     sched;
    std::set<ggml_backend_t> busy;
};

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
    mg::set_error("mg_seq_move: " + sentence);
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

void move(llama_context * from, int32_t seq_from, llama_context * to, int32_t seq_to) {
    llama_memory_i * a = from->get_memory();
    llama_memory_i * b = to->get_memory();

    span_sink sink;
    a->state_write(sink, seq_from);
    for (const span & s : sink.spans) {
        if (ggml_backend_buffer_is_meta(buffer_of(s.tensor))) {
            throw std::runtime_error("tensors split over devices (-sm tensor) cannot be moved; use -sm layer");
        }
    }
    span_source source(sink);
    b->state_read(source, seq_to);
    if (!source.exhausted()) {
        throw std::runtime_error("the destination wants less data than the source has");
    }

    device_copier copier(to);
    for (const span_copy & c : source.copies) {
        copier.copy(c.from, c.to);
    }
    llama_memory_recurrent * rec_a = recurrent_of(a);
    llama_memory_recurrent * rec_b = recurrent_of(b);
    if (rec_a && rec_b) {
        move_rollback(*rec_a, seq_from, *rec_b, seq_to, copier);
    }
#ifndef MG_NO_SWITCHES
    auto * idx_a = dynamic_cast<llama_memory_hybrid_idx *>(a);
    auto * idx_b = dynamic_cast<llama_memory_hybrid_idx *>(b);
    if (idx_a && idx_b && idx_a->get_qsa() && idx_b->get_qsa()) {
        idx_b->get_qsa()->take_over(*idx_a->get_qsa(), seq_from, seq_to,
                                    [&](ggml_tensor * src, size_t at_src, ggml_tensor * dst, size_t at_dst,
                                        size_t size) { copier.copy({ src, at_src, size }, { dst, at_dst, size }); });
    }
#endif
    copier.finish();
}

}  // namespace

int32_t mg_seq_move(void * ctx_src, int32_t seq_src, void * ctx_dst, int32_t seq_dst) {
    return mg::guarded("mg_seq_move", (int32_t) MG_MOVE_INVALID, [&]() -> int32_t {
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
            move(from, seq_src, to, seq_dst);
        } catch (const std::exception & e) {
            to->get_memory()->seq_rm(seq_dst, -1, -1);
            return refuse(MG_MOVE_ROOM, std::string("the destination cannot take the sequence (") + e.what() +
                                            "); it needs as many free cells as the sequence has tokens, and the same "
                                            "-fa, -ctk, -ctv and -sm as the source");
        }
        return 0;
    });
}
