// What native QSA did so far in this process. Compiled into libllama, read through mg_qsa_stats().
#ifndef LLAMAMG_QSA_STATS_H
#define LLAMAMG_QSA_STATS_H

#include <stdint.h>

#include "mg_switch.h"

#ifdef __cplusplus
extern "C" {
#endif

struct qsa_stats {
    uint64_t n_native;    // ubatches computed by the native graph
    uint64_t n_fallback;  // ubatches that upstream's graph computed although the switch was on
    uint64_t n_pooled;    // pooled keys written, per layer: blocks, not rows
    uint64_t n_bytes;     // memory of pooled keys, all contexts that are alive
};

MG_API void qsa_stats_read(struct qsa_stats * out);

#ifdef __cplusplus
}
#endif

#endif
