// Memory on the devices for states that are kept there.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "ggml-backend.h"
#include "mg_fence.h"

namespace mg {

using fences = std::vector<std::shared_ptr<const fence>>;

// What is given back stays for the next state of about its size: a device stops for taking memory and for freeing it.
class state_memory {
public:
    struct piece {
        ggml_backend_buffer_t buffer = nullptr;
        fences                busy;  // behind these nobody reads or writes it any more
    };

    // Never destroyed: a device's driver may be gone by the end of the process.
    static state_memory & all();

    // Nothing where it would be more than the limit, or leave the device too little.
    std::optional<piece> take(ggml_backend_buffer_type_t buft, size_t size);
    void                 give(piece p);

    void     set_limit(uint64_t n_bytes_max, uint64_t n_device_left);
    uint64_t size() const;

private:
    void free_spare();

    mutable std::mutex mutex;
    std::vector<piece> spare;
    uint64_t           limit   = 0;  // bytes, spare ones included
    uint64_t           n_left  = 0;  // bytes that stay free on each device
    uint64_t           n_bytes = 0;
};

}  // namespace mg
