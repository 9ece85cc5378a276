// cp.async, ldmatrix-free m16n8k16 and the small device helpers the QSA kernels share.
#pragma once

#include "qsa_types.cuh"

namespace qsa {

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
#define QSA_SM80 1
#else
#define QSA_SM80 0
#endif

// Copies n (4, 8 or 16) aligned bytes from global to shared memory; asynchronously where the hardware can.
template <int n> static __device__ __forceinline__ void copy_async(void * smem, const void * gmem) {
#if QSA_SM80
    const uint32_t s = (uint32_t) __cvta_generic_to_shared(smem);
    if constexpr (n == 16) {
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(s), "l"(gmem) : "memory");
    } else {
        asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(s), "l"(gmem), "n"(n) : "memory");
    }
#else
    if constexpr (n == 16) {
        *reinterpret_cast<uint4 *>(smem) = *reinterpret_cast<const uint4 *>(gmem);
    } else if constexpr (n == 8) {
        *reinterpret_cast<uint2 *>(smem) = *reinterpret_cast<const uint2 *>(gmem);
    } else {
        *reinterpret_cast<uint32_t *>(smem) = *reinterpret_cast<const uint32_t *>(gmem);
    }
#endif
}

static __device__ __forceinline__ void commit_async() {
#if QSA_SM80
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

// Waits until at most n committed groups of this thread are still on their way.
template <int n> static __device__ __forceinline__ void wait_async() {
#if QSA_SM80
    asm volatile("cp.async.wait_group %0;" ::"n"(n) : "memory");
#endif
}

// For kernels of launch_early(): waits until the kernel before is done and what it wrote is there.
static __device__ __forceinline__ void wait_for_kernel_before() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Lets the kernel behind this one be launched once every CTA of this one got here.
static __device__ __forceinline__ void let_next_kernel_start() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// A barrier among n threads (whole warps); barrier 0 is __syncthreads.
template <int barrier, int n> static __device__ __forceinline__ void sync_warps() {
    asm volatile("bar.sync %0, %1;" ::"n"(barrier), "n"(n) : "memory");
}

// d += a * b, F16 operands, F32 accumulator; a 16 x 16 by rows, b 16 x 8 by columns.
static __device__ __forceinline__ void mma_16816(float (&d)[4], const uint4 & a, uint32_t b0, uint32_t b1) {
#if QSA_SM80
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b0), "r"(b1));
#else
    __trap();
#endif
}

}  // namespace qsa
