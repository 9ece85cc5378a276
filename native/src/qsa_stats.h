// What native QSA did so far in this process. Compiled into libllama, read through mg_qsa_stats().
#ifndef LLAMAMG_QSA_STATS_H
#define LLAMAMG_QSA_STATS_H

#include <stdint.h>

#include "mg_switch.h"

#ifdef __cplusplus
extern "C" {
#endif

struct qsa_stats {
    uint64_t n_native;     // ubatches computed by the native graph
    uint64_t n_fallback;   // ubatches that upstream's graph computed although the switch was on
    uint64_t n_pooled;     // pooled keys written, per layer: blocks, not rows
    uint64_t n_bytes;      // memory of pooled keys, all contexts that are alive
    uint64_t n_rebuilt;    // pooled keys written because the switch was turned on while sequences lived, per layer
    uint64_t us_rebuilt;   // time of that
    uint64_t n_lean;       // contexts that are alive and keep no raw index keys
    char     reason[256];  // why upstream's graph computed the last ubatch of n_fallback; empty: there was none
};

MG_API void qsa_stats_read(struct qsa_stats * out);

#ifdef __cplusplus
}

#include <atomic>
#include <string>

// Where libllama counts. Threads of several contexts add to it.
struct qsa_totals {
    std::atomic<uint64_t> n_native{ 0 }, n_fallback{ 0 }, n_pooled{ 0 }, n_bytes{ 0 }, n_rebuilt{ 0 }, us_rebuilt{ 0 },
        n_lean{ 0 };
};

extern qsa_totals qsa_total;

void qsa_count_fallback(const std::string & reason);
#endif

#endif
