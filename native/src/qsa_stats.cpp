#include "qsa_stats.h"

#include <cstdio>
#include <mutex>

qsa_totals qsa_total;

namespace {
std::mutex  mutex;
std::string last_reason;
}  // namespace

void qsa_count_fallback(const std::string & reason) {
    ++qsa_total.n_fallback;
    const std::lock_guard<std::mutex> lock(mutex);
    last_reason = reason;
}

void qsa_stats_read(qsa_stats * out) {
    const qsa_totals & t = qsa_total;
    *out                 = { t.n_native, t.n_fallback, t.n_pooled, t.n_bytes, t.n_rebuilt, t.us_rebuilt, t.n_lean, "" };
    const std::lock_guard<std::mutex> lock(mutex);
    std::snprintf(out->reason, sizeof(out->reason), "%s", last_reason.c_str());
}
