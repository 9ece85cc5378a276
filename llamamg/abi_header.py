"""What libllamamg's C ABI looks like: the declarations of native/src/mg.h, as cffi reads them."""

from __future__ import annotations

from typing import Final

from cffi import FFI

ffi: Final = FFI()
ffi.cdef("""
const char * mg_last_error(void);
const char * mg_build_info(void);

int32_t      mg_switch_count(void);
const char * mg_switch_name(int32_t i);
const char * mg_switch_description(int32_t i);
int32_t      mg_switch_default(int32_t i);
int32_t      mg_switch_get(const char * name, int32_t * out);
int32_t      mg_switch_set(const char * name, int32_t value);

struct mg_device {
    const char * name;
    const char * description;
    const char * backend;
    const char * device_id;
    int32_t      type;
    int32_t      is_async;
    int32_t      has_events;
    uint64_t     memory_free;
    uint64_t     memory_total;
};
int32_t mg_device_count(void);
int32_t mg_device_get(int32_t i, struct mg_device * out);

int32_t mg_log_set(int32_t level, const char * path);

int32_t mg_sample_rows(void * ctx, int32_t n, void * const * chains, void * const * grammars,
                       const int32_t * idx, int32_t * out_tokens);
int32_t mg_sample_row_probs(void * ctx, void * chain, void * grammar, int32_t idx, int32_t n_top,
                            int32_t * out_ids, float * out_probs, int32_t * out_token);
int32_t mg_logprobs(void * ctx, int32_t idx, int32_t token, int32_t n_top, int32_t * out_ids,
                    float * out_logprobs, float * out_token_logprob);
int32_t mg_sample_run(void * ctx, void * chain, void * grammar, int32_t idx, const int32_t * draft, int32_t n_draft,
                      int32_t * out_tokens);
int32_t mg_accept_tokens(void * chain, const int32_t * tokens, int32_t n);

void mg_abort_install(void * ctx);
void mg_abort_set(int32_t on);
void mg_fatal_install(void);

int32_t mg_seq_move(void * ctx_src, int32_t seq_src, void * ctx_dst, int32_t seq_dst);
int32_t mg_seq_copy(void * ctx_src, int32_t seq_src, void * ctx_dst, int32_t seq_dst);

struct mg_plane {
    void *   data;
    uint64_t bytes;
    uint64_t n_cells;
    uint32_t n_columns;
    int32_t  device;
    int32_t  type;
};
int32_t mg_cells_planes(void * ctx, int32_t seq, struct mg_plane * out, int32_t n_max);
int32_t mg_cells_find(void * ctx, int32_t seq, int32_t pos, int32_t n, int32_t * out_cells);
int32_t mg_cells_appends(void * ctx, int32_t seq, int32_t pos, int32_t n);
int32_t mg_cells_place(void * ctx, int32_t seq, int32_t pos, int32_t n, const int32_t * tokens, int32_t * out_cells);
int32_t mg_cells_adopt(void * ctx, int32_t seq, int32_t n, const int32_t * tokens);
int32_t mg_cells_empty(void * ctx, int32_t seq);
int32_t mg_cells_copy(void * ctx, int32_t seq, int32_t to_host, int32_t plane, int32_t n_planes, int32_t cell,
                      int32_t n, void * block, int32_t n_rows, int32_t row);
void *  mg_state_save(void * ctx, int32_t seq, uint64_t * n_bytes);
void *  mg_state_load(void * ctx, int32_t seq, const void * state, uint64_t n_bytes);
int32_t mg_state_copy(void * handle, void * state, uint64_t begin, uint64_t end);
void    mg_state_free(void * handle);
int32_t mg_state_detach(void * ctx, void * handle);
int32_t mg_state_put(void * ctx, int32_t seq, void * handle);
void    mg_state_limit(uint64_t n_bytes, uint64_t n_left);
uint64_t mg_state_held(void);
void *  mg_fence_new(void * ctx);
int32_t mg_fence_wait(void * fence);
void    mg_fence_free(void * fence);

struct mg_cuda {
    void * copy_2d;
    void * record;
    void * wait;
};
struct mg_copy {
    void *   target;
    void *   source;
    uint64_t target_pitch;
    uint64_t source_pitch;
    uint64_t width;
    uint64_t height;
};
int32_t mg_copies(const struct mg_cuda * cuda, int32_t to_host, const struct mg_copy * copies, int32_t n,
                  uint64_t n_part_bytes, void * stream, void * const * events, int32_t n_events);

struct mg_qsa {
    uint64_t n_native;
    uint64_t n_fallback;
    uint64_t n_pooled;
    uint64_t n_bytes;
    uint64_t n_rebuilt;
    uint64_t us_rebuilt;
    uint64_t n_lean;
    char reason[256];
};
void mg_qsa_stats(struct mg_qsa * out);
int32_t mg_context_adapt(void * ctx, uint64_t host_free, char * text, size_t n_text);

struct mg_lookup_rule {
    int32_t n_candidates, min_hits, longest, extend, adaptive, n_min;
    float   min_share, p_min;
};
struct mg_lookup_found {
    uint64_t key;
    int32_t  n_matched, n_hits;
    float    share;
};
void *  mg_lookup_new(const int32_t * orders, int32_t n_orders);
void    mg_lookup_free(void * index);
int32_t mg_lookup_follow(void * index, const int32_t * tokens, int32_t n, int32_t all, int32_t n_most);
int32_t mg_lookup_draft(void * index, void * where, int32_t last, const struct mg_lookup_rule * rule, int32_t n_max,
                        int32_t * out, struct mg_lookup_found * found);
int32_t mg_lookup_judge(void * index, uint64_t key, int32_t n_drafted, int32_t n_accepted);
int32_t mg_lookup_size(void * index, uint64_t * n_bytes);
int64_t mg_trace_count(const char * name);
int32_t mg_trace_write(const char * path);
""")
