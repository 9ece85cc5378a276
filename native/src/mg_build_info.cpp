#include "mg.h"

// Written by `llamamg build`: one raw string literal holding BUILD_INFO.json.
static const char build_info[] =
#include MG_BUILD_INFO_FILE
    ;

const char * mg_build_info(void) {
    return build_info;
}
