// Index of a token sequence by its n-grams, and drafts of what may follow. Plain C++, no llama.cpp; see mg.h for the C
// ABI.
#ifndef LLAMAMG_LOOKUP_H
#define LLAMAMG_LOOKUP_H

#include "mg.h"

#include <cstdint>
#include <unordered_map>
#include <vector>

namespace mg {

// For one n: where each n-gram ended last, and for each end the one before it with the same n-gram. Open addressing on
// 32 bits of a rolling hash; two n-grams that share them share a chain, so readers compare the tokens.
class ngram_table {
public:
    explicit ngram_table(int32_t n);

    int32_t n() const {
        return n_;
    }

    void    append(const std::vector<int32_t> & tokens, int32_t end);   // tokens[end] has just been appended
    void    remove(const std::vector<int32_t> & tokens, int32_t end);   // tokens[end] is about to be removed
    void    rewind(const std::vector<int32_t> & tokens, int32_t size);  // after removals: only `size` tokens are left
    void    clear(size_t n_tokens);                                     // as if new, with room for so many
    int32_t last_end(uint64_t hash) const;                              // -1: never seen
    int32_t previous(int32_t end) const {
        return previous_[end];
    }
    uint64_t hash(const int32_t * gram) const;
    size_t   bytes() const {
        return entries_.size() * sizeof(entry) + previous_.capacity() * sizeof(int32_t);
    }

private:
    struct entry {
        uint32_t tag;   // upper half of the hash; its low bits are the entry's place
        int32_t  last;  // -1: all that were there have been removed; -2: free
    };

    size_t find(uint64_t hash) const;
    void   make_room();
    void   rehash(size_t n_entries);

    int32_t              n_;
    uint64_t             out_factor_;  // weight of the token that leaves the window
    uint64_t             rolling_ = 0;
    std::vector<entry>   entries_;     // a power of two
    size_t               n_used_ = 0;  // entries that are not free
    std::vector<int32_t> previous_;    // one per token
};

class lookup {
public:
    lookup(const int32_t * orders, int32_t n_orders);

    // Hold exactly tokens[0, n), or the first of them where that takes more than `n_most` to be added: then call again.
    // Without `all`, only the last few tokens held so far are compared with the given ones. Returns how many were
    // added.
    int32_t follow(const int32_t * tokens, int32_t n, bool all, int32_t n_most);

    // Draft behind own tokens followed by `last`; the text is looked for in `where` (this index, or another one).
    int32_t draft(const lookup & where, int32_t last, const mg_lookup_rule & rule, int32_t n_max, int32_t * out,
                  mg_lookup_found & found) const;

    // What became of a draft whose key was `key`: the next one of that key is shortened or grows back.
    void judge(uint64_t key, int32_t n_drafted, int32_t n_accepted);

    int32_t size() const {
        return (int32_t) tokens_.size();
    }
    size_t bytes() const;

private:
    struct match;

    void append(int32_t token);
    void keep(int32_t n);
    void clear(int32_t n_tokens);

    std::vector<ngram_table>              tables_;  // longest n first
    std::vector<int32_t>                  tokens_;
    std::unordered_map<uint64_t, int32_t> lengths_;  // key -> how much it may draft, where that is limited
};

}  // namespace mg

#endif
