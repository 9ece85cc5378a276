// Which ubatches a device is given kernel by kernel, not as a recorded CUDA graph. Compiled into ggml-base: the context
// knows what it computes, the backend records.
#ifndef LLAMAMG_EAGER_H
#define LLAMAMG_EAGER_H

#include "mg_switch.h"

#ifdef __cplusplus
extern "C" {
#endif

// From now on this thread queues a ubatch of so many tokens, of which n_outputs have logits, where n_full are the most
// that a ubatch of the context has; 0, 0, 0: none.
MG_API void mg_eager_ubatch(int32_t n_tokens, int32_t n_outputs, int32_t n_full);

// Whether what this thread queues is neither recorded nor replayed: 1 for ubatches of a prompt with as many tokens as
// the switch record-rows says, unless they are full. Counted as "eager" ("launched kernel by kernel").
MG_API int32_t mg_eager(void);

#ifdef __cplusplus
}

// Lets a backend know of a ubatch until the end of the block.
struct mg_eager_scope {
    mg_eager_scope(int32_t n_tokens, int32_t n_outputs, int32_t n_full) {
        mg_eager_ubatch(n_tokens, n_outputs, n_full);
    }

    ~mg_eager_scope() {
        mg_eager_ubatch(0, 0, 0);
    }

    mg_eager_scope(const mg_eager_scope &)             = delete;
    mg_eager_scope & operator=(const mg_eager_scope &) = delete;
};
#endif

#endif
