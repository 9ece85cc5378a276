// States in memory of their own on the devices where they lie: taken from a sequence, and put into one, by copies that
// are queued behind what its context computes. Rows of a sequence may move with every batch, so this is done between
// two.
#include <algorithm>
#include <map>
#include <memory>
#include <stdexcept>

#include "mg.h"
#include "mg_error.h"
#ifndef MG_NO_SWITCHES
#include "mg_fence.h"
#include "state_pieces.h"

namespace {

constexpr size_t N_USED_MAX = 4;

// Copies from device memory to device memory, on the queues of a context where it has one for the device.
class queued_copy {
public:
    explicit queued_copy(llama_context * ctx) : sched(ctx->get_sched()) {}

    void copy(const cells::bytes & from, const cells::bytes & to, const mg::fences & after) {
        ggml_tensor    src = from.tensor(), dst = to.tensor();
        ggml_backend_t backend = queue(from.buffer, to.buffer);
        if (backend) {
            if (std::find(in_order.begin(), in_order.end(), backend) == in_order.end()) {
                for (const auto & fence : after) {
                    fence->before(backend);
                }
                in_order.push_back(backend);
            }
            if (backend->iface.cpy_tensor_async(backend, backend, &src, &dst)) {
                return;
            }
        }
        if (!is_idle) {
            ggml_backend_sched_synchronize(sched);
            for (const auto & fence : after) {
                fence->wait();
            }
            is_idle = true;
        }
        ggml_backend_tensor_copy(&src, &dst);
    }

private:
    ggml_backend_t queue(ggml_backend_buffer_t a, ggml_backend_buffer_t b) const {
        ggml_backend_dev_t dev = ggml_backend_buft_get_device(ggml_backend_buffer_get_type(b));
        if (!dev || ggml_backend_buft_get_device(ggml_backend_buffer_get_type(a)) != dev) {
            return nullptr;
        }
        for (int i = 0; i < ggml_backend_sched_get_n_backends(sched); ++i) {
            ggml_backend_t backend = ggml_backend_sched_get_backend(sched, i);
            if (ggml_backend_get_device(backend) == dev && backend->iface.cpy_tensor_async &&
                backend->iface.event_wait) {
                return backend;
            }
        }
        return nullptr;
    }

    ggml_backend_sched_t        sched;
    std::vector<ggml_backend_t> in_order;  // those that wait for `after` already
    bool                        is_idle = false;
};

// Memory for all holes, one piece of each type of buffer; false when there is none.
bool take_memory(state::pieces & s, std::vector<cells::bytes> & places) {
    std::map<ggml_backend_buffer_type_t, size_t> sizes;
    std::vector<size_t>                          offsets;
    for (const state::hole & h : s.holes) {
        if (ggml_backend_buffer_is_meta(h.bytes.buffer)) {
            throw std::runtime_error("tensors are split over devices (-sm tensor); use -sm layer");
        }
        ggml_backend_buffer_type_t buft = ggml_backend_buffer_get_type(h.bytes.buffer);
        size_t &                   size = sizes[buft];
        size                            = GGML_PAD(size, ggml_backend_buft_get_alignment(buft));
        offsets.push_back(size);
        size += h.bytes.size;
    }
    std::map<ggml_backend_buffer_type_t, ggml_backend_buffer_t> buffers;
    for (const auto & [buft, size] : sizes) {
        auto taken = mg::state_memory::all().take(buft, size);
        if (!taken) {
            for (auto & m : s.memory) {
                mg::state_memory::all().give(std::move(m));
            }
            s.memory.clear();
            return false;
        }
        buffers[buft] = taken->buffer;
        s.memory.push_back(std::move(*taken));
    }
    for (size_t i = 0; i < s.holes.size(); ++i) {
        ggml_backend_buffer_t buffer = buffers[ggml_backend_buffer_get_type(s.holes[i].bytes.buffer)];
        auto *                base   = static_cast<char *>(ggml_backend_buffer_get_base(buffer));
        places.push_back({ buffer, base + offsets[i], s.holes[i].bytes.size });
    }
    return true;
}

// Both describe the same bytes of a state in their order, perhaps cut differently.
void copy_all(const std::vector<state::hole> & from, const std::vector<state::hole> & to, const mg::fences & after,
              queued_copy & copier) {
    size_t i = 0;
    for (const state::hole & h : to) {
        size_t done = 0;
        while (done < h.bytes.size) {
            const size_t at = h.at + done;
            while (i < from.size() && from[i].at + from[i].bytes.size <= at) {
                ++i;
            }
            if (i == from.size() || at < from[i].at) {
                throw std::runtime_error("this memory wants other data than the state has");
            }
            const size_t skip = at - from[i].at;
            const size_t n    = std::min(h.bytes.size - done, from[i].bytes.size - skip);
            copier.copy({ from[i].bytes.buffer, from[i].bytes.data + skip, n },
                        { h.bytes.buffer, h.bytes.data + done, n }, after);
            done += n;
        }
    }
}

}  // namespace
#endif

int32_t mg_state_detach(void * ctx, void * handle) {
    return mg::guarded("mg_state_detach", (int32_t) -1, [&]() -> int32_t {
#ifndef MG_NO_SWITCHES
        auto & s = *static_cast<state::pieces *>(handle);
        if (!s.memory.empty()) {
            throw std::runtime_error("it has memory of its own already");
        }
        std::vector<cells::bytes> places;
        if (s.holes.empty() || !take_memory(s, places)) {
            return 1;
        }
        mg::fences before;
        for (auto & m : s.memory) {
            before.insert(before.end(), m.busy.begin(), m.busy.end());
            m.busy.clear();
        }
        auto * context = static_cast<llama_context *>(ctx);
        if (s.to_host) {
            queued_copy copier(context);
            for (size_t i = 0; i < places.size(); ++i) {
                copier.copy(s.holes[i].bytes, places[i], before);
            }
            s.ready = s.used = { std::make_shared<const mg::fence>(context) };
        } else {
            s.ready = s.used = std::move(before);
        }
        for (size_t i = 0; i < places.size(); ++i) {
            s.holes[i].bytes = places[i];
        }
        return 0;
#else
        (void) ctx, (void) handle;
        return -1;
#endif
    });
}

int32_t mg_state_put(void * ctx, int32_t seq, void * handle) {
    return mg::guarded("mg_state_put", (int32_t) -1, [&]() -> int32_t {
#ifndef MG_NO_SWITCHES
        auto & s = *static_cast<state::pieces *>(handle);
        if (s.memory.empty()) {
            throw std::runtime_error("it has no memory of its own (mg_state_detach)");
        }
        auto *                   context = static_cast<llama_context *>(ctx);
        std::vector<state::hole> wanted;
        state::note_source       io(s, wanted);
        state::head              head;
        io.read(&head, sizeof(head));
        state::memory_of(context, seq)->state_read(io, seq, LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY);
        queued_copy copier(context);
        copy_all(s.holes, wanted, s.ready, copier);
        if (s.used.size() >= N_USED_MAX) {
            s.used.front()->wait();  // long over
            s.used.erase(s.used.begin());
        }
        s.used.push_back(std::make_shared<const mg::fence>(context));
        return 0;
#else
        (void) ctx, (void) seq, (void) handle;
        return -1;
#endif
    });
}

void mg_state_limit(uint64_t n_bytes, uint64_t n_left) {
#ifndef MG_NO_SWITCHES
    mg::state_memory::all().set_limit(n_bytes, n_left);
#else
    (void) n_bytes, (void) n_left;
#endif
}

uint64_t mg_state_held(void) {
#ifndef MG_NO_SWITCHES
    return mg::state_memory::all().size();
#else
    return 0;
#endif
}
