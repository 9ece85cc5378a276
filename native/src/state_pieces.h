// The part of a sequence that does not grow with its tokens, as libllama would write it, in pieces.
// The memory's own writer runs against a sink that keeps the small host data and notes where tensor bytes belong in
// the state; its reader against a source that gives the host data and notes where tensor bytes are wanted.
#pragma once

#include <algorithm>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <vector>

#include "cells_bytes.h"
#include "llama-context.h"
#include "llama-io.h"
#include "llama-memory.h"
#include "llama.h"
#include "state_memory.h"

namespace state {

// libllama puts these two in front of the state of a sequence.
struct head {
    uint32_t magic = 0xaf143cd8;
    int32_t  seq   = 0;
};

struct hole {
    size_t       at;  // in the state
    cells::bytes bytes;
};

struct note {
    size_t               at;
    std::vector<uint8_t> bytes;
};

struct pieces {
    pieces()                           = default;
    pieces(const pieces &)             = delete;
    pieces & operator=(const pieces &) = delete;

    ~pieces() {
        for (auto & m : memory) {
            m.busy.insert(m.busy.end(), used.begin(), used.end());
            mg::state_memory::all().give(std::move(m));
        }
    }

    void add_note(size_t at, const void * src, size_t size) {
        if (notes.empty() || notes.back().at + notes.back().bytes.size() != at) {
            notes.push_back({ at, {} });
        }
        const auto * bytes = static_cast<const uint8_t *>(src);
        auto &       last  = notes.back().bytes;
        last.insert(last.end(), bytes, bytes + size);
    }

    bool              to_host = true;
    size_t            n_bytes = 0;
    std::vector<note> notes;  // what is between the tensor bytes
    std::vector<hole> holes;  // the tensor bytes: where they lie in the sequence, or once detached in memory of its own

    std::vector<mg::state_memory::piece> memory;  // its own
    mg::fences                           ready;   // to be waited for before the holes are copied
    mg::fences                           used;    // behind these nothing that was queued uses the memory any more
};

class sink : public llama_io_write_i {
public:
    explicit sink(pieces & out) : out(out) {}

    void write(const void * src, size_t size) override {
        out.add_note(out.n_bytes, src, size);
        out.n_bytes += size;
    }

    void write_tensor(ggml_tensor * tensor, size_t offset, size_t size) override {
        out.holes.push_back({ out.n_bytes, cells::bytes_of(tensor, offset, size) });
        out.n_bytes += size;
    }

    size_t n_bytes() override {
        return out.n_bytes;
    }

private:
    pieces & out;
};

// Reads a state in host memory; what it reads of it outside of tensors becomes notes.
class source : public llama_io_read_i {
public:
    source(pieces & out, const uint8_t * state, size_t n) : out(out), state(state), n(n) {}

    void read(void * dst, size_t size) override {
        const size_t from = take(size);
        std::memcpy(dst, state + from, size);
        out.add_note(from, dst, size);
    }

    void read_tensor(ggml_tensor * tensor, size_t offset, size_t size) override {
        out.holes.push_back({ take(size), cells::bytes_of(tensor, offset, size) });
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

// Reads the notes of a state again.
class note_source : public llama_io_read_i {
public:
    note_source(const pieces & from, std::vector<hole> & wanted) : from(from), wanted(wanted) {}

    void read(void * dst, size_t size) override {
        while (i < from.notes.size() && from.notes[i].at + from.notes[i].bytes.size() <= at) {
            ++i;
        }
        if (i == from.notes.size() || at < from.notes[i].at ||
            at + size > from.notes[i].at + from.notes[i].bytes.size()) {
            throw std::runtime_error("this memory describes its state differently");
        }
        std::memcpy(dst, from.notes[i].bytes.data() + (at - from.notes[i].at), size);
        at += size;
    }

    void read_tensor(ggml_tensor * tensor, size_t offset, size_t size) override {
        wanted.push_back({ at, cells::bytes_of(tensor, offset, size) });
        at += size;
    }

    void discard() override {
        wanted.clear();
    }

    size_t n_bytes() override {
        return at;
    }

private:
    const pieces &      from;
    std::vector<hole> & wanted;
    size_t              at = 0;
    size_t              i  = 0;
};

inline llama_memory_i * memory_of(llama_context * ctx, int32_t seq) {
    llama_memory_i * memory = ctx->get_memory();
    if (!memory || seq < 0 || seq >= (int32_t) ctx->n_seq_max()) {
        throw std::runtime_error("there is no such sequence");
    }
    return memory;
}

}  // namespace state
