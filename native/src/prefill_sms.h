// Kernels of some contexts on a part of a CUDA device: contexts created while the switch prefill-stream is 1 compute on
// at most as many SMs (streaming multiprocessors) as the switch prefill-sms says, so that the others are free at once
// for a context that decodes. Needs CUDA 12.5 when built and in the driver; without, the switches do nothing.
#ifndef LLAMAMG_PREFILL_SMS_H
#define LLAMAMG_PREFILL_SMS_H

struct ggml_backend_cuda_context;
struct ggml_cuda_device_info;

namespace prefill_sms {

#if !defined(GGML_USE_HIP) && !defined(GGML_USE_MUSA) && CUDART_VERSION >= 12050

// After a backend context is made, and before it is deleted.
void added(ggml_backend_cuda_context & ctx);
void removed(ggml_backend_cuda_context & ctx);

// Lives while one graph of the context is queued: puts the right stream in the place of the context's first one. What
// is queued later, in the order of the calls, comes after it, whatever stream is the right one then.
class queuing {
public:
    explicit queuing(ggml_backend_cuda_context & ctx);
    ~queuing();
    queuing(const queuing &)             = delete;
    queuing & operator=(const queuing &) = delete;
};

// What is said about the devices while such a graph is queued by this thread (fewer SMs: grids are cut to fit them),
// else nullptr.
const ggml_cuda_device_info * info();

#else

inline void added(ggml_backend_cuda_context &) {}
inline void removed(ggml_backend_cuda_context &) {}

struct queuing {
    explicit queuing(ggml_backend_cuda_context &) {}
    ~queuing() {}
};

inline const ggml_cuda_device_info * info() {
    return nullptr;
}

#endif

}  // namespace prefill_sms

#endif
