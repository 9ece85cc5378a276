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
// 0: text is a sentence about what was done, empty if nothing had to be. -1: text says why not; call again with the
// switch as it was.
MG_API int32_t qsa_adapt(void * ctx, uint64_t host_free, char * text, size_t n_text);

#ifdef __cplusplus
}
#endif

#endif
