#include "mg_error.h"

#include "mg.h"

#include <utility>

namespace {
thread_local std::string last_error;
}

void mg::set_error(std::string text) {
    last_error = std::move(text);
}

const char * mg_last_error(void) {
    return last_error.c_str();
}
