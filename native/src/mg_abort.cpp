#include "llama.h"
#include "mg.h"

#include <atomic>

namespace {

std::atomic<int32_t> wanted{ 0 };

bool is_wanted(void *) {
    return wanted.load(std::memory_order_relaxed) != 0;
}

}  // namespace

// Native on purpose: ggml asks between nodes, and a Python callback would take the interpreter lock each time.
void mg_abort_install(void * ctx) {
    llama_set_abort_callback((llama_context *) ctx, is_wanted, nullptr);
}

void mg_abort_set(int32_t on) {
    wanted.store(on, std::memory_order_relaxed);
}
