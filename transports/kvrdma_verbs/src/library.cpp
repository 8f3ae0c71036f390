#include "library.hpp"

#include <dlfcn.h>
#include <string>

#include "errors.hpp"

namespace kvrdma::verbs {

namespace {

template <typename Function> void find(void *handle, const char *name, Function &function) {
    function = reinterpret_cast<Function>(dlsym(handle, name));
    if (!function)
        throw StatusError("TransportUnavailableError", std::string("libibverbs.so.1 has no ") + name + ": it is too old");
}

Library load() {
    void *handle = dlopen("libibverbs.so.1", RTLD_NOW);
    if (!handle)
        throw StatusError("TransportUnavailableError",
                          std::string("libibverbs cannot be loaded (") + dlerror() +
                              "): install the packages libibverbs1 and ibverbs-providers");
    Library found{};
    find(handle, "ibv_get_device_list", found.get_device_list);
    find(handle, "ibv_free_device_list", found.free_device_list);
    find(handle, "ibv_get_device_name", found.get_device_name);
    find(handle, "ibv_open_device", found.open_device);
    find(handle, "ibv_close_device", found.close_device);
    find(handle, "ibv_query_device", found.query_device);
    find(handle, "ibv_query_gid", found.query_gid);
    find(handle, "ibv_alloc_pd", found.alloc_pd);
    find(handle, "ibv_dealloc_pd", found.dealloc_pd);
    find(handle, "ibv_reg_mr", found.reg_mr);
    find(handle, "ibv_dereg_mr", found.dereg_mr);
    find(handle, "ibv_create_comp_channel", found.create_comp_channel);
    find(handle, "ibv_destroy_comp_channel", found.destroy_comp_channel);
    find(handle, "ibv_create_cq", found.create_cq);
    find(handle, "ibv_destroy_cq", found.destroy_cq);
    find(handle, "ibv_get_cq_event", found.get_cq_event);
    find(handle, "ibv_ack_cq_events", found.ack_cq_events);
    find(handle, "ibv_create_qp", found.create_qp);
    find(handle, "ibv_modify_qp", found.modify_qp);
    find(handle, "ibv_destroy_qp", found.destroy_qp);
    find(handle, "ibv_get_async_event", found.get_async_event);
    find(handle, "ibv_ack_async_event", found.ack_async_event);
    find(handle, "ibv_wc_status_str", found.wc_status_str);
    find(handle, "ibv_event_type_str", found.event_type_str);
    found.reg_dmabuf_mr = reinterpret_cast<decltype(found.reg_dmabuf_mr)>(dlsym(handle, "ibv_reg_dmabuf_mr"));
    return found;
}

} // namespace

const Library &library() {
    static const Library one = load();
    return one;
}

} // namespace kvrdma::verbs
