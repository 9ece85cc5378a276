// What a context does when the switch `qsa` was turned while it lives. Compiled into libllama, called by libllamamg.
#ifndef LLAMAMG_QSA_ADAPT_H
#define LLAMAMG_QSA_ADAPT_H

#include <stddef.h>
#include <stdint.h>

#include "mg_switch.h"

#ifdef __cplusplus
extern "C" {
#endif

// ctx is an idle llama_context*. On: pools the keys of all sequences that live. Both: reserves the compute buffers of
// the graph that is used from now on, once it is known that they fit; host_free is what main memory has left.
// 0, or -1 with a sentence in error; the buffers are then those of before.
MG_API int32_t qsa_adapt(void * ctx, uint64_t host_free, char * error, size_t n_error);

#ifdef __cplusplus
}
#endif

#endif
