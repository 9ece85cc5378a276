#include "mg_lookup.h"

#include <algorithm>
#include <cstring>

namespace {

constexpr int32_t n_candidates_max = 64;
constexpr int32_t n_compared       = 64;       // tokens compared with what came before, and backwards to rank matches
constexpr size_t  n_lengths_max    = 1 << 14;  // keys whose drafts are limited; then all are forgotten

}  // namespace

namespace mg {

// Places in `where` that continue like the end of `own`, and what they vote for.
struct lookup::match {
    const lookup &  own;
    const lookup &  where;
    const int32_t   last;
    const int32_t * drafted;  // what was drafted so far
    int32_t         n_drafted            = 0;
    int32_t         n_live               = 0;
    int32_t         at[n_candidates_max] = {};  // position of the next token of each, latest match first

    // Token `i` of the own text: held, then the sampled one, then the drafted ones.
    int32_t text(int32_t i) const {
        const int32_t n = own.size();
        return i < n ? own.tokens_[i] : i == n ? last : drafted[i - n - 1];
    }

    // A text that is searched for its own continuation may be read beyond its end: a period shorter than the draft.
    bool next(int32_t i, int32_t & token) const {
        if (&own == &where && i <= own.size() + n_drafted) {
            token = text(i);
            return true;
        }
        if (i < where.size()) {
            token = where.tokens_[i];
            return true;
        }
        return false;
    }

    int32_t matched_back(int32_t end) const {
        const int32_t mine = own.size() + n_drafted;
        int32_t       n    = 0;
        while (n < n_compared && n <= end && n <= mine && where.tokens_[end - n] == text(mine - n)) {
            n++;
        }
        return n;
    }

    // Fill the candidates from the longest n-gram that occurred often enough; its n, or 0.
    int32_t look_up(const mg_lookup_rule & rule, uint64_t & key) {
        const int32_t mine = own.size() + n_drafted;  // index of the last token
        const int32_t most = std::max(rule.min_hits, std::min(std::max(rule.n_candidates, 1), n_candidates_max));
        for (const ngram_table & table : where.tables_) {
            const int32_t n = table.n();
            if (mine + 1 < n) {
                continue;
            }
            std::vector<int32_t> gram(n);
            for (int32_t i = 0; i < n; ++i) {
                gram[i] = text(mine + 1 - n + i);
            }
            key            = table.hash(gram.data());
            int32_t n_hits = 0;
            int32_t best   = 0;
            int32_t length[n_candidates_max];
            n_live = 0;
            for (int32_t end = table.last_end(key); end >= 0 && n_hits < most; end = table.previous(end)) {
                int32_t token;
                if (std::memcmp(&where.tokens_[end + 1 - n], gram.data(), n * sizeof(int32_t)) != 0 ||
                    !next(end + 1, token)) {
                    continue;
                }
                if (n_live < std::min(most, n_candidates_max)) {
                    length[n_live] = rule.longest ? matched_back(end) : 0;
                    best           = std::max(best, length[n_live]);
                    at[n_live++]   = end + 1;
                }
                n_hits++;
            }
            if (n_live == 0 || n_hits < rule.min_hits) {
                continue;
            }
            int32_t kept = 0;
            for (int32_t i = 0; i < n_live; ++i) {
                if (length[i] == best) {
                    at[kept++] = at[i];
                }
            }
            n_live = std::min(kept, std::max(rule.n_candidates, 1));
            return n;
        }
        return 0;
    }

    // The token most of them continue with (of equals the latest one's), its share of the votes; -1 when none has any.
    int32_t vote(float & share) {
        int32_t tokens[n_candidates_max], votes[n_candidates_max], n_tokens = 0, n_votes = 0;
        for (int32_t i = 0; i < n_live; ++i) {
            int32_t token;
            if (!next(at[i], token)) {
                at[i] = -1;
                continue;
            }
            n_votes++;
            int32_t j = 0;
            while (j < n_tokens && tokens[j] != token) {
                j++;
            }
            if (j == n_tokens) {
                tokens[n_tokens]  = token;
                votes[n_tokens++] = 0;
            }
            votes[j]++;
        }
        if (n_votes == 0) {
            return -1;
        }
        const int32_t best = (int32_t) (std::max_element(votes, votes + n_tokens) - votes);
        share              = (float) votes[best] / (float) n_votes;
        return tokens[best];
    }

    // Go on with those that agree.
    void follow(int32_t token) {
        int32_t kept = 0;
        for (int32_t i = 0; i < n_live; ++i) {
            int32_t own_token;
            if (at[i] >= 0 && next(at[i], own_token) && own_token == token) {
                at[kept++] = at[i] + 1;
            }
        }
        n_live = kept;
    }
};

lookup::lookup(const int32_t * orders, int32_t n_orders) {
    std::vector<int32_t> sorted(orders, orders + n_orders);
    std::sort(sorted.rbegin(), sorted.rend());
    for (const int32_t n : sorted) {
        tables_.emplace_back(n);
    }
}

void lookup::append(int32_t token) {
    tokens_.push_back(token);
    for (ngram_table & table : tables_) {
        table.append(tokens_, size() - 1);
    }
}

void lookup::keep(int32_t n) {
    if (n >= size()) {
        return;
    }
    for (ngram_table & table : tables_) {
        for (int32_t end = size() - 1; end >= n; --end) {
            table.remove(tokens_, end);
        }
        table.rewind(tokens_, n);
    }
    tokens_.resize(n);
}

void lookup::clear(int32_t n_tokens) {
    tokens_.clear();
    lengths_.clear();
    for (ngram_table & table : tables_) {
        table.clear(n_tokens);
    }
}

int32_t lookup::follow(const int32_t * tokens, int32_t n, bool all, int32_t n_most) {
    const int32_t common = std::min(n, size());
    const int32_t begin  = all || n < size() ? 0 : std::max(0, common - n_compared);
    const auto    differs =
        (int32_t) (std::mismatch(tokens_.begin() + begin, tokens_.begin() + common, tokens + begin).first -
                   tokens_.begin());
    if (size() - differs > n_most) {
        clear(n);  // to take so many out one by one takes longer than to begin anew
    } else {
        keep(differs);
    }
    const int32_t n_before = size();
    const int32_t end      = n - n_before > n_most ? n_before + n_most : n;
    for (int32_t i = n_before; i < end; ++i) {
        append(tokens[i]);
    }
    return end - n_before;
}

int32_t lookup::draft(const lookup & where, int32_t last, const mg_lookup_rule & rule, int32_t n_max, int32_t * out,
                      mg_lookup_found & found) const {
    match m{ *this, where, last, out };
    found             = { 0, 0, 0, 1.0f };
    found.n_matched   = m.look_up(rule, found.key);
    found.n_hits      = m.n_live;
    const auto length = rule.adaptive ? lengths_.find(found.key) : lengths_.end();
    if (found.n_matched == 0) {
        return 0;
    }
    if (length != lengths_.end()) {
        n_max = std::min(n_max, length->second);
    }
    while (m.n_drafted < n_max) {
        float   share = 0.0f;
        int32_t token = m.vote(share);
        if (token < 0 && rule.extend) {
            uint64_t key;
            if (m.look_up(rule, key) > 0) {
                token = m.vote(share);
            }
        }
        if (token < 0 || share < rule.min_share || found.share * share < rule.p_min) {
            break;
        }
        found.share *= share;
        m.follow(token);
        out[m.n_drafted++] = token;
    }
    return m.n_drafted >= rule.n_min ? m.n_drafted : 0;
}

void lookup::judge(uint64_t key, int32_t n_drafted, int32_t n_accepted) {
    const auto known = lengths_.find(key);
    if (n_accepted < n_drafted) {
        if (known == lengths_.end() && lengths_.size() >= n_lengths_max) {
            lengths_.clear();
        }
        lengths_[key] = 2 * n_accepted + 1;  // never 0: a key that missed once gets another chance
    } else if (known != lengths_.end()) {
        known->second = std::min(2 * known->second + 1, 1 << 20);
    }
}

size_t lookup::bytes() const {
    size_t n = tokens_.capacity() * sizeof(int32_t) + lengths_.size() * 32;
    for (const ngram_table & table : tables_) {
        n += table.bytes();
    }
    return n;
}

}  // namespace mg
