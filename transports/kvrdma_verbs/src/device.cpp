#include "device.hpp"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fcntl.h>
#include <utility>

#include "errors.hpp"

namespace kvrdma::verbs {

namespace {

constexpr int kMaxSge = 8, kMaxRequests = 256;
constexpr int kAccess = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_READ;

void make_nonblocking(int fd) { (void)::fcntl(fd, F_SETFL, ::fcntl(fd, F_GETFL) | O_NONBLOCK); }

} // namespace

Device::Device(const PortChoice &choice) : choice_(choice), name_(choice.device + ":" + std::to_string(choice.port)) {
    try {
        open();
    } catch (...) {
        release();
        throw;
    }
}

Device::~Device() { release(); }

void Device::release() noexcept {
    if (channel_)
        library().destroy_comp_channel(std::exchange(channel_, nullptr));
    if (pd_)
        library().dealloc_pd(std::exchange(pd_, nullptr));
    if (context_)
        library().close_device(std::exchange(context_, nullptr));
}

void Device::open() {
    ibv_device **list = library().get_device_list(nullptr);
    for (ibv_device **each = list; each && *each && !context_; ++each)
        if (choice_.device == library().get_device_name(*each))
            context_ = library().open_device(*each);
    const int error = errno;
    if (list)
        library().free_device_list(list);
    const auto refuse = [&](const char *what, int code) {
        throw StatusError("TransportUnavailableError", name_ + ": " + what + ": " + std::strerror(code) +
                                                           "; see /dev/infiniband (is it in the container?), "
                                                           "ibverbs-providers and ulimit -l", code);
    };
    if (!context_)
        refuse("cannot be opened", error);
    ibv_device_attr attr{};
    if (const int code = library().query_device(context_, &attr))
        refuse("cannot be asked what it can do", code);
    const ibv_port_attr port = query_port();
    pd_ = library().alloc_pd(context_);
    channel_ = pd_ ? library().create_comp_channel(context_) : nullptr;
    ibv_gid gid{};
    if (!channel_ || library().query_gid(context_, choice_.port, choice_.gid_index, &gid))
        refuse("no protection domain, completion channel or GID", errno);
    make_nonblocking(channel_->fd);
    make_nonblocking(context_->async_fd);
    std::memcpy(address_.gid.data(), gid.raw, sizeof gid.raw);
    address_.lid = port.lid;
    address_.mtu = static_cast<uint8_t>(port.active_mtu);
    address_.ethernet = port.link_layer == IBV_LINK_LAYER_ETHERNET;
    // Some providers count the segments of a READ apart, some give 0 there.
    const int sges = attr.max_sge_rd > 0 ? std::min(attr.max_sge, attr.max_sge_rd) : attr.max_sge;
    max_sge_ = static_cast<uint32_t>(std::clamp(sges, 1, kMaxSge));
    max_requests_ = static_cast<uint32_t>(std::clamp(attr.max_qp_wr, 1, kMaxRequests));
    max_reads_out_ = static_cast<uint8_t>(std::clamp(attr.max_qp_init_rd_atom, 1, 255));
    max_reads_in_ = static_cast<uint8_t>(std::clamp(attr.max_qp_rd_atom, 1, 255));
    max_message_ = port.max_msg_sz;
}

// By way of the context: the function of the same name in the library fills an older, shorter structure.
ibv_port_attr Device::query_port() const {
    ibv_port_attr attr{};
    verbs_context *const extended = verbs_get_ctx_op(context_, query_port);
    const int code = extended ? extended->query_port(context_, choice_.port, &attr, sizeof attr) : EOPNOTSUPP;
    if (code)
        throw StatusError("TransportUnavailableError", name_ + ": its port cannot be queried: " + std::strerror(code), code);
    return attr;
}

bool Device::active() const noexcept {
    try {
        return query_port().state == IBV_PORT_ACTIVE;
    } catch (const StatusError &) {
        return false; // a NIC that was taken away answers nothing any more
    }
}

ibv_mr *Device::register_host(void *addr, size_t nbytes) const {
    ibv_mr *mr = library().reg_mr(pd_, addr, nbytes, kAccess);
    if (!mr)
        throw StatusError("RegistrationError",
                          name_ + " cannot register " + std::to_string(nbytes) + " bytes: " + std::strerror(errno) +
                              (errno == ENOMEM ? "; raise the limit of locked memory (ulimit -l unlimited)"
                                               : "; is it memory of this process?"),
                          errno);
    return mr;
}

ibv_mr *Device::register_cuda(uint64_t addr, size_t nbytes, int dmabuf, uint64_t offset) const {
    ibv_mr *mr = nullptr;
    if (dmabuf >= 0 && library().reg_dmabuf_mr)
        mr = library().reg_dmabuf_mr(pd_, offset, nbytes, addr, dmabuf, kAccess);
    if (!mr)
        mr = library().reg_mr(pd_, reinterpret_cast<void *>(addr), nbytes, kAccess);
    if (!mr)
        throw StatusError("RegistrationError",
                          name_ + " cannot register GPU memory: " + std::strerror(errno) +
                              "; load nvidia-peermem, or use a driver and kernel with dmabuf", errno);
    return mr;
}

} // namespace kvrdma::verbs
