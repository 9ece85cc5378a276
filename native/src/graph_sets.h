// Graphs that a context keeps beside its own, each with a scheduler and compute buffers that hold small ubatches only.
// Included by llama-context.h, compiled into libllama.
#ifndef LLAMAMG_GRAPH_SETS_H
#define LLAMAMG_GRAPH_SETS_H

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "ggml-cpp.h"
#include "llama-graph.h"

struct llama_context;

// What is replaced together: the graph that is allocated in the buffers of one scheduler.
struct graph_set {
    ggml_backend_sched_ptr              sched;
    std::array<llm_graph_result_ptr, 2> results;
    llm_graph_result *                  active = nullptr;
    std::vector<size_t>                 sizes;              // bytes of its compute buffer, by backend
    uint64_t                            used      = 0;      // when it last computed
    bool                                in_flight = false;  // has computed since the devices were last waited for
};

struct graph_sets {
    std::vector<graph_set> sets;          // [0] is the context's own; the one that the context holds is empty here
    size_t                 current  = 0;  // which one the context holds
    int32_t                n_wanted = 0;  // value of the switch when the sets were made
    int32_t                qsa      = 0;  // the switch of that name then
    uint32_t               n_tokens = 0;  // of the largest ubatch that the sets beside the context's own are for
    uint64_t               clock    = 0;

    bool is_on() const {
        return sets.size() > 1;
    }

    // Whether the inputs of the current graph may still be read. No other graph reads them.
    bool may_be_read() const {
        return !is_on() || sets[current].in_flight;
    }

    void submitted() {
        if (is_on()) {
            sets[current].used      = ++clock;
            sets[current].in_flight = true;
        }
    }

    void all_done() {
        for (graph_set & set : sets) {
            set.in_flight = false;
        }
    }
};

// The context holds its own set again at the end of a batch, for all that knows of no other.
struct graph_sets_return {
    llama_context & ctx;

    ~graph_sets_return();
};

#endif
