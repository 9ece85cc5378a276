// Pooled index keys of one context, and what of them is valid. Compiled into libllama; owned by
// llama_memory_hybrid_idx.
//
// Native QSA needs cell == position in every stream of a ubatch. Per stream this keeps W, a length of cells from 0 on
// known to hold exactly the tokens at those positions of one sequence, and P, the number of blocks whose pooled key is
// valid (P*r <= W after every check). Work per ubatch is O(tokens); a scan of cells happens once after an edit that a
// number cannot describe. Pooled keys are a function of the raw keys in the index cache, so they are never saved:
// whatever changes cells lowers P, and the next native ubatch pools again from there.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "ggml-cpp.h"
#include "llama.h"

class llama_io_read_i;
class llama_io_write_i;
class llama_kv_cache;
struct llama_model;
struct llama_ubatch;

class qsa_memory {
public:
    // The caches must outlive this. Allocates at once if the switch is on, else when it is first seen on.
    qsa_memory(const llama_model & model, const llama_kv_cache & attn, const llama_kv_cache & idx, bool v_trans,
               bool offload);
    ~qsa_memory();

    // Is the native graph to be used where the cache layout allows it? Reads the switch; allocates on first need.
    bool wanted();

    // The cells hold the ubatch now: can the native graph compute it? Fixes ranges() until the next call.
    bool begin(const llama_ubatch & ubatch, uint32_t n_stream);

    // ---- without raw keys (qsa_lean.cpp): a ring holds those of the last positions, in F32; states carry pooled keys

    // What a graph without raw keys is given for a ubatch, for n_slot blocks: those that become complete, and padding.
    struct lean_inputs {
        std::vector<int64_t> cells;   // [T] row of the ring of each token
        std::vector<int32_t> gather;  // [r * n_slot] rows of the ring of each block
        std::vector<int32_t> pos;     // [4 * n_slot] position of its first token in all sections
        std::vector<int64_t> rows;    // [n_slot] row of the pooled storage; the last one takes the padding
    };
    static constexpr int64_t n_ring = 4096;  // rows of a stream; more than a ubatch and what is rolled back

    // Are raw keys dropped in a context made now? Then index_layers() leaves the index cache without layers.
    static bool                         drops_raw(const llama_model & model);
    static std::function<bool(int32_t)> index_layers(const llama_model & model, std::function<bool(int32_t)> filter);
    bool                                is_lean() const {
        return lean;
    }
    int64_t n_slot(int64_t n_tokens, int64_t n_stream) const {
        return n_tokens / r + n_stream;
    }
    const lean_inputs & inputs() const {
        return lean_in;
    }
    ggml_tensor * ring(int32_t il) const {
        return rings.at(il);
    }
    // The sequence is copied with its cells: keys follow at copy_pending(), when the device is idle.
    void copy(llama_seq_id from, llama_seq_id to);
    void copy_pending();
    void state_write(llama_io_write_i & io, llama_seq_id seq, bool partial) const;
    void state_read(llama_io_read_i & io, llama_seq_id seq, bool partial);

    // {stream, lo, hi, 0} per stream of the ubatch: the blocks that POOL has to write.
    const std::vector<int32_t> & ranges() const {
        return range;
    }

    // The graph that writes ranges() is about to run / the ubatch succeeded.
    void submit() {
        submitted = true;
    }
    void commit();

    // Every key that is missing in all streams goes to ranges(); returns how many per layer. adopt() takes them as
    // written. For a switch that was turned on while sequences live.
    int64_t collect(uint32_t n_seq);
    void    adopt(int64_t us);

    // Are the compute buffers those for the switch's value?
    bool is_reserved() const;
    bool is_return() const;  // they were, before something else was tried
    void set_reserved(bool done);
    // Why this context computes as upstream although the switch is on; empty if it does not. Forgets a lack of memory.
    std::string take_reason();

    // Sequence edits. forget() distrusts everything about the stream of seq (all streams if seq < 0).
    void clear();
    void remove(llama_seq_id seq, llama_pos p0);
    void forget(llama_seq_id seq);

    // Another context's sequence has just been copied into seq_to here: take its pooled keys over with copy(source,
    // offset, destination, offset, bytes). What is valid of them is counted at the next ubatch.
    using copy_bytes = std::function<void(ggml_tensor *, size_t, ggml_tensor *, size_t, size_t)>;
    void take_over(const qsa_memory & from, llama_seq_id seq_from, llama_seq_id seq_to, const copy_bytes & copy);

    int32_t ratio() const {
        return r;
    }
    int32_t n_top() const {
        return ntop;
    }
    int32_t kv_size() const {
        return n_cell;
    }
    ggml_tensor * pooled(int32_t il) const {
        return layers.at(il);
    }
    // The storage of all pooled keys as SELECT reads it; written: a result that writes to it, or the storage itself.
    ggml_tensor *          keys(ggml_context * ctx, int32_t il, ggml_tensor * written = nullptr) const;
    const llama_kv_cache & index_cache() const {
        return idx;
    }
    std::vector<uint32_t> layer_ids() const;

    std::map<ggml_backend_buffer_type_t, size_t> memory_breakdown() const;

private:
    struct stream_state {
        llama_seq_id owner    = -1;
        int64_t      n_same   = 0;      // W
        int64_t      n_pooled = 0;      // P
        bool         unknown  = false;  // n_same must be counted anew
        // without raw keys: the first position whose raw key the ring holds, and those that a state brought back
        int64_t raw_from = 0, saved_from = -1, saved_to = -1;
    };

    std::string obstacle() const;  // what about the model or the context's options does not fit; empty if all does
    std::string device_obstacle() const;
    std::string allocate();
    std::string lean_obstacle(uint32_t stream, const llama_ubatch & ubatch) const;
    void        fill_inputs(const llama_ubatch & ubatch);
    void        lean_remove(stream_state & state, int64_t p0) const;
    void        release();
    void        recount(stream_state & state, llama_seq_id seq) const;
    void        follow(const llama_ubatch & ubatch, std::vector<uint32_t> & touched);
    void        fall_back(const char * reason);

    const llama_model &         model;
    const llama_kv_cache &      attn;
    const llama_kv_cache &      idx;
    const bool                  v_trans;
    const bool                  offload;
    const bool                  lean;
    const std::vector<uint32_t> ids;  // layers with an index

    int32_t     r      = 0;
    int32_t     ntop   = 0;
    int32_t     n_cell = 0;
    std::string reason;  // why this context cannot run natively; empty if it can

    std::vector<std::pair<ggml_context_ptr, ggml_backend_buffer_ptr>> buffers;
    std::map<int32_t, ggml_tensor *>                                  layers, rings;
    lean_inputs                                                       lean_in;
    std::vector<std::pair<uint32_t, uint32_t>>                        pending;  // streams to copy from, to

    std::vector<stream_state> streams;
    std::vector<int32_t>      range;
    bool                      submitted = false;
    bool                      said      = false;
    int32_t                   reserved  = 0;      // value of the switch that compute buffers were reserved for
    bool                      is_valid  = false;  // and they are still there
    bool                      is_short  = false;  // the reason is a lack of memory
};
