#include "mg_trace.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "ggml-backend.h"

namespace {

const char * const names[MG_TRACE_COUNT] = { "ubatch", "reused",  "rebuilt",   "spared",    "built",
                                             "kept",   "limited", "realloc",   "allocated", "inputs",
                                             "split",  "copied",  "submitted", "begin",     "end",
                                             "tiled",  "eager",   "drained",   "unwaited",  "fixup" };

std::atomic<int64_t> counts[MG_TRACE_COUNT];

// Beyond this nothing is kept: a forgotten switch must not eat the memory.
constexpr size_t n_stamps_max = 1 << 20;

struct stamp {
    int64_t       ns;
    mg_trace_what what;
    int32_t       id;
    std::string   device;
};

std::mutex         mutex;
std::vector<stamp> stamps;

int64_t now_ns() {
    return std::chrono::steady_clock::now().time_since_epoch() / std::chrono::nanoseconds(1);
}

void keep(stamp && s) {
    std::lock_guard<std::mutex> lock(mutex);
    if (stamps.size() < n_stamps_max) {
        stamps.push_back(std::move(s));
    }
}

// One thread per queue: it waits for the events in the order in which they were recorded and reads the clock.
class watcher {
public:
    explicit watcher(ggml_backend_t backend)
        : device(ggml_backend_get_device(backend)), name(ggml_backend_name(backend)), thread([this] { run(); }) {}

    ~watcher() {
        {
            std::lock_guard<std::mutex> lock(own);
            closing = true;
        }
        wake.notify_one();
        thread.join();
        for (ggml_backend_event_t event : idle) {
            ggml_backend_event_free(event);
        }
    }

    void note(mg_trace_what what, int32_t id, ggml_backend_t backend) {
        std::lock_guard<std::mutex> lock(own);
        ggml_backend_event_t        event = nullptr;
        if (idle.empty()) {
            event = ggml_backend_event_new(device);
        } else {
            event = idle.back();
            idle.pop_back();
        }
        if (event) {
            ggml_backend_event_record(event, backend);
            pending.push_back({ event, what, id });
            wake.notify_one();
        }
    }

private:
    struct moment {
        ggml_backend_event_t event;
        mg_trace_what        what;
        int32_t              id;
    };

    void run() {
        std::unique_lock<std::mutex> lock(own);
        while (true) {
            wake.wait(lock, [this] { return closing || !pending.empty(); });
            if (pending.empty()) {
                return;
            }
            const moment m = pending.front();
            pending.pop_front();
            lock.unlock();
            ggml_backend_event_synchronize(m.event);
            keep({ now_ns(), m.what, m.id, name });
            lock.lock();
            idle.push_back(m.event);
        }
    }

    ggml_backend_dev_t                device;
    std::string                       name;
    std::mutex                        own;
    std::condition_variable           wake;
    std::deque<moment>                pending;
    std::vector<ggml_backend_event_t> idle;
    bool                              closing = false;
    std::thread                       thread;  // last: it uses the others
};

// Never destroyed: at exit the device's driver may be gone before our destructors run.
auto & watchers = *new std::map<ggml_backend_t, std::unique_ptr<watcher>>;
auto & gate     = *new std::mutex;

}  // namespace

void mg_trace_host(mg_trace_what what, int32_t id) {
    counts[what].fetch_add(1, std::memory_order_relaxed);
    if (mg_switch_value(MG_TRACE)) {
        keep({ now_ns(), what, id, "" });
    }
}

void mg_trace_device(mg_trace_what what, int32_t id, ggml_backend_t backend) {
    if (!mg_switch_value(MG_TRACE)) {
        return;
    }
    ggml_backend_dev_t     device = ggml_backend_get_device(backend);
    ggml_backend_dev_props props;
    if (!device) {
        return;
    }
    std::lock_guard<std::mutex> lock(gate);
    auto                        found = watchers.find(backend);
    if (found == watchers.end()) {
        ggml_backend_dev_get_props(device, &props);
        // A backend without events gets an empty place, so that it is asked once.
        found = watchers.emplace(backend, props.caps.events ? std::make_unique<watcher>(backend) : nullptr).first;
    }
    if (found->second) {
        found->second->note(what, id, backend);
    }
}

int64_t mg_trace_count(const char * name) {
    for (int i = 0; name && i < MG_TRACE_COUNT; ++i) {
        if (std::strcmp(names[i], name) == 0) {
            return counts[i].load(std::memory_order_relaxed);
        }
    }
    return -1;
}

int32_t mg_trace_write(const char * path) {
    {
        std::lock_guard<std::mutex> lock(gate);
        watchers.clear();
    }
    std::vector<stamp> taken;
    {
        std::lock_guard<std::mutex> lock(mutex);
        taken.swap(stamps);
    }
    std::FILE * file = std::fopen(path, "w");
    if (!file) {
        return -1;
    }
    std::stable_sort(taken.begin(), taken.end(), [](const stamp & a, const stamp & b) { return a.ns < b.ns; });
    std::fputs("[", file);
    for (size_t i = 0; i < taken.size(); ++i) {
        const stamp & s = taken[i];
        std::fprintf(file, "%s[%.1f, \"%s\", %d, \"%s\"]", i ? ",\n" : "", (s.ns - taken[0].ns) / 1e3, names[s.what],
                     s.id, s.device.c_str());
    }
    std::fputs("]\n", file);
    return std::fclose(file) == 0 ? (int32_t) taken.size() : -1;
}
