// Copies of bytes between the buffers of two contexts.
#pragma once

#include <set>
#include <stdexcept>

#include "ggml-backend-impl.h"
#include "ggml-cpp.h"
#include "handover_spans.h"
#include "llama-context.h"

namespace handover {

// Copies between device buffers, queued on the destination's own streams where the backend can do that.
class device_copier {
public:
    explicit device_copier(llama_context * ctx) : sched(ctx->get_sched()) {}

    void copy(const span & from, const span & to) {
        if (ggml_backend_buffer_is_meta(buffer_of(from.tensor)) || ggml_backend_buffer_is_meta(buffer_of(to.tensor))) {
            throw std::runtime_error("tensors split over devices (-sm tensor) cannot be moved; use -sm layer");
        }
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

}  // namespace handover
