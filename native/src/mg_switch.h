// Named run-time switches. Compiled into ggml-base, the lowest library, so that any kernel, backend or graph can read
// one with a single atomic load and without getenv. A switch at its default leaves upstream's behaviour, bit for bit.
#ifndef LLAMAMG_SWITCH_H
#define LLAMAMG_SWITCH_H

#include <stdint.h>

#define MG_API __attribute__((visibility("default")))

#ifdef __cplusplus
extern "C" {
#endif

enum mg_switch_id {
#define MG_SWITCH(id, name, value, description) MG_##id,
#include "mg_switch.def"
#undef MG_SWITCH
    MG_SWITCH_COUNT
};

// For patched code: the value now.
MG_API int32_t mg_switch_value(enum mg_switch_id id);

// For everybody else, by name or by position. On an unpatched tree the list is empty.
MG_API int32_t      mg_switch_count(void);
MG_API const char * mg_switch_name(int32_t i);                        // NULL when i is out of range
MG_API const char * mg_switch_description(int32_t i);                 // NULL when i is out of range
MG_API int32_t      mg_switch_default(int32_t i);                     // 0 when i is out of range
MG_API int32_t      mg_switch_get(const char * name, int32_t * out);  // -1: no such switch
MG_API int32_t      mg_switch_set(const char * name, int32_t value);  // -1: no such switch

#ifdef __cplusplus
}
#endif

#endif
