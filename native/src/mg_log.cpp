#include "ggml.h"
#include "llama.h"
#include "mg.h"
#include "mg_error.h"

#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstring>

namespace {

std::atomic<int32_t> threshold{ GGML_LOG_LEVEL_WARN };
std::atomic<FILE *>  sink{ nullptr };

void write_line(ggml_log_level level, const char * text, void *) {
    // A continuation belongs to the line before it on the same thread.
    thread_local int32_t last_level = GGML_LOG_LEVEL_INFO;
    if (level != GGML_LOG_LEVEL_CONT) {
        last_level = level;
    }
    if (last_level < threshold.load(std::memory_order_relaxed)) {
        return;
    }
    FILE * file = sink.load(std::memory_order_acquire);
    std::fputs(text, file ? file : stderr);
    std::fflush(file ? file : stderr);
}

}  // namespace

int32_t mg_log_set(int32_t level, const char * path) {
    return mg::guarded("mg_log_set", -1, [&] {
        FILE * file = nullptr;
        if (path) {
            file = std::fopen(path, "ae");
            if (!file) {
                mg::set_error(std::string("cannot open log file ") + path + ": " + std::strerror(errno));
                return -1;
            }
        }
        threshold.store(level, std::memory_order_relaxed);
        // The old file stays open: another thread may be writing to it, and this is called a few times at most.
        sink.store(file, std::memory_order_release);
        llama_log_set(write_line, nullptr);
        return 0;
    });
}
