// The part of a sequence that does not grow with its tokens, saved and loaded piece by piece.
// The memory's own writer runs against a sink that keeps the small host data and notes where tensor bytes belong in
// the state, its reader against a source that does the same the other way; the bytes follow on any thread.
#include <algorithm>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <vector>

#include "llama-context.h"
#include "llama-io.h"
#include "llama-memory.h"
#include "llama.h"
#include "mg.h"
#include "mg_error.h"
#ifndef MG_NO_SWITCHES
#include "cells_bytes.h"

namespace {

// libllama puts these two in front of the state of a sequence.
struct state_head {
    uint32_t magic = 0xaf143cd8;
    int32_t  seq   = 0;
};

struct piece {
    size_t        at;  // in the state
    ggml_tensor * tensor;
    size_t        offset;
    size_t        size;
};

struct note {
    size_t               at;
    std::vector<uint8_t> bytes;
};

struct pieces {
    bool               to_host = true;
    size_t             n_bytes = 0;
    std::vector<note>  notes;  // what is between the tensor bytes; only of a save
    std::vector<piece> holes;
};

class sink : public llama_io_write_i {
public:
    explicit sink(pieces & out) : out(out) {}

    void write(const void * src, size_t size) override {
        if (out.notes.empty() || out.notes.back().at + out.notes.back().bytes.size() != out.n_bytes) {
            out.notes.push_back({ out.n_bytes, {} });
        }
        const auto * bytes = static_cast<const uint8_t *>(src);
        auto &       last  = out.notes.back().bytes;
        last.insert(last.end(), bytes, bytes + size);
        out.n_bytes += size;
    }

    void write_tensor(ggml_tensor * tensor, size_t offset, size_t size) override {
        out.holes.push_back({ out.n_bytes, tensor, offset, size });
        out.n_bytes += size;
    }

    size_t n_bytes() override {
        return out.n_bytes;
    }

private:
    pieces & out;
};

class source : public llama_io_read_i {
public:
    source(pieces & out, const uint8_t * state, size_t n) : out(out), state(state), n(n) {}

    void read(void * dst, size_t size) override {
        std::memcpy(dst, state + take(size), size);
    }

    void read_tensor(ggml_tensor * tensor, size_t offset, size_t size) override {
        out.holes.push_back({ take(size), tensor, offset, size });
    }

    void discard() override {
        out.holes.clear();
    }

    size_t n_bytes() override {
        return at;
    }

private:
    size_t take(size_t size) {
        if (size > n - at) {
            throw std::runtime_error("the state is too short");
        }
        at += size;
        return at - size;
    }

    pieces &        out;
    const uint8_t * state;
    size_t          n;
    size_t          at = 0;
};

llama_memory_i * memory_of(llama_context * ctx, int32_t seq) {
    llama_memory_i * memory = ctx->get_memory();
    if (!memory || seq < 0 || seq >= (int32_t) ctx->n_seq_max()) {
        throw std::runtime_error("there is no such sequence");
    }
    return memory;
}

}  // namespace
#endif

void * mg_state_save(void * ctx, int32_t seq, uint64_t * n_bytes) {
    return mg::guarded("mg_state_save", (void *) nullptr, [&]() -> void * {
#ifndef MG_NO_SWITCHES
        auto *     context = static_cast<llama_context *>(ctx);
        auto       state   = std::make_unique<pieces>();
        sink       io(*state);
        state_head head;
        head.seq = seq;
        io.write(&head, sizeof(head));
        memory_of(context, seq)->state_write(io, seq, LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY);
        *n_bytes = state->n_bytes;
        return state.release();
#else
        (void) ctx, (void) seq, (void) n_bytes;
        throw std::runtime_error("an unpatched build does not show its states");
#endif
    });
}

void * mg_state_load(void * ctx, int32_t seq, const void * data, uint64_t n_bytes) {
    return mg::guarded("mg_state_load", (void *) nullptr, [&]() -> void * {
#ifndef MG_NO_SWITCHES
        auto *     context = static_cast<llama_context *>(ctx);
        auto       state   = std::make_unique<pieces>();
        source     io(*state, static_cast<const uint8_t *>(data), n_bytes);
        state_head head;
        const auto magic = head.magic;
        io.read(&head, sizeof(head));
        if (head.magic != magic) {
            throw std::runtime_error("this is not the state of a sequence");
        }
        state->to_host = false;
        memory_of(context, seq)->state_read(io, seq, LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY);
        return state.release();
#else
        (void) ctx, (void) seq, (void) data, (void) n_bytes;
        throw std::runtime_error("an unpatched build does not show its states");
#endif
    });
}

int32_t mg_state_copy(void * handle, void * data, uint64_t begin, uint64_t end) {
    return mg::guarded("mg_state_copy", (int32_t) -1, [&]() -> int32_t {
#ifndef MG_NO_SWITCHES
        auto * state = static_cast<pieces *>(handle);
        auto * bytes = static_cast<uint8_t *>(data);
        for (const note & n : state->notes) {
            const uint64_t from = std::max<uint64_t>(begin, n.at);
            const uint64_t to   = std::min<uint64_t>(end, n.at + n.bytes.size());
            if (from < to) {
                std::memcpy(bytes + from, n.bytes.data() + (from - n.at), to - from);
            }
        }
        for (const piece & p : state->holes) {
            const uint64_t from = std::max<uint64_t>(begin, p.at);
            const uint64_t to   = std::min<uint64_t>(end, p.at + p.size);
            if (from < to) {
                cells::copy_bytes(p.tensor, p.offset + (from - p.at), to - from, bytes + from, state->to_host);
            }
        }
        return 0;
#else
        (void) handle, (void) data, (void) begin, (void) end;
        return -1;
#endif
    });
}

void mg_state_free(void * handle) {
#ifndef MG_NO_SWITCHES
    delete static_cast<pieces *>(handle);
#else
    (void) handle;
#endif
}
