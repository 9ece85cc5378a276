#include "mg_lookup.h"

#include "mg_error.h"

#include <stdexcept>

namespace {

mg::lookup & of(void * index) {
    if (!index) {
        throw std::invalid_argument("no index given");
    }
    return *static_cast<mg::lookup *>(index);
}

}  // namespace

void * mg_lookup_new(const int32_t * orders, int32_t n_orders) {
    return mg::guarded("mg_lookup_new", (void *) nullptr, [&]() -> void * {
        for (int32_t i = 0; i < n_orders; ++i) {
            if (orders[i] < 1) {
                throw std::invalid_argument("an n-gram has at least one token");
            }
        }
        if (n_orders < 1) {
            throw std::invalid_argument("an index needs at least one n-gram length");
        }
        return new mg::lookup(orders, n_orders);
    });
}

void mg_lookup_free(void * index) {
    delete static_cast<mg::lookup *>(index);
}

int32_t mg_lookup_follow(void * index, const int32_t * tokens, int32_t n, int32_t all, int32_t n_most) {
    return mg::guarded("mg_lookup_follow", -1, [&] {
        if (n < 0 || n_most < 1) {
            throw std::invalid_argument("a text has no negative length, and at least one token at a time is taken in");
        }
        return of(index).follow(tokens, n, all != 0, n_most);
    });
}

int32_t mg_lookup_draft(void * index, void * where, int32_t last, const mg_lookup_rule * rule, int32_t n_max,
                        int32_t * out, mg_lookup_found * found) {
    return mg::guarded("mg_lookup_draft", -1,
                       [&] { return of(index).draft(where ? of(where) : of(index), last, *rule, n_max, out, *found); });
}

int32_t mg_lookup_judge(void * index, uint64_t key, int32_t n_drafted, int32_t n_accepted) {
    return mg::guarded("mg_lookup_judge", -1, [&] {
        of(index).judge(key, n_drafted, n_accepted);
        return 0;
    });
}

int32_t mg_lookup_size(void * index, uint64_t * n_bytes) {
    return mg::guarded("mg_lookup_size", -1, [&] {
        *n_bytes = of(index).bytes();
        return of(index).size();
    });
}
