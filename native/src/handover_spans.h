// Streams that stand in for a saved state: they keep its small host data and note which device bytes it consists of.
#pragma once

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <vector>

#include "ggml-backend-impl.h"
#include "ggml.h"
#include "llama-io.h"

namespace handover {

struct span {
    ggml_tensor * tensor;
    size_t        offset;
    size_t        size;
};

struct span_copy {
    span from;
    span to;  // as long as from
};

inline ggml_backend_buffer_t buffer_of(const ggml_tensor * t) {
    return t->view_src ? t->view_src->buffer : t->buffer;
}

// A state writer that copies no tensor.
class span_sink : public llama_io_write_i {
public:
    void write(const void * src, size_t size) override {
        const auto * bytes = static_cast<const uint8_t *>(src);
        host.insert(host.end(), bytes, bytes + size);
    }

    void write_tensor(ggml_tensor * tensor, size_t offset, size_t size) override {
        if (size > 0) {
            spans.push_back({ tensor, offset, size });
            n_device += size;
        }
    }

    size_t n_bytes() override {
        return host.size() + n_device;
    }

    std::vector<uint8_t> host;
    std::vector<span>    spans;
    size_t               n_device = 0;
};

// A state reader over what a sink holds. Both sides enumerate the same bytes in the same order, cut differently where
// the cells of one side are fragmented.
class span_source : public llama_io_read_i {
public:
    explicit span_source(const span_sink & sink) : sink(sink) {}

    void read(void * dst, size_t size) override {
        if (size > sink.host.size() - i_host) {
            throw std::runtime_error("the caches describe their state differently");
        }
        std::memcpy(dst, sink.host.data() + i_host, size);
        i_host += size;
    }

    void read_tensor(ggml_tensor * tensor, size_t offset, size_t size) override {
        n_device += size;
        while (size > 0) {
            if (i_span == sink.spans.size()) {
                throw std::runtime_error("the destination wants more data than the source has");
            }
            const span & from = sink.spans[i_span];
            const size_t n    = std::min(size, from.size - i_byte);
            copies.push_back({ { from.tensor, from.offset + i_byte, n }, { tensor, offset, n } });
            offset += n;
            size -= n;
            i_byte += n;
            if (i_byte == from.size) {
                i_byte = 0;
                ++i_span;
            }
        }
    }

    void discard() override {
        copies.clear();
    }

    size_t n_bytes() override {
        return i_host + n_device;
    }

    bool exhausted() const {
        return i_host == sink.host.size() && i_span == sink.spans.size();
    }

    std::vector<span_copy> copies;

private:
    const span_sink & sink;
    size_t            i_host = 0, i_span = 0, i_byte = 0, n_device = 0;
};

}  // namespace handover
