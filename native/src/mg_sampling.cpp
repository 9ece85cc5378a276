#include "llama.h"
#include "mg.h"
#include "mg_error.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace {

struct row {
    const float * logits;
    int32_t       n_vocab;
};

row read_row(llama_context * ctx, int32_t idx) {
    const float * logits = llama_get_logits_ith(ctx, idx);
    if (!logits) {
        throw std::runtime_error("row " + std::to_string(idx) +
                                 " has no logits; was it decoded with logits requested?");
    }
    return { logits, llama_vocab_n_tokens(llama_model_get_vocab(llama_get_model(ctx))) };
}

// Maximum in independent lanes, which the compiler turns into vector code without -ffast-math. NaN never wins.
float maximum(const row & r) {
    constexpr int32_t lanes = 32;
    float             best[lanes];
    std::fill(best, best + lanes, -INFINITY);
    int32_t i = 0;
    for (; i + lanes <= r.n_vocab; i += lanes) {
        for (int32_t j = 0; j < lanes; ++j) {
            best[j] = r.logits[i + j] > best[j] ? r.logits[i + j] : best[j];
        }
    }
    for (; i < r.n_vocab; ++i) {
        best[0] = r.logits[i] > best[0] ? r.logits[i] : best[0];
    }
    return *std::max_element(best, best + lanes);
}

// First id with this logit, n_vocab if there is none. Whole blocks are ruled out in vector code.
int32_t find(const row & r, float value) {
    constexpr int32_t block = 256;
    int32_t           i     = 0;
    for (; i + block <= r.n_vocab; i += block) {
        int32_t n_equal = 0;
        for (int32_t j = 0; j < block; ++j) {
            n_equal += r.logits[i + j] == value;
        }
        if (n_equal > 0) {
            break;
        }
    }
    return (int32_t) (std::find(r.logits + i, r.logits + r.n_vocab, value) - r.logits);
}

int32_t argmax(const row & r) {
    const float   best = maximum(r);
    const int32_t id   = find(r, best);
    if (id == r.n_vocab || best == -INFINITY) {
        throw std::runtime_error("no finite logit in this row; the model produced NaN or -inf everywhere");
    }
    return id;
}

// Candidates of one row. The storage is kept per thread: 248k entries are 3 MB, too much to allocate per token.
llama_token_data_array candidates(const row & r) {
    thread_local std::vector<llama_token_data> storage;
    storage.resize(r.n_vocab);
    for (int32_t id = 0; id < r.n_vocab; ++id) {
        storage[id] = { id, r.logits[id], 0.0f };
    }
    return { storage.data(), storage.size(), -1, false };
}

int32_t selected(const llama_token_data_array & cur) {
    if (cur.selected < 0 || (size_t) cur.selected >= cur.size) {
        throw std::runtime_error("the sampler chain selected no token; it must end with dist, greedy or mirostat");
    }
    return cur.data[cur.selected].id;
}

bool allows(llama_sampler * grammar, int32_t id) {
    llama_token_data       one = { id, 1.0f, 0.0f };
    llama_token_data_array cur = { &one, 1, -1, false };
    llama_sampler_apply(grammar, &cur);
    return one.logit != -INFINITY;
}

void accept(llama_sampler * chain, llama_sampler * grammar, int32_t id) {
    if (grammar) {
        llama_sampler_accept(grammar, id);
    }
    if (chain) {
        llama_sampler_accept(chain, id);
    }
}

// Keep only what the grammar permits. Throws when that is nothing.
void mask(llama_sampler * grammar, llama_token_data_array & cur) {
    llama_sampler_apply(grammar, &cur);
    if (std::none_of(cur.data, cur.data + cur.size, [](const llama_token_data & c) { return c.logit > -INFINITY; })) {
        throw std::runtime_error("the grammar permits no token here");
    }
}

// Greedy among candidates: highest logit, lowest id on a tie.
void select_best(llama_token_data_array & cur) {
    int64_t best = -1;
    for (size_t i = 0; i < cur.size; ++i) {
        const llama_token_data & c = cur.data[i];
        if (c.logit > -INFINITY && (best < 0 || c.logit > cur.data[best].logit)) {
            best = (int64_t) i;
        }
    }
    cur.selected = best;
}

// Sample with a full candidate list; the chosen token is not yet accepted.
llama_token_data_array sample(const row & r, llama_sampler * chain, llama_sampler * grammar) {
    const auto pick = [chain](llama_token_data_array & cur) {
        if (chain) {
            llama_sampler_apply(chain, &cur);
        } else {
            select_best(cur);
        }
        return selected(cur);
    };
    llama_token_data_array cur = candidates(r);
    const int32_t          id  = pick(cur);
    if (grammar && !allows(grammar, id)) {
        cur = candidates(r);
        mask(grammar, cur);
        pick(cur);
    }
    return cur;
}

int32_t sample_row(llama_context * ctx, llama_sampler * chain, llama_sampler * grammar, int32_t idx) {
    const row r  = read_row(ctx, idx);
    int32_t   id = -1;
    if (!chain) {
        // Greedy needs the list only when the grammar rejects the best token.
        id = argmax(r);
        if (grammar && !allows(grammar, id)) {
            id = selected(sample(r, nullptr, grammar));
        }
    } else {
        id = selected(sample(r, chain, grammar));
    }
    accept(chain, grammar, id);
    return id;
}

// The n best of n_all values, best first, lowest index on a tie: a bounded heap whose top is the worst one kept.
template <typename Value>
std::vector<std::pair<float, int32_t>> best_of(size_t n_all, int32_t n, Value && value) {
    const auto better = [](const std::pair<float, int32_t> & a, const std::pair<float, int32_t> & b) {
        return a.first > b.first || (a.first == b.first && a.second < b.second);
    };
    std::vector<std::pair<float, int32_t>> heap;
    if (n <= 0) {
        return heap;
    }
    for (size_t i = 0; i < n_all; ++i) {
        const std::pair<float, int32_t> next = { value(i), (int32_t) i };
        if (heap.size() < (size_t) n) {
            heap.push_back(next);
            std::push_heap(heap.begin(), heap.end(), better);
        } else if (better(next, heap.front())) {
            std::pop_heap(heap.begin(), heap.end(), better);
            heap.back() = next;
            std::push_heap(heap.begin(), heap.end(), better);
        }
    }
    std::sort_heap(heap.begin(), heap.end(), better);
    return heap;
}

}  // namespace

int32_t mg_sample_rows(void * ctx, int32_t n, void * const * chains, void * const * grammars, const int32_t * idx,
                       int32_t * out_tokens) {
    int32_t n_failed = 0;
    for (int32_t i = 0; i < n; ++i) {
        out_tokens[i] = mg::guarded("mg_sample_rows", -1, [&] {
            return sample_row((llama_context *) ctx, chains ? (llama_sampler *) chains[i] : nullptr,
                              grammars ? (llama_sampler *) grammars[i] : nullptr, idx[i]);
        });
        n_failed += out_tokens[i] < 0;
    }
    return n_failed;
}

int32_t mg_sample_run(void * ctx, void * chain, void * grammar, int32_t idx, const int32_t * draft, int32_t n_draft,
                      int32_t * out_tokens) {
    int32_t n = 0;
    do {
        out_tokens[n] = mg::guarded("mg_sample_run", -1, [&] {
            return sample_row((llama_context *) ctx, (llama_sampler *) chain, (llama_sampler *) grammar, idx + n);
        });
        n++;
    } while (n <= n_draft && out_tokens[n - 1] == draft[n - 1]);
    return n;
}

int32_t mg_sample_row_probs(void * ctx, void * chain, void * grammar, int32_t idx, int32_t n_top, int32_t * out_ids,
                            float * out_probs, int32_t * out_token) {
    return mg::guarded("mg_sample_row_probs", -1, [&] {
        *out_token        = -1;
        const row     r   = read_row((llama_context *) ctx, idx);
        const auto    cur = sample(r, (llama_sampler *) chain, (llama_sampler *) grammar);
        const int32_t id  = selected(cur);
        const bool    weighted =
            chain && std::any_of(cur.data, cur.data + cur.size, [](const llama_token_data & c) { return c.p > 0.0f; });
        // A chain that ends greedily leaves no probabilities: all mass is on the token it chose.
        const auto p   = [&](size_t i) { return weighted ? cur.data[i].p : (cur.data[i].id == id ? 1.0f : 0.0f); };
        const auto top = best_of(cur.size, weighted ? n_top : std::min(n_top, 1), p);
        for (size_t i = 0; i < top.size(); ++i) {
            out_ids[i]   = cur.data[top[i].second].id;
            out_probs[i] = top[i].first;
        }
        accept((llama_sampler *) chain, (llama_sampler *) grammar, id);
        *out_token = id;
        return (int32_t) top.size();
    });
}

int32_t mg_logprobs(void * ctx, int32_t idx, int32_t token, int32_t n_top, int32_t * out_ids, float * out_logprobs,
                    float * out_token_logprob) {
    return mg::guarded("mg_logprobs", -1, [&] {
        const row r = read_row((llama_context *) ctx, idx);
        if (token >= r.n_vocab) {
            throw std::runtime_error("token " + std::to_string(token) + " is outside the vocabulary of " +
                                     std::to_string(r.n_vocab));
        }
        const float highest = maximum(r);
        double      sum     = 0.0;
        for (int32_t i = 0; i < r.n_vocab; ++i) {
            sum += std::exp(r.logits[i] - highest);
        }
        const float log_sum = highest + (float) std::log(sum);
        if (token >= 0) {
            *out_token_logprob = r.logits[token] - log_sum;
        }
        const auto top = best_of(r.n_vocab, std::min(n_top, r.n_vocab), [&](size_t i) { return r.logits[i]; });
        for (size_t i = 0; i < top.size(); ++i) {
            out_ids[i]      = top[i].second;
            out_logprobs[i] = top[i].first - log_sum;
        }
        return (int32_t) top.size();
    });
}

int32_t mg_accept_tokens(void * chain, const int32_t * tokens, int32_t n) {
    return mg::guarded("mg_accept_tokens", -1, [&] {
        for (int32_t i = 0; i < n; ++i) {
            llama_sampler_accept((llama_sampler *) chain, tokens[i]);
        }
        return 0;
    });
}
