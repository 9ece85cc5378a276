// What ggml-cuda calls for GGML_OP_QSA.
#pragma once

#include "ggml-cuda/common.cuh"
#include "qsa.h"

void ggml_cuda_qsa(ggml_backend_cuda_context & ctx, ggml_tensor * dst);

// False for every shape, type or placement that the kernels cannot do; never asserts.
bool ggml_cuda_qsa_supported(int device, const ggml_tensor * op);
