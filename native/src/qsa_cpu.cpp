// The QSA operations on the CPU: reference for the other backends, and what a machine without a GPU runs.
// Results do not depend on the number of threads nor on how tokens are cut into ubatches: every score and every sum has
// one order of accumulation, whichever path computes it.
#include "qsa_cpu.h"

#include "ggml-cpu-impl.h"
#include "qsa_cpu_parts.h"

namespace {

// Bytes per thread, in whole cache lines.
size_t scratch_per_thread(const ggml_tensor * op) {
    size_t n = 0;
    switch (qsa_param_i32(op, QSA_PARAM_SUB)) {
        case QSA_POOL:
            n = qsa_cpu::pool_scratch(op);
            break;
        case QSA_ATTN:
            n = qsa_cpu::attn_scratch(op);
            break;
        default:
            break;
    }
    return GGML_PAD(n * sizeof(float), 64);
}

}  // namespace

size_t ggml_qsa_work_size(const ggml_tensor * op, int n_tasks) {
    return scratch_per_thread(op) * n_tasks;
}

void ggml_compute_forward_qsa(const ggml_compute_params * params, ggml_tensor * op) {
    float * scratch = (float *) ((char *) params->wdata + scratch_per_thread(op) * params->ith);
    switch (qsa_param_i32(op, QSA_PARAM_SUB)) {
        case QSA_POOL:
            qsa_cpu::pool(params, op, scratch);
            break;
        case QSA_SELECT:
            qsa_cpu::select(params, op);
            break;
        case QSA_ATTN:
            qsa_cpu::attn(params, op, scratch);
            break;
        default:
            GGML_ABORT("QSA: unknown operation");
    }
}
