// States of sequences: saved and loaded piece by piece, on any thread.
#include <algorithm>
#include <memory>
#include <stdexcept>

#include "mg.h"
#include "mg_error.h"
#ifndef MG_NO_SWITCHES
#include "state_pieces.h"
#endif

void * mg_state_save(void * ctx, int32_t seq, uint64_t * n_bytes) {
    return mg::guarded("mg_state_save", (void *) nullptr, [&]() -> void * {
#ifndef MG_NO_SWITCHES
        auto *      context = static_cast<llama_context *>(ctx);
        auto        made    = std::make_unique<state::pieces>();
        state::sink io(*made);
        state::head head;
        head.seq = seq;
        io.write(&head, sizeof(head));
        state::memory_of(context, seq)->state_write(io, seq, LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY);
        *n_bytes = made->n_bytes;
        return made.release();
#else
        (void) ctx, (void) seq, (void) n_bytes;
        throw std::runtime_error("an unpatched build does not show its states");
#endif
    });
}

void * mg_state_load(void * ctx, int32_t seq, const void * data, uint64_t n_bytes) {
    return mg::guarded("mg_state_load", (void *) nullptr, [&]() -> void * {
#ifndef MG_NO_SWITCHES
        auto *        context = static_cast<llama_context *>(ctx);
        auto          made    = std::make_unique<state::pieces>();
        state::source io(*made, static_cast<const uint8_t *>(data), n_bytes);
        state::head   head;
        const auto    magic = head.magic;
        io.read(&head, sizeof(head));
        if (head.magic != magic) {
            throw std::runtime_error("this is not the state of a sequence");
        }
        made->to_host = false;
        made->n_bytes = n_bytes;
        state::memory_of(context, seq)->state_read(io, seq, LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY);
        return made.release();
#else
        (void) ctx, (void) seq, (void) data, (void) n_bytes;
        throw std::runtime_error("an unpatched build does not show its states");
#endif
    });
}

int32_t mg_state_copy(void * handle, void * data, uint64_t begin, uint64_t end) {
    return mg::guarded("mg_state_copy", (int32_t) -1, [&]() -> int32_t {
#ifndef MG_NO_SWITCHES
        const auto * from  = static_cast<const state::pieces *>(handle);
        auto *       bytes = static_cast<uint8_t *>(data);
        for (const auto & ready : from->ready) {
            ready->wait();
        }
        for (const state::note & n : from->notes) {
            const uint64_t first = std::max<uint64_t>(begin, n.at);
            const uint64_t last  = std::min<uint64_t>(end, n.at + n.bytes.size());
            if (from->to_host && first < last) {
                std::memcpy(bytes + first, n.bytes.data() + (first - n.at), last - first);
            }
        }
        for (const state::hole & h : from->holes) {
            const uint64_t first = std::max<uint64_t>(begin, h.at);
            const uint64_t last  = std::min<uint64_t>(end, h.at + h.bytes.size);
            if (first < last) {
                const cells::bytes part = { h.bytes.buffer, h.bytes.data + (first - h.at), last - first };
                cells::copy_bytes(part, bytes + first, from->to_host);
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
    delete static_cast<state::pieces *>(handle);
#else
    (void) handle;
#endif
}
