// Time stamps of what the host and the devices do, for finding out what waits for what. Compiled into ggml-base; the
// patched scheduler and the patched context call it. While the switch trace is 0 it only counts.
#ifndef LLAMAMG_TRACE_H
#define LLAMAMG_TRACE_H

#include "mg_switch.h"

#ifdef __cplusplus
extern "C" {
#endif

struct ggml_backend;

enum mg_trace_what {
    MG_TRACE_UBATCH,     // host: a ubatch begins; id: its tokens
    MG_TRACE_REUSED,     // host: its graph is the previous one
    MG_TRACE_REBUILT,    // host: its graph could be the previous one, but is built anew so that no device is waited for
    MG_TRACE_SPARED,     // host: its graph is kept though another one computed since; id: number of its set
    MG_TRACE_BUILT,      // host: its graph is built
    MG_TRACE_KEPT,       // host: a layer without rows is laid out as one with rows, as it was reserved
    MG_TRACE_LIMITED,    // host: a graph is queued on a part of a CUDA device; id: its SMs
    MG_TRACE_REALLOC,    // host: the graph does not fit the reserved layout: every device is waited for
    MG_TRACE_ALLOCATED,  // host: its graph is split and allocated
    MG_TRACE_INPUTS,     // host: its inputs are written
    MG_TRACE_SPLIT,      // host: a split begins; id: number of the split
    MG_TRACE_COPIED,     // host: the split's inputs are copied or queued; id: how many
    MG_TRACE_SUBMITTED,  // host: the split's kernels are queued
    MG_TRACE_BEGIN,      // device: its queue has reached the split
    MG_TRACE_END,        // device: its queue is past the split
    MG_TRACE_TILED,  // host: the tile of a product with experts is narrower than the ubatch; id: rows it is made for
    MG_TRACE_EAGER,  // host: a CUDA device is given a graph kernel by kernel, by record-rows; id: tokens of the ubatch
    MG_TRACE_DRAINED,   // host: every device was waited for, as the graph to be reused may still have been read
    MG_TRACE_UNWAITED,  // host: an input is copied without another wait for its device, by wait-once
    MG_TRACE_FIXUP,     // host: the parts of a split product are added up as quick-fixup does; id: its tiles
    MG_TRACE_COUNT
};

// Count, and note the time of the host.
MG_API void mg_trace_host(enum mg_trace_what what, int32_t id);

// Note the time at which the queue of this backend gets to here. Nothing for a backend without events.
MG_API void mg_trace_device(enum mg_trace_what what, int32_t id, struct ggml_backend * backend);

// How often a moment of the host came in this process, by its name ("ubatch", "reused", ...); -1: no such name.
MG_API int64_t mg_trace_count(const char * name);

// Write what was noted as JSON, [[microseconds, "what", id, "device"], ...] in order of time, and forget it. Waits for
// the devices to get there. Returns how many stamps were written, -1 when the file cannot be written.
MG_API int32_t mg_trace_write(const char * path);

#ifdef __cplusplus
}
#endif

#endif
