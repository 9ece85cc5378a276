// For the patched scheduler: when a device is waited for before a part of a graph, where no events say when it is done.
#ifndef LLAMAMG_WAIT_ONCE_H
#define LLAMAMG_WAIT_ONCE_H

#include "mg_switch.h"
#include "mg_trace.h"

// Whether the device of a part may still be computing what came before, so that its inputs must not be written yet.
// `waited` is the part's own, false at first. Since the first wait only copies to other inputs of the part were queued:
// upstream waits for those too, and with them for the device that makes what they copy.
static inline bool mg_must_wait(bool & waited) {
    const bool first = !waited;
    waited           = true;
    if (first || !mg_switch_value(MG_WAIT_ONCE)) {
        return true;
    }
    mg_trace_host(MG_TRACE_UNWAITED, 0);
    return false;
}

#endif
