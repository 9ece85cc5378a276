#include "ggml-backend.h"
#include "mg.h"
#include "mg_error.h"

#include <string>

int32_t mg_device_count(void) {
    return mg::guarded("mg_device_count", 0, [] { return (int32_t) ggml_backend_dev_count(); });
}

int32_t mg_device_get(int32_t i, struct mg_device * out) {
    return mg::guarded("mg_device_get", -1, [&] {
        if (i < 0 || (size_t) i >= ggml_backend_dev_count()) {
            mg::set_error("there is no device " + std::to_string(i) + "; mg_device_count() says how many there are");
            return -1;
        }
        ggml_backend_dev_t     dev = ggml_backend_dev_get(i);
        ggml_backend_dev_props props;
        ggml_backend_dev_get_props(dev, &props);
        out->name         = props.name;
        out->description  = props.description;
        out->backend      = ggml_backend_reg_name(ggml_backend_dev_backend_reg(dev));
        out->device_id    = props.device_id ? props.device_id : "";
        out->type         = props.type;
        out->is_async     = props.caps.async;
        out->has_events   = props.caps.events;
        out->memory_free  = props.memory_free;
        out->memory_total = props.memory_total;
        return 0;
    });
}
