// C ABI of libllamamg: run-time switches, build info, devices, log sink, sampling, moving and copying sequences, QSA
// counters, lookup. Every function is safe to call from any thread unless said otherwise. No C++ exception leaves the
// library: a function that can fail returns a code, and mg_last_error() says what happened on the calling thread.
#ifndef LLAMAMG_MG_H
#define LLAMAMG_MG_H

#include <stddef.h>
#include <stdint.h>

#include "mg_switch.h"
#include "mg_trace.h"

#ifdef __cplusplus
extern "C" {
#endif

// Sentence about the last failure on this thread; empty if there was none. Valid until the next call that fails here.
MG_API const char * mg_last_error(void);

// BUILD_INFO.json as it was when the library was compiled.
MG_API const char * mg_build_info(void);

// ---- devices -------------------------------------------------------------------------------------------------------

struct mg_device {
    const char * name;          // "CUDA0", "CPU", "RPC0[host:port]"
    const char * description;   // marketing name
    const char * backend;       // registry the device came from
    const char * device_id;     // PCI address, "" when there is none
    int32_t      type;          // enum ggml_backend_dev_type
    int32_t      is_async;      // 1: computes asynchronously
    int32_t      has_events;    // 1: has events (with async: pipeline parallelism is possible)
    uint64_t     memory_free;   // bytes
    uint64_t     memory_total;  // bytes
};

MG_API int32_t mg_device_count(void);
// 0, or -1 when i is out of range. Strings live as long as the process.
MG_API int32_t mg_device_get(int32_t i, struct mg_device * out);

// ---- log -----------------------------------------------------------------------------------------------------------

// Send llama.cpp's log at or above level (1 debug, 2 info, 3 warn, 4 error, 5 nothing) to a file (appended), or to
// stderr when path is NULL. Native, so no interpreter lock is taken for a log line. -1: the file cannot be opened.
MG_API int32_t mg_log_set(int32_t level, const char * path);

// ---- sampling ------------------------------------------------------------------------------------------------------
// ctx is a llama_context*, chains and grammars are llama_sampler*, idx counts rows as llama_get_logits_ith does.
// A NULL chain means greedy: highest logit, lowest id on a tie. A NULL grammar means none.
// Order with a grammar: sample freely, test that one token, and only if it is rejected mask all candidates and sample
// again. The chosen token is accepted by grammar and chain. A sampler must not be used by two threads at once.

// Sample n rows. out_tokens[i] is the token, or -1 for a row that failed. Returns how many rows failed.
MG_API int32_t mg_sample_rows(void * ctx, int32_t n, void * const * chains, void * const * grammars,
                              const int32_t * idx, int32_t * out_tokens);

// Sample one row and report the candidates the chain left: ids and probabilities, most probable first, at most n_top.
// Returns how many candidates were written, or -1.
MG_API int32_t mg_sample_row_probs(void * ctx, void * chain, void * grammar, int32_t idx, int32_t n_top,
                                   int32_t * out_ids, float * out_probs, int32_t * out_token);

// Log-softmax over the raw logits of one row: the n_top best (ties: lowest id first) and the value of token
// (token -1: out_token_logprob is not touched). Returns how many were written, or -1.
MG_API int32_t mg_logprobs(void * ctx, int32_t idx, int32_t token, int32_t n_top, int32_t * out_ids,
                           float * out_logprobs, float * out_token_logprob);

// Sample rows idx, idx + 1, … of one sequence, of which all but the first were computed behind draft[0], draft[1], …,
// and stop behind the first token that is not the drafted one. Each token is chosen as it would be without a draft, and
// accepted once. Returns how many tokens were written, at most n_draft + 1; the last one is -1 when its row failed.
MG_API int32_t mg_sample_run(void * ctx, void * chain, void * grammar, int32_t idx, const int32_t * draft,
                             int32_t n_draft, int32_t * out_tokens);

// Show n tokens of the prompt to a chain that looks back (penalties, DRY). 0, or -1.
MG_API int32_t mg_accept_tokens(void * chain, const int32_t * tokens, int32_t n);

// ---- abort ---------------------------------------------------------------------------------------------------------

// Make decodes of this context end early (llama_decode returns 2) while the flag is set. The flag is the process's.
MG_API void mg_abort_install(void * ctx);
MG_API void mg_abort_set(int32_t on);

// Where ggml ends the process because an rpc-server is gone, say that in a sentence and exit with status 1, without a
// backtrace and a core. Everything else that ggml gives up at is said as ggml says it.
MG_API void mg_fatal_install(void);

// ---- moving a sequence ---------------------------------------------------------------------------------------------

enum mg_move_result {
    MG_MOVE_OK      = 0,
    MG_MOVE_INVALID = -1,  // bad arguments, or nothing that could be moved
    MG_MOVE_MODEL   = -2,  // the contexts are of different models
    MG_MOVE_EMPTY   = -3,  // the source sequence holds no tokens
    MG_MOVE_BUSY    = -4,  // the destination sequence holds tokens
    MG_MOVE_ROOM    = -5,  // the destination has no room, or cannot take the data
    MG_MOVE_CACHE   = -6,  // the contexts keep their caches differently
};

// Give a sequence of one llama_context to another one of the same model, whole: KV cells, index keys, pooled keys of
// native QSA, recurrent states with those to roll back to. The data goes from buffer to buffer, over the host only
// where two devices cannot copy to each other; no device memory is taken. Waits for both contexts first and for the
// copies at the end. While it runs no other thread may use either context; any other context may decode.
// The contexts may differ in n_ctx, n_seq_max, n_batch, n_ubatch, n_rs_seq. On failure (mg_move_result) both are as
// before. mg_seq_move leaves the source sequence empty, and is the faster one; mg_seq_copy keeps it.
MG_API int32_t mg_seq_move(void * ctx_src, int32_t seq_src, void * ctx_dst, int32_t seq_dst);
MG_API int32_t mg_seq_copy(void * ctx_src, int32_t seq_src, void * ctx_dst, int32_t seq_dst);

// ---- rows of a sequence --------------------------------------------------------------------------------------------
// What a sequence keeps in its context, for copies that run beside decodes of other sequences. A plane is the keys, the
// values or the index keys of one layer; a cell holds one token in every plane. What grows with the tokens is copied by
// cells, what does not (recurrent states, sliding windows) as a state of a few pieces.
// Functions with a ctx and no `any thread` are for the thread that decodes it. Copies may run on any thread, several at
// once, while the context computes other sequences; cells being copied must neither be freed, nor decoded before the
// copy is done. Not in an unpatched build.

struct mg_plane {
    void *   data;       // of cell 0, on the device
    uint64_t bytes;      // of a cell; of an element of a cell where it is transposed
    uint64_t n_cells;    // all of the stream
    uint32_t n_columns;  // 1, or transposed: so many runs of n_cells elements
    int32_t  device;     // as mg_device_get counts; -1: host memory, data can be read as it is
    int32_t  type;       // enum ggml_type
};

// How many planes sequence seq has; the first n_max are written. They stay where they are as long as the context lives.
// -1: this memory cannot be copied by rows.
MG_API int32_t mg_cells_planes(void * ctx, int32_t seq, struct mg_plane * out, int32_t n_max);
// The cells of positions pos to pos + n - 1. 0, or -1 when the sequence does not have them all.
MG_API int32_t mg_cells_find(void * ctx, int32_t seq, int32_t pos, int32_t n, int32_t * out_cells);
// 1: mg_cells_place would give cells pos to pos + n - 1, and any thread may call it as long as nobody else uses the
// sequence, the context computing others. 0: neither.
MG_API int32_t mg_cells_appends(void * ctx, int32_t seq, int32_t pos, int32_t n);
// Give the sequence, which ends at pos - 1, cells for n more tokens; what they hold is to be copied in. 0, or -1: no
// room.
MG_API int32_t mg_cells_place(void * ctx, int32_t seq, int32_t pos, int32_t n, const int32_t * tokens,
                              int32_t * out_cells);
// As mg_cells_place(ctx, seq, 0, ...) for as many of n tokens as can be given cells at once, where mg_cells_appends
// says 1: how many, perhaps 0, or -1.
MG_API int32_t mg_cells_adopt(void * ctx, int32_t seq, int32_t n, const int32_t * tokens);
// Take the cells from a long sequence, faster than llama_memory_seq_rm, which must follow for all else that it has.
// Does nothing where that cannot be. How many caches were emptied, or -1.
MG_API int32_t mg_cells_empty(void * ctx, int32_t seq);
// Any thread. Copy n neighbouring cells from `cell` on to the host, or from there. A block on the host has room for
// n_rows cells; its planes follow each other, each n_rows * bytes * n_columns long, and as on the device inside.
// `block` is the address of plane 0 of the block, `row` the cell's place in it. Only planes [plane, plane + n_planes)
// are copied.
MG_API int32_t mg_cells_copy(void * ctx, int32_t seq, int32_t to_host, int32_t plane, int32_t n_planes, int32_t cell,
                             int32_t n, void * block, int32_t n_rows, int32_t row);

// What llama_state_seq_get_data_ext(flags 1) would write of a sequence, piece by piece: n_bytes in all. NULL on an
// error.
MG_API void * mg_state_save(void * ctx, int32_t seq, uint64_t * n_bytes);
// Put such a state into a sequence whose cells are there. The data follows by mg_state_copy. NULL: refused, and then
// the sequence must be removed.
MG_API void * mg_state_load(void * ctx, int32_t seq, const void * state, uint64_t n_bytes);
// Any thread. Copy the bytes [begin, end) of the state from the device to `state`, or for mg_state_load from there.
MG_API int32_t mg_state_copy(void * handle, void * state, uint64_t begin, uint64_t end);
// Any thread, once nobody copies any more.
MG_API void mg_state_free(void * handle);

// The rows of a state may be swapped by the next batch, so what is not copied by then needs memory of its own on the
// devices where it lies. For mg_state_save: the state is copied there, queued behind what ctx has to compute. For
// mg_state_load: mg_state_copy fills that memory, and mg_state_put brings it into a sequence.
// 0; 1: no room within the limit, and nothing is done; -1.
MG_API int32_t mg_state_detach(void * ctx, void * handle);
// Put a detached state, as often as wanted, into a sequence of this or another context of the model whose cells are
// there. 0, or -1: refused, and then the sequence must be removed.
MG_API int32_t mg_state_put(void * ctx, int32_t seq, void * handle);
// Bytes that detached states of this process may take, over all devices (0 at first), and bytes they leave on each.
MG_API void mg_state_limit(uint64_t n_bytes, uint64_t n_left);
// Bytes they have, with what is kept for the next ones.
MG_API uint64_t mg_state_held(void);

// A mark behind all that ctx has been given to compute: rows and states copied after mg_fence_wait are those that it
// computes. NULL on an error.
MG_API void * mg_fence_new(void * ctx);
// Any thread.
MG_API int32_t mg_fence_wait(void * fence);
MG_API void    mg_fence_free(void * fence);

// The driver's functions of one process, by address: cuMemcpy2DAsync_v2, cuEventRecord and cuEventSynchronize.
struct mg_cuda {
    void * copy_2d;
    void * record;
    void * wait;
};

// `height` rows of `width` bytes; from one row to the next it is so many bytes.
struct mg_copy {
    void *   target;
    void *   source;
    uint64_t target_pitch;
    uint64_t source_pitch;
    uint64_t width;
    uint64_t height;
};

// Any thread on which the device of `stream` is the current one. Copy between it and page-locked memory, and wait for
// that: n_events parts of about n_part_bytes are on their way at once, since copies of a decode queue up behind them.
// 0; the driver's error, and then all that was begun is over or will never be; -1.
MG_API int32_t mg_copies(const struct mg_cuda * cuda, int32_t to_host, const struct mg_copy * copies, int32_t n,
                         uint64_t n_part_bytes, void * stream, void * const * events, int32_t n_events);

// ---- native QSA ----------------------------------------------------------------------------------------------------

struct mg_qsa {
    uint64_t n_native;     // ubatches computed by the native graph
    uint64_t n_fallback;   // ubatches that upstream's graph computed although the switch qsa was on
    uint64_t n_pooled;     // blocks whose pooled key was written, once per layer
    uint64_t n_bytes;      // memory of pooled keys
    uint64_t n_rebuilt;    // those of n_pooled that were written when the switch was turned on
    uint64_t us_rebuilt;   // microseconds that took
    uint64_t n_lean;       // contexts that are alive and keep no raw index keys (switch qsa-drop-raw)
    char     reason[256];  // why upstream's graph computed the last of n_fallback; "": there was none
};

// Totals of this process; zeros in an unpatched build.
MG_API void mg_qsa_stats(struct mg_qsa * out);

// Switches were turned while the context is idle: make it ready for their new values. With qsa on, pooled keys are
// allocated and those of living sequences computed; either way compute buffers for the graph from now on are reserved
// if they fit. host_free: bytes of main memory that may be used; other devices are asked.
// 0: text says what was done, "" if nothing. -1: text says why not, with the MiB that are missing: then turn the
// switches back and call this again.
MG_API int32_t mg_context_adapt(void * ctx, uint64_t host_free, char * text, size_t n_text);
// ---- trace ---------------------------------------------------------------------------------------------------------

// mg_trace_write and mg_trace_count, see mg_trace.h. An unpatched build has no stamps and counts nothing.

// ---- lookup --------------------------------------------------------------------------------------------------------
// An index of one sequence's tokens, for drafts of what may follow. Not safe for two threads at once.

struct mg_lookup_rule {
    int32_t n_candidates;  // earlier occurrences that vote, the latest ones, 1 to 64
    int32_t min_hits;      // occurrences there must be at least
    int32_t longest;       // 1: only those that match farthest back vote
    int32_t extend;        // 1: when a text ends, look for another one behind what is drafted
    int32_t adaptive;      // 1: what a key drafts depends on how much of its last draft was accepted
    int32_t n_min;         // shorter drafts are dropped
    float   min_share;     // of the votes, that a drafted token needs
    float   p_min;         // least product of the shares
};

struct mg_lookup_found {
    uint64_t key;        // for mg_lookup_judge
    int32_t  n_matched;  // n of the n-gram that was found, 0: none
    int32_t  n_hits;     // occurrences that voted
    float    share;      // product of the shares of the drafted tokens
};

// An index of n-grams of the given lengths, the longest one is looked up first; NULL on an error.
MG_API void * mg_lookup_new(const int32_t * orders, int32_t n_orders);
MG_API void   mg_lookup_free(void * index);

// Make the index hold exactly tokens[0, n). Tokens it holds already are compared at their end only, or with `all` every
// one of them, and what differs is replaced. At most n_most tokens are added in one call: call again until fewer were,
// it holds their beginning meanwhile. Returns how many tokens were added, or -1.
MG_API int32_t mg_lookup_follow(void * index, const int32_t * tokens, int32_t n, int32_t all, int32_t n_most);

// Draft at most n_max tokens that may follow the index's tokens and `last`, from the index `where` (NULL: the same).
// Returns how many were written, or -1.
MG_API int32_t mg_lookup_draft(void * index, void * where, int32_t last, const struct mg_lookup_rule * rule,
                               int32_t n_max, int32_t * out, struct mg_lookup_found * found);

// Tell what became of a draft, for rules with `adaptive`. 0, or -1.
MG_API int32_t mg_lookup_judge(void * index, uint64_t key, int32_t n_drafted, int32_t n_accepted);

// Tokens held, and the memory they take.
MG_API int32_t mg_lookup_size(void * index, uint64_t * n_bytes);

#ifdef __cplusplus
}
#endif

#endif
