// The QSA kernels as a plain shared library: raw pointers in, no ggml. For check.py.
#include "qsa_launch.cuh"

using namespace qsa;

static device_limits limits(int force_cc) {
    int dev = 0, major = 0, minor = 0, smem = 0;
    cudaGetDevice(&dev);
    cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, dev);
    cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, dev);
    cudaDeviceGetAttribute(&smem, cudaDevAttrMaxSharedMemoryPerBlockOptin, dev);
    return { force_cc ? force_cc : 100 * major + 10 * minor, (size_t) (force_cc && force_cc < 800 ? 65536 : smem) };
}

extern "C" int qsa_attn(const float * q, size_t q_head, size_t q_token, const void * k, size_t k_row, const void * v,
                        size_t v_row, const int64_t * k_idxs, const int32_t * list, float * out, float * part, int k_type,
                        int v_type, int n_tokens, int n_head, int n_head_kv, int head_size, int ntop, int log2r,
                        int n_split, int kv_size, float scale, int force_cc, cudaStream_t stream) {
    const attn_args a = { q,      q_head, q_token,  (const char *) k, k_row, (const char *) v, v_row, k_idxs,
                          list,   out,    part,     k_type,           v_type, n_tokens,         n_head, n_head_kv,
                          head_size, ntop, log2r, n_split,            kv_size, scale };
    const device_limits dev = limits(force_cc);
    if (!attn_supported(head_size, n_head, n_head_kv, ntop, log2r, n_split, dev)) {
        return -1;
    }
    return launch_attn(a, dev, stream);
}

extern "C" int qsa_pool(const void * raw, size_t raw_row, int raw_type, float * pooled, const float * gamma,
                        const int32_t * range, int n_ranges, int d, int log2r, int kv_size, int n_rot, float eps,
                        float freq_base, cudaStream_t stream) {
    const pool_args a = { (const char *) raw, raw_row, raw_type, pooled, gamma, range, n_ranges, d, log2r, kv_size, n_rot,
                          eps, powf(freq_base, -2.0f / n_rot), 1.0f, 0.0f, 1.0f, 0.0f, 0.0f };
    return pool_supported(d, n_rot, log2r) ? launch_pool(a, 132, stream) : -1;
}

// what: 3 both, 1 scores only, 2 picking only (of the first chunk)
extern "C" int qsa_select(const float * q, size_t q_head, size_t q_token, const float * pooled, const int64_t * k_idxs,
                          int32_t * list, uint32_t * keys, int d, int h, int n_tokens, int ntop, int log2r, int kv_size,
                          int rows, int what, int force_cc, cudaStream_t stream) {
    select_args a = { q, q_head, q_token, pooled, k_idxs, list, keys, keys + (size_t) rows * (kv_size >> log2r), d, h,
                      n_tokens, ntop, log2r, kv_size, kv_size >> log2r, 0, rows < n_tokens ? rows : n_tokens };
    const device_limits dev = limits(force_cc);
    if (!select_supported(d, h, ntop, log2r, a.n_block_max, dev)) {
        return -1;
    }
    switch (what) {
        case 1:  return launch_scores(a, dev, stream);
        case 2:  return launch_pick(a, dev, stream);
        default: return launch_select(a, rows, dev, stream);
    }
}
