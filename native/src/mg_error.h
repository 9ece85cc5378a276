// Failures inside libllamamg: text per thread, and a wall that no exception passes.
#ifndef LLAMAMG_ERROR_H
#define LLAMAMG_ERROR_H

#include <exception>
#include <string>

namespace mg {

void set_error(std::string text);

// Run f and return its value; on an exception keep its text and return failure.
template <typename T, typename F>
T guarded(const char * what, T failure, F && f) noexcept {
    try {
        return f();
    } catch (const std::exception & e) {
        set_error(std::string(what) + ": " + e.what());
    } catch (...) {
        set_error(std::string(what) + ": unknown exception");
    }
    return failure;
}

}  // namespace mg

#endif
