#include "mg_lookup.h"

#include <algorithm>

namespace {

constexpr uint64_t base      = 0x9e3779b97f4a7c15u;  // odd, so that powers never vanish modulo 2^64
constexpr int32_t  removed   = -1;
constexpr int32_t  free_slot = -2;
constexpr size_t   n_min     = 1024;  // entries

// Bits of a polynomial hash are uneven; the finalizer of MurmurHash3 spreads them.
uint64_t mixed(uint64_t h) {
    h ^= h >> 33;
    h *= 0xff51afd7ed558ccdu;
    h ^= h >> 33;
    h *= 0xc4ceb9fe1a85ec53u;
    return h ^ (h >> 33);
}

uint64_t value(int32_t token) {
    return (uint64_t) (uint32_t) token + 1;
}

}  // namespace

namespace mg {

ngram_table::ngram_table(int32_t n) : n_(n), out_factor_(1), entries_(n_min, entry{ 0, free_slot }) {
    for (int32_t i = 0; i < n; ++i) {
        out_factor_ *= base;
    }
}

uint64_t ngram_table::hash(const int32_t * gram) const {
    uint64_t h = 0;
    for (int32_t i = 0; i < n_; ++i) {
        h = h * base + value(gram[i]);
    }
    return mixed(h);
}

size_t ngram_table::find(uint64_t hash) const {
    const size_t   mask = entries_.size() - 1;
    const uint32_t tag  = (uint32_t) (hash >> 32);
    size_t         at   = tag & mask;
    while (entries_[at].last != free_slot && entries_[at].tag != tag) {
        at = (at + 1) & mask;
    }
    return at;
}

void ngram_table::append(const std::vector<int32_t> & tokens, int32_t end) {
    rolling_ = rolling_ * base + value(tokens[end]);
    if (end >= n_) {
        rolling_ -= out_factor_ * value(tokens[end - n_]);
    }
    previous_.push_back(removed);
    if (end + 1 < n_) {
        return;
    }
    if (2 * (n_used_ + 1) > entries_.size()) {
        make_room();
    }
    const uint64_t h = mixed(rolling_);
    entry &        e = entries_[find(h)];
    if (e.last == free_slot) {
        e.tag = (uint32_t) (h >> 32);
        n_used_++;
    } else {
        previous_[end] = e.last;
    }
    e.last = end;
}

void ngram_table::remove(const std::vector<int32_t> & tokens, int32_t end) {
    if (end + 1 >= n_) {
        entry & e = entries_[find(hash(tokens.data() + end + 1 - n_))];
        e.last    = previous_[end];  // the entry stays: it may end a probe of others
    }
    previous_.pop_back();
}

void ngram_table::rewind(const std::vector<int32_t> & tokens, int32_t size) {
    rolling_ = 0;
    for (int32_t i = size > n_ ? size - n_ : 0; i < size; ++i) {
        rolling_ = rolling_ * base + value(tokens[i]);
    }
}

void ngram_table::clear(size_t n_tokens) {
    size_t n_entries = n_min;
    while (n_entries < 2 * (n_tokens + 1)) {
        n_entries *= 4;
    }
    std::vector<entry>(n_entries, entry{ 0, free_slot }).swap(entries_);
    std::vector<int32_t>().swap(previous_);
    n_used_  = 0;
    rolling_ = 0;
}

// Most of the entries are of text that is not there any more: without them the table is large enough.
void ngram_table::make_room() {
    const auto n_live =
        (size_t) std::count_if(entries_.begin(), entries_.end(), [](const entry & e) { return e.last >= 0; });
    rehash(4 * n_live > entries_.size() ? 4 * entries_.size() : entries_.size());
    n_used_ = n_live;
}

void ngram_table::rehash(size_t n_entries) {
    std::vector<entry> old(n_entries, entry{ 0, free_slot });
    old.swap(entries_);
    const size_t mask = n_entries - 1;
    for (const entry & e : old) {
        if (e.last < 0) {
            continue;
        }
        size_t at = e.tag & mask;
        while (entries_[at].last != free_slot) {
            at = (at + 1) & mask;
        }
        entries_[at] = e;
    }
}

int32_t ngram_table::last_end(uint64_t hash) const {
    const int32_t last = entries_[find(hash)].last;
    return last == free_slot ? removed : last;
}

}  // namespace mg
