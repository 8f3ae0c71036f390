// The functions of libibverbs this transport calls, found at run time: a host without RDMA needs no libibverbs.
// Posting, polling and arming are inline in its header and go straight to the NIC's provider.
#pragma once

#include <infiniband/verbs.h>

#undef ibv_reg_mr // a macro that would reach for a symbol of the library

namespace kvrdma::verbs {

struct Library {
    ibv_device **(*get_device_list)(int *);
    void (*free_device_list)(ibv_device **);
    const char *(*get_device_name)(ibv_device *);
    ibv_context *(*open_device)(ibv_device *);
    int (*close_device)(ibv_context *);
    int (*query_device)(ibv_context *, ibv_device_attr *);
    int (*query_gid)(ibv_context *, uint8_t, int, ibv_gid *);
    ibv_pd *(*alloc_pd)(ibv_context *);
    int (*dealloc_pd)(ibv_pd *);
    ibv_mr *(*reg_mr)(ibv_pd *, void *, size_t, int);
    ibv_mr *(*reg_dmabuf_mr)(ibv_pd *, uint64_t, size_t, uint64_t, int, int); // null in old versions
    int (*dereg_mr)(ibv_mr *);
    ibv_comp_channel *(*create_comp_channel)(ibv_context *);
    int (*destroy_comp_channel)(ibv_comp_channel *);
    ibv_cq *(*create_cq)(ibv_context *, int, void *, ibv_comp_channel *, int);
    int (*destroy_cq)(ibv_cq *);
    int (*get_cq_event)(ibv_comp_channel *, ibv_cq **, void **);
    void (*ack_cq_events)(ibv_cq *, unsigned);
    ibv_qp *(*create_qp)(ibv_pd *, ibv_qp_init_attr *);
    int (*modify_qp)(ibv_qp *, ibv_qp_attr *, int);
    int (*destroy_qp)(ibv_qp *);
    int (*get_async_event)(ibv_context *, ibv_async_event *);
    void (*ack_async_event)(ibv_async_event *);
    const char *(*wc_status_str)(ibv_wc_status);
    const char *(*event_type_str)(ibv_event_type);
};

// Throws TransportUnavailableError where there is no libibverbs.so.1.
const Library &library();

} // namespace kvrdma::verbs
