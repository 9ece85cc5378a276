#include <memory>
#include <stdexcept>

#include "mg.h"
#include "mg_error.h"
#ifndef MG_NO_SWITCHES
#include "mg_fence.h"
#endif

void * mg_fence_new(void * ctx) {
    return mg::guarded("mg_fence_new", (void *) nullptr, [&]() -> void * {
#ifndef MG_NO_SWITCHES
        return std::make_unique<mg::fence>(static_cast<llama_context *>(ctx)).release();
#else
        (void) ctx;
        throw std::runtime_error("an unpatched build has none");
#endif
    });
}

int32_t mg_fence_wait(void * fence) {
    return mg::guarded("mg_fence_wait", (int32_t) -1, [&]() -> int32_t {
#ifndef MG_NO_SWITCHES
        static_cast<const mg::fence *>(fence)->wait();
#else
        (void) fence;
#endif
        return 0;
    });
}

void mg_fence_free(void * fence) {
#ifndef MG_NO_SWITCHES
    delete static_cast<mg::fence *>(fence);
#else
    (void) fence;
#endif
}
