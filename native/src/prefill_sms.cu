// Streams of green contexts (CUDA driver API, group CUDA_GREEN_CONTEXTS): a stream whose kernels run on a set of SMs.
#include "ggml-cuda/common.cuh"

#include "prefill_sms.h"  // after what says which toolkit it is

#if !defined(GGML_USE_HIP) && !defined(GGML_USE_MUSA) && CUDART_VERSION >= 12050

#include "mg_switch.h"
#include "mg_trace.h"

#include <cuda.h>
#include <cudaTypedefs.h>

#include <algorithm>
#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <utility>

namespace prefill_sms {
namespace {

// The driver's functions, by the versions whose structures this was compiled with; asked for so that an older driver,
// which lacks them, still loads this library.
struct driver {
    PFN_cuDeviceGetDevResource_v12040    device_resource = nullptr;
    PFN_cuDevSmResourceSplitByCount_v12040 split         = nullptr;
    PFN_cuDevResourceGenerateDesc_v12040 describe        = nullptr;
    PFN_cuGreenCtxCreate_v12040          create          = nullptr;
    PFN_cuGreenCtxDestroy_v12040         destroy         = nullptr;
    PFN_cuGreenCtxStreamCreate_v12050    create_stream   = nullptr;
    bool                                 is_complete     = false;

    driver() {
        is_complete = find("cuDeviceGetDevResource", 12040, device_resource) &&
                      find("cuDevSmResourceSplitByCount", 12040, split) &&
                      find("cuDevResourceGenerateDesc", 12040, describe) &&
                      find("cuGreenCtxCreate", 12040, create) && find("cuGreenCtxDestroy", 12040, destroy) &&
                      find("cuGreenCtxStreamCreate", 12050, create_stream);
    }

    template <typename F> static bool find(const char * name, unsigned version, F & function) {
        void *                          found  = nullptr;
        cudaDriverEntryPointQueryResult result = cudaDriverEntryPointSymbolNotFound;
        if (cudaGetDriverEntryPointByVersion(name, &found, version, cudaEnableDefault, &result) != cudaSuccess ||
            result != cudaDriverEntryPointSuccess) {
            (void) cudaGetLastError();
            return false;
        }
        function = reinterpret_cast<F>(found);
        return found != nullptr;
    }
};

static const driver & functions() {
    static const driver found;
    return found;
}

#ifdef USE_CUDA_GRAPH
using graphs = decltype(ggml_backend_cuda_context::cuda_graphs);
#else
struct graphs {};
#endif

// A stream, and what was captured on it: the nodes of a CUDA graph stay on the SMs of the stream they were captured on.
struct lane {
    cudaStream_t                           stream = nullptr;
    CUgreenCtx                             green  = nullptr;
    int                                    n_sms  = 0;  // 0: all
    graphs                                 parked;
    std::unique_ptr<ggml_cuda_device_info> info;

    lane()                         = default;
    lane(const lane &)             = delete;
    lane & operator=(const lane &) = delete;

    // Only after the stream is idle. The stream of all SMs belongs to the backend context.
    ~lane() {
        if (green != nullptr) {
            parked = graphs();
            CUDA_CHECK(cudaStreamDestroy(stream));
            functions().destroy(green);
        }
    }
};

struct state {
    lane                                 whole;
    std::map<int, std::unique_ptr<lane>> limited;  // by SMs asked for, rounded to what the device divides into
    lane *                               current = &whole;
    cudaEvent_t                          handed  = nullptr;  // the order of two streams
    CUdevResource                        all     = {};
    unsigned                             align   = 0;        // 0: not asked yet
    bool                                 broken  = false;
    const lane *                         cublas_lane = nullptr;  // what the cuBLAS handle was told or made with
    int                                  cublas_sms  = 0;
};

using table = std::unordered_map<ggml_backend_cuda_context *, std::unique_ptr<state>>;

std::mutex                                lock;
table &                                   states = *new table;  // never freed: at exit the driver may be gone before it
std::atomic<int>                          n_states{ 0 };
thread_local const ggml_cuda_device_info * info_now = nullptr;

static state * state_of(ggml_backend_cuda_context & ctx) {
    if (n_states.load(std::memory_order_acquire) == 0) {
        return nullptr;
    }
    std::lock_guard<std::mutex> guard(lock);
    const auto                  found = states.find(&ctx);
    return found == states.end() ? nullptr : found->second.get();
}

static void give_up(state & st, const ggml_backend_cuda_context & ctx, const char * what, int code) {
    st.broken = true;
    (void) cudaGetLastError();
    GGML_LOG_WARN("prefill-sms has no effect on CUDA%d: %s (error %d)\n", ctx.device, what, code);
}

// Another number may do.
static std::unique_ptr<lane> refused(const ggml_backend_cuda_context & ctx, int n_sms, const char * what, int code) {
    (void) cudaGetLastError();
    GGML_LOG_WARN("prefill-sms %d is the same as 0 on CUDA%d: %s (error %d)\n", n_sms, ctx.device, what, code);
    return nullptr;
}

// The driver numbers devices as the runtime does; several of ggml's may be one of them.
static CUdevice device_of(const ggml_backend_cuda_context & ctx) {
    return CUdevice(ggml_cuda_info().devices[ctx.device].physical_device);
}

static bool ask_device(state & st, const ggml_backend_cuda_context & ctx) {
    if (!functions().is_complete) {
        give_up(st, ctx, "the driver has no green contexts (it needs CUDA 12.5)", 0);
        return false;
    }
    if (const CUresult code = functions().device_resource(device_of(ctx), &st.all, CU_DEV_RESOURCE_TYPE_SM)) {
        give_up(st, ctx, "the SMs of the device cannot be listed", code);
        return false;
    }
    if (const cudaError_t code = cudaEventCreateWithFlags(&st.handed, cudaEventDisableTiming)) {
        give_up(st, ctx, "an event cannot be made", code);
        return false;
    }
    const int major = ggml_cuda_info().devices[ctx.device].cc / 100;
    st.align        = major >= 9 ? 8 : major >= 7 ? 2 : 1;  // the guideline of the driver API for each architecture
    return true;
}

// nullptr when the driver refuses.
static std::unique_ptr<lane> make_lane(const state & st, const ggml_backend_cuda_context & ctx, int n_sms) {
    CUdevResource     part    = {};
    CUdevResourceDesc desc    = nullptr;
    CUstream          stream  = nullptr;
    unsigned          n_parts = 1;
    const driver &    cu      = functions();
    auto              made    = std::make_unique<lane>();
    if (const CUresult code = cu.split(&part, &n_parts, &st.all, nullptr, 0, unsigned(n_sms)); code || n_parts != 1) {
        return refused(ctx, n_sms, "its SMs cannot be divided so", code);
    }
    if (const CUresult code = cu.describe(&desc, &part, 1)) {
        return refused(ctx, n_sms, "a part of its SMs cannot be described", code);
    }
    CUgreenCtx green = nullptr;
    if (const CUresult code = cu.create(&green, desc, device_of(ctx), CU_GREEN_CTX_DEFAULT_STREAM)) {
        return refused(ctx, n_sms, "a green context cannot be made", code);
    }
    if (const CUresult code = cu.create_stream(&stream, green, CU_STREAM_NON_BLOCKING, 0)) {
        cu.destroy(green);
        return refused(ctx, n_sms, "a stream of a green context cannot be made", code);
    }
    made->green  = green;
    made->stream = stream;
    made->n_sms  = int(part.sm.smCount);
    made->info   = std::make_unique<ggml_cuda_device_info>(ggml_cuda_info());
    made->info->devices[ctx.device].nsm = made->n_sms;
    GGML_LOG_INFO("prefill-sms: prompts on CUDA%d compute on %d of %u SMs\n", ctx.device, made->n_sms,
                  st.all.sm.smCount);
    return made;
}

static lane & lane_for(state & st, const ggml_backend_cuda_context & ctx, int asked) {
    if (asked <= 0 || st.broken || (st.align == 0 && !ask_device(st, ctx))) {
        return st.whole;
    }
    const int align = int(st.align);
    const int n_sms = std::max(asked / align, 1) * align;  // the driver rounds up, a bound has to be rounded down
    if (n_sms >= int(st.all.sm.smCount)) {
        return st.whole;
    }
    const auto [place, is_new] = st.limited.try_emplace(n_sms);
    if (is_new) {
        place->second = make_lane(st, ctx, n_sms);
    }
    return place->second == nullptr ? st.whole : *place->second;
}

// cuBLAS forgets its workspace with every change of the stream.
static void tell_cublas(state & st, ggml_backend_cuda_context & ctx) {
    cublasHandle_t handle = ctx.cublas_handles[ctx.device][0];
    if (handle == nullptr) {
        st.cublas_lane = st.current;  // if this graph needs one, it is made with the context's stream
        return;
    }
    if (st.cublas_lane == st.current && st.cublas_sms == st.current->n_sms) {
        return;
    }
    CUBLAS_CHECK(cublasSetStream(handle, st.current->stream));
    CUBLAS_CHECK(cublasSetWorkspace(handle, ctx.cublas_workspaces[ctx.device][0], ctx.cublas_workspace_sizes[ctx.device]));
    CUBLAS_CHECK(cublasSetSmCountTarget(handle, st.current->n_sms));
    st.cublas_lane = st.current;
    st.cublas_sms  = st.current->n_sms;
}

static void change_to(state & st, ggml_backend_cuda_context & ctx, lane & next) {
    if (st.current == &next) {
        return;
    }
    cudaError_t code = cudaEventRecord(st.handed, st.current->stream);
    if (code == cudaSuccess) {
        code = cudaStreamWaitEvent(next.stream, st.handed, 0);
    }
    if (code != cudaSuccess) {
        give_up(st, ctx, "streams of two sizes cannot be put in an order", code);
        return;
    }
#ifdef USE_CUDA_GRAPH
    st.current->parked = std::move(ctx.cuda_graphs);
    ctx.cuda_graphs    = std::move(next.parked);
    next.parked.clear();
#endif
    ctx.streams[ctx.device][0] = next.stream;
    st.current                 = &next;
}

}  // namespace

void added(ggml_backend_cuda_context & ctx) {
    if (!mg_switch_value(MG_PREFILL_STREAM)) {
        return;
    }
    std::lock_guard<std::mutex> guard(lock);
    states.emplace(&ctx, std::make_unique<state>());
    n_states.store(int(states.size()), std::memory_order_release);
}

void removed(ggml_backend_cuda_context & ctx) {
    std::unique_ptr<state> st;
    {
        std::lock_guard<std::mutex> guard(lock);
        const auto                  found = states.find(&ctx);
        if (found == states.end()) {
            return;
        }
        st = std::move(found->second);
        states.erase(found);
        n_states.store(int(states.size()), std::memory_order_release);
    }
    ggml_cuda_set_device(ctx.device);
    if (st->whole.stream != nullptr) {
        CUDA_CHECK(cudaStreamSynchronize(ctx.stream()));  // the current stream has waited for the ones before it
        if (st->current != &st->whole) {
#ifdef USE_CUDA_GRAPH
            ctx.cuda_graphs.clear();
#endif
            ctx.streams[ctx.device][0] = st->whole.stream;  // the one that the context itself destroys
            st->current                = &st->whole;
            tell_cublas(*st, ctx);
        }
    }
    if (st->handed != nullptr) {
        CUDA_CHECK(cudaEventDestroy(st->handed));
    }
}

queuing::queuing(ggml_backend_cuda_context & ctx) {
    state * st = state_of(ctx);
    if (st == nullptr) {
        return;
    }
    if (st->whole.stream == nullptr) {
        st->whole.stream = ctx.stream();
    }
    change_to(*st, ctx, lane_for(*st, ctx, mg_switch_value(MG_PREFILL_SMS)));
    tell_cublas(*st, ctx);
    if (st->current != &st->whole) {
        info_now = st->current->info.get();
        mg_trace_host(MG_TRACE_LIMITED, st->current->n_sms);
    }
}

queuing::~queuing() {
    info_now = nullptr;
}

const ggml_cuda_device_info * info() {
    return info_now;
}

}  // namespace prefill_sms

#endif
