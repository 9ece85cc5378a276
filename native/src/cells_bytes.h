// Bytes between a tensor and host memory, on any thread.
#pragma once

#include <cstring>

#include "ggml-backend-impl.h"
#include "ggml-cpp.h"

namespace cells {

inline ggml_backend_buffer_t buffer_of(const ggml_tensor * t) {
    return t->view_src ? t->view_src->buffer : t->buffer;
}

// A device copies on a stream of the calling thread and waits for that one only.
inline void copy_bytes(ggml_tensor * tensor, size_t offset, size_t size, void * host, bool to_host) {
    char *                data   = static_cast<char *>(tensor->data) + offset;
    ggml_backend_buffer_t buffer = buffer_of(tensor);
    if (ggml_backend_buffer_is_host(buffer)) {
        std::memcpy(to_host ? host : data, to_host ? data : host, size);
        return;
    }
    // A header of its own: rows of quantized types are no number of elements, and the tensor's is read by other
    // threads.
    ggml_tensor raw = {};
    raw.type        = GGML_TYPE_I8;
    raw.buffer      = buffer;
    raw.data        = data;
    for (int i = 0; i < GGML_MAX_DIMS; ++i) {
        raw.ne[i] = i == 0 ? (int64_t) size : 1;
        raw.nb[i] = i == 0 ? 1 : size;
    }
    if (to_host) {
        ggml_backend_tensor_get(&raw, host, 0, size);
    } else {
        ggml_backend_tensor_set(&raw, host, 0, size);
    }
}

}  // namespace cells
