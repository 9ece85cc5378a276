#include "mg_eager.h"

#include "mg_trace.h"

namespace {

// Tokens of the ubatch that this thread queues, if its shape is one of a prompt's many: decoders and drafts that are
// verified, all of whose tokens have logits, come in the same shape again and again, and so do full ubatches.
thread_local int32_t n_prompt_rows = 0;

}  // namespace

void mg_eager_ubatch(int32_t n_tokens, int32_t n_outputs, int32_t n_full) {
    n_prompt_rows = n_outputs < n_tokens && n_tokens < n_full ? n_tokens : 0;
}

int32_t mg_eager(void) {
    const int32_t least    = mg_switch_value(MG_RECORD_ROWS);
    const bool    is_eager = least > 0 && n_prompt_rows >= least;
    if (is_eager) {
        mg_trace_host(MG_TRACE_EAGER, n_prompt_rows);
    }
    return is_eager;
}
