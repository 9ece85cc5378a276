#include "state_memory.h"

#include <algorithm>

namespace mg {

namespace {

constexpr size_t STEP = 1 << 20;

}  // namespace

state_memory & state_memory::all() {
    static auto * memory = new state_memory;
    return *memory;
}

std::optional<state_memory::piece> state_memory::take(ggml_backend_buffer_type_t buft, size_t size) {
    const std::lock_guard<std::mutex> lock(mutex);
    size            = (size + STEP - 1) / STEP * STEP;
    const auto fits = [&](const piece & p) {
        const size_t n = ggml_backend_buffer_get_size(p.buffer);
        return ggml_backend_buffer_get_type(p.buffer) == buft && n >= size && n <= size + size / 4;
    };
    const auto found = std::find_if(spare.begin(), spare.end(), fits);
    if (found != spare.end()) {
        piece taken = std::move(*found);
        spare.erase(found);
        return taken;
    }
    if (n_bytes + size > limit) {
        free_spare();
    }
    if (n_bytes + size > limit) {
        return std::nullopt;
    }
    ggml_backend_dev_t dev    = ggml_backend_buft_get_device(buft);
    size_t             n_free = 0, n_total = 0;
    ggml_backend_dev_memory(dev ? dev : ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU), &n_free, &n_total);
    if (n_total > 0 && n_free < size + n_left) {
        return std::nullopt;
    }
    ggml_backend_buffer_t buffer = ggml_backend_buft_alloc_buffer(buft, size);
    if (!buffer) {
        return std::nullopt;
    }
    n_bytes += ggml_backend_buffer_get_size(buffer);
    return piece{ buffer, {} };
}

void state_memory::give(piece p) {
    const std::lock_guard<std::mutex> lock(mutex);
    spare.push_back(std::move(p));
    if (n_bytes > limit) {
        free_spare();
    }
}

void state_memory::free_spare() {
    for (const piece & p : spare) {
        for (const auto & busy : p.busy) {
            busy->wait();
        }
        n_bytes -= ggml_backend_buffer_get_size(p.buffer);
        ggml_backend_buffer_free(p.buffer);
    }
    spare.clear();
}

void state_memory::set_limit(uint64_t n_bytes_max, uint64_t n_device_left) {
    const std::lock_guard<std::mutex> lock(mutex);
    limit  = n_bytes_max;
    n_left = n_device_left;
    if (n_bytes > limit) {
        free_spare();
    }
}

uint64_t state_memory::size() const {
    const std::lock_guard<std::mutex> lock(mutex);
    return n_bytes;
}

}  // namespace mg
