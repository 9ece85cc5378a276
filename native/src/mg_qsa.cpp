#include "mg.h"

#ifndef MG_NO_SWITCHES
#include "qsa_adapt.h"
#include "qsa_stats.h"
#endif

#include <cstring>

void mg_qsa_stats(mg_qsa * out) {
    *out = {};
#ifndef MG_NO_SWITCHES
    static_assert(sizeof(mg_qsa) == sizeof(qsa_stats), "one is copied to the other");
    qsa_stats stats;
    qsa_stats_read(&stats);
    std::memcpy(out, &stats, sizeof(stats));
#endif
}

int32_t mg_context_adapt([[maybe_unused]] void * ctx, [[maybe_unused]] uint64_t host_free, char * text, size_t n_text) {
#ifdef MG_NO_SWITCHES
    if (n_text > 0) {
        text[0] = '\0';
    }
    return 0;
#else
    return qsa_adapt(ctx, host_free, text, n_text);
#endif
}
