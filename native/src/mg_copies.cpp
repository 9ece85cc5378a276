// Many copies between a CUDA device and page-locked memory in one call, of which only a little is on its way at once.
// The driver's functions come from the caller: this library is linked to no CUDA.
#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "mg.h"
#include "mg_error.h"

namespace {

// CUDA_MEMCPY2D of the driver API.
struct place {
    size_t       x      = 0;
    size_t       y      = 0;
    unsigned int type   = 0;  // CUmemorytype
    const void * host   = nullptr;
    uint64_t     device = 0;
    void *       array  = nullptr;
    size_t       pitch  = 0;

    place(bool is_host, void * address, uint64_t pitch) : type(is_host ? 1 : 2), pitch(pitch) {
        if (is_host) {
            host = address;
        } else {
            device = reinterpret_cast<uint64_t>(address);
        }
    }
};

struct copy_2d {
    place  from;
    place  to;
    size_t width;
    size_t height;
};

static_assert(sizeof(void *) != 8 || sizeof(copy_2d) == 128, "the driver's structure has 128 bytes");

using copy_fn   = int (*)(const copy_2d *, void * stream);
using record_fn = int (*)(void * event, void * stream);
using wait_fn   = int (*)(void * event);

}  // namespace

int32_t mg_copies(const struct mg_cuda * cuda, int32_t to_host, const struct mg_copy * copies, int32_t n,
                  uint64_t n_part_bytes, void * stream, void * const * events, int32_t n_events) {
    return mg::guarded("mg_copies", (int32_t) -1, [&]() -> int32_t {
        const auto copy   = reinterpret_cast<copy_fn>(cuda->copy_2d);
        const auto record = reinterpret_cast<record_fn>(cuda->record);
        const auto wait   = reinterpret_cast<wait_fn>(cuda->wait);
        int32_t    error = 0, n_begun = 0, n_over = 0;  // parts
        const auto await = [&](int32_t n_left) {
            for (; n_begun - n_over > n_left; ++n_over) {
                const int32_t code = wait(events[n_over % n_events]);
                error              = error ? error : code;
            }
        };
        uint64_t n_bytes = 0;  // of the part that is being begun
        for (int32_t i = 0; i < n && !error; ++i) {
            if (n_bytes == 0) {
                await(n_events - 1);
            }
            const mg_copy & c    = copies[i];
            const copy_2d   what = { place(to_host == 0, c.source, c.source_pitch),
                                     place(to_host != 0, c.target, c.target_pitch), c.width, c.height };
            error                = error ? error : copy(&what, stream);
            n_bytes += c.width * c.height;
            if (n_bytes >= n_part_bytes || i + 1 == n || error) {
                // After an error too: what was begun must not be written behind the caller's back.
                const int32_t code = record(events[n_begun % n_events], stream);
                error              = error ? error : code;
                ++n_begun;
                n_bytes = 0;
            }
        }
        await(0);
        return error;
    });
}
