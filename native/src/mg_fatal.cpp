#include "ggml-backend.h"
#include "ggml-impl.h"
#include "mg.h"

#include <unistd.h>

#include <cstdio>
#include <cstring>

namespace {

// ggml's own text for a connection that broke; an rpc device has no way to report it.
constexpr const char * RPC_BROKE = "Remote RPC server crashed";

void said(const char * message) {
    if (std::strstr(message, RPC_BROKE) == nullptr) {
        std::fprintf(stderr, "%s\n", message);
        ggml_print_backtrace();
        return;
    }
    std::fprintf(stderr,
                 "llamamg: error: an rpc-server has ended or does not answer rightly, and what it held is lost: "
                 "start it again, then this program (%s)\n",
                 message);
    std::fflush(stderr);
    _exit(1);
}

}  // namespace

void mg_fatal_install(void) {
    ggml_set_abort_callback(said);
}
