#include "mg.h"
#include "qsa_stats.h"

void mg_qsa_stats(mg_qsa * out) {
#ifdef MG_NO_SWITCHES
    *out = {};
#else
    qsa_stats stats;
    qsa_stats_read(&stats);
    *out = { stats.n_native, stats.n_fallback, stats.n_pooled, stats.n_bytes };
#endif
}
