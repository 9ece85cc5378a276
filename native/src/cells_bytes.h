// Bytes of a buffer: to and from host memory on any thread, and from device memory to device memory.
#pragma once

#include <cstring>

#include "ggml-backend-impl.h"
#include "ggml-cpp.h"

namespace cells {

inline ggml_backend_buffer_t buffer_of(const ggml_tensor * t) {
    return t->view_src ? t->view_src->buffer : t->buffer;
}

struct bytes {
    ggml_backend_buffer_t buffer;
    char *                data;  // on the buffer's device
    size_t                size;

    // A header of its own: rows of quantized types are no number of elements, and a tensor's is read by other threads.
    ggml_tensor tensor() const {
        ggml_tensor raw = {};
        raw.type        = GGML_TYPE_I8;
        raw.buffer      = buffer;
        raw.data        = data;
        for (int i = 0; i < GGML_MAX_DIMS; ++i) {
            raw.ne[i] = i == 0 ? (int64_t) size : 1;
            raw.nb[i] = i == 0 ? 1 : size;
        }
        return raw;
    }
};

inline bytes bytes_of(ggml_tensor * t, size_t offset, size_t size) {
    return { buffer_of(t), static_cast<char *>(t->data) + offset, size };
}

// A device copies on a stream of the calling thread and waits for that one only.
inline void copy_bytes(const bytes & b, void * host, bool to_host) {
    if (ggml_backend_buffer_is_host(b.buffer)) {
        std::memcpy(to_host ? host : b.data, to_host ? b.data : host, b.size);
        return;
    }
    ggml_tensor raw = b.tensor();
    if (to_host) {
        ggml_backend_tensor_get(&raw, host, 0, b.size);
    } else {
        ggml_backend_tensor_set(&raw, host, 0, b.size);
    }
}

}  // namespace cells
