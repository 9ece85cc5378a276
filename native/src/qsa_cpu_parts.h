// The three QSA operations on the CPU, each in a file of its own; called by qsa_cpu.cpp.
#pragma once

#include <cstddef>

#include "qsa.h"

struct ggml_compute_params;

namespace qsa_cpu {

// Floats of scratch that one thread needs.
size_t pool_scratch(const ggml_tensor * op);
size_t attn_scratch(const ggml_tensor * op);

// The part of thread params->ith.
void pool(const ggml_compute_params * params, ggml_tensor * op, float * scratch);
void select(const ggml_compute_params * params, ggml_tensor * op);
void attn(const ggml_compute_params * params, ggml_tensor * op, float * scratch);

}  // namespace qsa_cpu
