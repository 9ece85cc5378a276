// What ggml-cpu calls for GGML_OP_QSA.
#ifndef LLAMAMG_QSA_CPU_H
#define LLAMAMG_QSA_CPU_H

#include "qsa.h"

#ifdef __cplusplus
extern "C" {
#endif

struct ggml_compute_params;

// Bytes of scratch that n_tasks threads need together.
size_t ggml_qsa_work_size(const struct ggml_tensor * op, int n_tasks);

void ggml_compute_forward_qsa(const struct ggml_compute_params * params, struct ggml_tensor * op);

#ifdef __cplusplus
}
#endif

#endif
