// A mark behind what a context has been given to compute so far, on each of its devices.
#pragma once

#include <vector>

#include "ggml-backend-impl.h"
#include "ggml-cpp.h"
#include "llama-context.h"

namespace mg {

class fence {
public:
    // On the thread that decodes ctx.
    explicit fence(llama_context * ctx) {
        ggml_backend_sched_t sched = ctx->get_sched();
        for (int i = 0; sched && i < ggml_backend_sched_get_n_backends(sched); ++i) {
            ggml_backend_t         backend = ggml_backend_sched_get_backend(sched, i);
            ggml_backend_dev_t     dev     = ggml_backend_get_device(backend);
            ggml_backend_event_ptr event(dev && backend->iface.event_record ? ggml_backend_event_new(dev) : nullptr);
            if (event) {
                ggml_backend_event_record(event.get(), backend);
                events.push_back(std::move(event));
            } else {
                ggml_backend_synchronize(backend);
            }
        }
    }

    // Any thread.
    void wait() const {
        for (const auto & event : events) {
            ggml_backend_event_synchronize(event.get());
        }
    }

    // What is given to `backend` from now on waits for what its device had to compute then.
    void before(ggml_backend_t backend) const {
        for (const auto & event : events) {
            if (event->device == ggml_backend_get_device(backend)) {
                ggml_backend_event_wait(backend, event.get());
            }
        }
    }

private:
    std::vector<ggml_backend_event_ptr> events;
};

}  // namespace mg
