// Two made-up devices that compute on threads of their own, and ggml's
// scheduler over them, for test_wait_once.py.
//
// usage: wait_once_program CPU_BACKEND SWITCH N_STEPS SEED
//
// A step computes h = Wa x on the first device, then y = Wb h + u + r on the second; x and u are the user's, r = u + u
// is computed on the CPU. Prints for each step a hash of y and what the host did at the second device: "wait", "queue"
// a copy from the first one, "copy" from memory, "submit" the graph. With the switch on the first device computes only
// once the second one has its graph, which never comes if the host waits for it. At the end: how often mg_trace counted
// "unwaited", and how often the first device gave up.
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "ggml-alloc.h"
#include "ggml-backend-impl.h"
#include "ggml-backend.h"
#include "ggml.h"
#include "mg_switch.h"
#include "mg_trace.h"

namespace {

std::string host_log;       // what the host does at the second device
bool        holds = false;  // the first device computes only once the second one has its graph

struct device {
    std::string                       name;
    ggml_backend_t                    cpu;
    ggml_backend_buffer_type          buft{};
    ggml_backend_device               dev{};
    ggml_backend                      backend{};
    std::mutex                        mutex;
    std::condition_variable           changed;
    std::deque<std::function<void()>> tasks;
    size_t                            n_queued = 0, n_done = 0;
    bool                              is_over   = false;
    bool                              is_second = false;
    std::thread                       thread;

    void queue(std::function<void()> task) {
        std::lock_guard lock(mutex);
        tasks.push_back(std::move(task));
        ++n_queued;
        changed.notify_all();
    }

    void wait() {
        std::unique_lock lock(mutex);
        changed.wait(lock, [&] { return n_done == n_queued; });
    }

    void work() {
        std::unique_lock lock(mutex);
        while (true) {
            changed.wait(lock, [&] { return is_over || !tasks.empty(); });
            if (tasks.empty()) {
                return;
            }
            auto task = std::move(tasks.front());
            tasks.pop_front();
            lock.unlock();
            task();
            lock.lock();
            ++n_done;
            changed.notify_all();
        }
    }
};

device & of(ggml_backend_t backend) {
    return *static_cast<device *>(backend->context);
}

struct signal {
    std::mutex              mutex;
    std::condition_variable changed;
    bool                    is_set = false;

    void set() {
        std::lock_guard lock(mutex);
        is_set = true;
        changed.notify_all();
    }

    bool wait() {
        std::unique_lock lock(mutex);
        return changed.wait_for(lock, std::chrono::seconds(20), [&] { return is_set; });
    }
};

std::shared_ptr<signal> handed_over;  // the second device has this step's graph
std::atomic<int>        n_stuck{ 0 };

bool queue_copy(ggml_backend_t from, ggml_backend_t to, const ggml_tensor * src, ggml_tensor * dst) {
    if (from->iface.cpy_tensor_async != queue_copy || to->iface.cpy_tensor_async != queue_copy) {
        return false;
    }
    host_log += of(to).is_second ? " queue" : "";
    auto   copied = std::make_shared<signal>();
    void * source = src->data;
    void * target = dst->data;
    size_t n      = ggml_nbytes(src);
    of(from).queue([=] {
        std::memcpy(target, source, n);
        copied->set();
    });
    of(to).queue([=] { copied->wait(); });
    return true;
}

ggml_status compute(ggml_backend_t backend, ggml_cgraph * graph) {
    device &   d      = of(backend);
    const bool second = d.is_second;
    host_log += second ? " submit" : "";
    d.queue([&d, graph, second, ready = handed_over] {
        if (!second && holds && !ready->wait()) {
            ++n_stuck;
        }
        ggml_backend_graph_compute(d.cpu, graph);
    });
    if (second) {
        handed_over->set();
    }
    return GGML_STATUS_SUCCESS;
}

void make(device & d, const char * name, ggml_backend_t cpu, bool is_second) {
    static ggml_guid guid     = { 7 };
    d.name                    = name;
    d.cpu                     = cpu;
    d.is_second               = is_second;
    d.buft                    = *ggml_backend_get_default_buffer_type(cpu);
    d.buft.device             = &d.dev;
    d.buft.context            = &d;
    d.buft.iface.is_host      = [](ggml_backend_buffer_type_t) { return false; };
    d.buft.iface.alloc_buffer = [](ggml_backend_buffer_type_t buft, size_t size) {
        device * of_buft = static_cast<device *>(buft->context);
        auto *   buffer  = ggml_backend_buft_alloc_buffer(ggml_backend_get_default_buffer_type(of_buft->cpu), size);
        buffer->buft     = buft;
        static auto set  = buffer->iface.set_tensor;
        buffer->iface.set_tensor = [](ggml_backend_buffer_t b, ggml_tensor * t, const void * data, size_t at,
                                      size_t n) {
            host_log += static_cast<device *>(b->buft->context)->is_second ? " copy" : "";
            set(b, t, data, at, n);
        };
        buffer->iface.cpy_tensor = nullptr;
        return buffer;
    };
    d.dev.context        = &d;
    d.dev.iface.get_name = [](ggml_backend_dev_t dev) { return static_cast<device *>(dev->context)->name.c_str(); };
    d.dev.iface.get_type = [](ggml_backend_dev_t) { return GGML_BACKEND_DEVICE_TYPE_GPU; };
    d.dev.iface.get_buffer_type = [](ggml_backend_dev_t dev) { return &static_cast<device *>(dev->context)->buft; };
    d.dev.iface.supports_op     = [](ggml_backend_dev_t, const ggml_tensor *) { return true; };
    d.dev.iface.supports_buft   = [](ggml_backend_dev_t dev, ggml_backend_buffer_type_t buft) {
        return buft == &static_cast<device *>(dev->context)->buft;
    };
    d.backend.guid                   = &guid;
    d.backend.context                = &d;
    d.backend.device                 = &d.dev;
    d.backend.iface.get_name         = [](ggml_backend_t b) { return of(b).name.c_str(); };
    d.backend.iface.cpy_tensor_async = queue_copy;
    d.backend.iface.graph_compute    = compute;
    d.backend.iface.synchronize      = [](ggml_backend_t b) {
        host_log += of(b).is_second ? " wait" : "";
        of(b).wait();
    };
    d.thread = std::thread([&d] { d.work(); });
}

}  // namespace

int main(int argc, char ** argv) {
    if (argc != 5 || !ggml_backend_load(argv[1])) {
        std::fprintf(stderr, "usage: wait_once_program CPU_BACKEND SWITCH N_STEPS SEED\n");
        return 2;
    }
    holds = std::atoi(argv[2]) != 0;
    mg_switch_set("wait-once", holds);
    const int      n_steps = std::atoi(argv[3]);
    const unsigned seed    = std::atoi(argv[4]);
    auto           new_cpu = [] { return ggml_backend_init_by_type(GGML_BACKEND_DEVICE_TYPE_CPU, nullptr); };
    ggml_backend_t cpu     = new_cpu();
    device         first, second;
    make(first, "first", new_cpu(), false);
    make(second, "second", new_cpu(), true);

    constexpr int64_t n       = 64;
    ggml_context *    weights = ggml_init({ 1 << 20, nullptr, true });
    ggml_tensor *     wa      = ggml_new_tensor_2d(weights, GGML_TYPE_F32, n, n);
    ggml_tensor *     wb      = ggml_new_tensor_2d(weights, GGML_TYPE_F32, n, n);
    std::mt19937      chance(seed);
    for (auto [w, d] : { std::pair{ wa, &first }, std::pair{ wb, &second } }) {
        auto * buffer = ggml_backend_buft_alloc_buffer(&d->buft, ggml_nbytes(w));
        ggml_backend_buffer_set_usage(buffer, GGML_BACKEND_BUFFER_USAGE_WEIGHTS);
        ggml_backend_tensor_alloc(buffer, w, ggml_backend_buffer_get_base(buffer));
        std::vector<float> values(n * n);
        for (float & value : values) {
            value = int(chance() % 17) - 8;
        }
        ggml_backend_tensor_set(w, values.data(), 0, ggml_nbytes(w));
    }

    ggml_backend_t             backends[] = { &first.backend, &second.backend, cpu };
    ggml_backend_buffer_type_t bufts[]    = { &first.buft, &second.buft, ggml_backend_get_default_buffer_type(cpu) };
    ggml_backend_sched_t       sched      = ggml_backend_sched_new(backends, bufts, 3, 64, false, false);
    for (int step = 0; step < n_steps; ++step) {
        ggml_context * c = ggml_init({ 1 << 20, nullptr, true });
        ggml_tensor *  x = ggml_new_tensor_1d(c, GGML_TYPE_F32, n);
        ggml_tensor *  u = ggml_new_tensor_1d(c, GGML_TYPE_F32, n);
        ggml_set_input(x);
        ggml_set_input(u);
        ggml_tensor * r = ggml_add(c, u, u);
        ggml_tensor * h = ggml_mul_mat(c, wa, x);
        ggml_tensor * y = ggml_add(c, ggml_add(c, ggml_mul_mat(c, wb, h), u), r);
        ggml_set_output(y);
        ggml_backend_sched_set_tensor_backend(sched, r, cpu);
        ggml_backend_sched_set_tensor_backend(sched, y, &second.backend);
        ggml_cgraph * graph = ggml_new_graph(c);
        ggml_build_forward_expand(graph, r);
        ggml_build_forward_expand(graph, y);
        if (!ggml_backend_sched_alloc_graph(sched, graph)) {
            return 3;
        }
        std::vector<float> xs(n), us(n), ys(n);
        for (int i = 0; i < n; ++i) {
            xs[i] = int(chance() % 9) - 4;
            us[i] = int(chance() % 9) - 4;
        }
        ggml_backend_tensor_set(x, xs.data(), 0, ggml_nbytes(x));
        ggml_backend_tensor_set(u, us.data(), 0, ggml_nbytes(u));
        host_log.clear();
        handed_over = std::make_shared<signal>();
        if (ggml_backend_sched_graph_compute_async(sched, graph) != GGML_STATUS_SUCCESS) {
            return 4;
        }
        const std::string log = host_log;
        ggml_backend_sched_synchronize(sched);
        ggml_backend_tensor_get(y, ys.data(), 0, ggml_nbytes(y));
        double hash = 0;
        for (int i = 0; i < n; ++i) {
            hash = hash * 1.01 + ys[i];
        }
        std::printf("%.6f%s\n", hash, log.c_str());
        ggml_backend_sched_reset(sched);
        ggml_free(c);
    }
    std::printf("%d %d\n", int(mg_trace_count("unwaited")), n_stuck.load());
    for (device * d : { &first, &second }) {
        {
            std::lock_guard lock(d->mutex);
            d->is_over = true;
            d->changed.notify_all();
        }
        d->thread.join();
    }
    std::fflush(stdout);
    std::_Exit(0);
}
