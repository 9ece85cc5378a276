#include "mg_switch.h"

#include <atomic>
#include <cstring>

namespace {

struct entry {
    const char *         name;
    const char *         description;
    int32_t              initial;
    std::atomic<int32_t> value;
};

// The sentinel keeps the array legal when the list is empty.
entry table[] = {
#ifndef MG_NO_SWITCHES
#define MG_SWITCH(id, name, value, description) { name, description, value, { value } },
#include "mg_switch.def"
#undef MG_SWITCH
#endif
    { nullptr, nullptr, 0, { 0 } },
};

constexpr int32_t n_switches = sizeof(table) / sizeof(table[0]) - 1;

entry * find(const char * name) {
    for (int32_t i = 0; name && i < n_switches; ++i) {
        if (std::strcmp(table[i].name, name) == 0) {
            return &table[i];
        }
    }
    return nullptr;
}

bool in_range(int32_t i) {
    return i >= 0 && i < n_switches;
}

}  // namespace

int32_t mg_switch_value(enum mg_switch_id id) {
    return table[id].value.load(std::memory_order_relaxed);
}

int32_t mg_switch_count(void) {
    return n_switches;
}

const char * mg_switch_name(int32_t i) {
    return in_range(i) ? table[i].name : nullptr;
}

const char * mg_switch_description(int32_t i) {
    return in_range(i) ? table[i].description : nullptr;
}

int32_t mg_switch_default(int32_t i) {
    return in_range(i) ? table[i].initial : 0;
}

int32_t mg_switch_get(const char * name, int32_t * out) {
    entry * e = find(name);
    if (!e) {
        return -1;
    }
    *out = e->value.load(std::memory_order_relaxed);
    return 0;
}

int32_t mg_switch_set(const char * name, int32_t value) {
    entry * e = find(name);
    if (!e) {
        return -1;
    }
    e->value.store(value, std::memory_order_relaxed);
    return 0;
}
