#include "context.hpp"

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <sstream>
#include <string_view>

#include <ucs/config/global_opts.h>

#include "status.hpp"

namespace kvrdma::ucx {

namespace {

struct Setting {
    const char *name, *value;
};

// What we set unless the user's environment does. Each names its reason.
constexpr Setting kDefaults[] = {
    {"MAX_RMA_RAILS", "2"},                // one rail leaves half of a two-port machine idle
    {"CUDA_IPC_ENABLE_GET_ZCOPY", "y"},    // else pulls between GPUs without NVLink are staged, 100x slower
    {"RCACHE_PURGE_ON_FORK", "y"},         // a child must not inherit cached registrations
    {"KEEPALIVE_INTERVAL", "1s"},          // notices a dead peer of an idle RDMA endpoint; TCP notices by itself
    {"TCP_CONN_NB", "y"},                  // else a host that drops packets stops the thread, and all peers, for minutes
    {"TCP_TX_SEG_SIZE", "64k"},            // served reads come in pieces of this size
    {"TCP_RX_SEG_SIZE", "128k"},
};

bool user_set(const char *name) { return std::getenv((std::string("UCX_") + name).c_str()) != nullptr; }

// UCX prints warnings for what we report as typed errors.
void quiet_logs() {
    if (!user_set("LOG_LEVEL"))
        (void)ucs_global_opts_set_value("LOG_LEVEL", "fatal");
}

} // namespace

Context::Context() {
    quiet_logs();
    ucp_config_t *config = nullptr;
    throw_unless_ok(ucp_config_read(nullptr, nullptr, &config), "TransportUnavailableError",
                    "UCX cannot read its configuration; check the UCX_* environment variables");
    std::unique_ptr<ucp_config_t, decltype(&ucp_config_release)> owner(config, &ucp_config_release);
    const std::string known = printed(
        [&](FILE *out) { ucp_config_print(config, out, nullptr, UCS_CONFIG_PRINT_CONFIG); });
    refuses_emulation_ = known.find("PROTO_EMULATION_ENABLE=") != std::string::npos;
    aborts_half_open_ = !refuses_emulation_;
    for (const Setting &setting : kDefaults)
        if (!user_set(setting.name)) // a version that does not know a setting says so; that is no reason to stop
            (void)ucp_config_modify(config, setting.name, setting.value);
    if (aborts_half_open_) { // old ones know the settings of their transports without the transport's name
        for (const Setting &setting : {Setting{"TCP_CONN_NB", "y"}, {"TCP_TX_SEG_SIZE", "64k"}, {"TCP_RX_SEG_SIZE", "128k"}})
            if (!user_set(setting.name))
                (void)ucp_config_modify(config, setting.name + std::strlen("TCP_"), setting.value);
    }
    if (refuses_emulation_) // whatever the user set: messages.hpp says why
        throw_unless_ok(ucp_config_modify(config, "PROTO_EMULATION_ENABLE", "n"), "TransportUnavailableError",
                        "UCX refuses UCX_PROTO_EMULATION_ENABLE=n");
    else if (known.find("PROTO_ENABLE=y") != std::string::npos && known.find("PROTOS=") != std::string::npos)
        // 1.18 has no such setting, but can do without the protocol that emulates GET.
        refuses_emulation_ = ucp_config_modify(config, "PROTOS", "^get/am/bcopy") == UCS_OK;

    ucp_params_t params = {};
    params.field_mask = UCP_PARAM_FIELD_FEATURES | UCP_PARAM_FIELD_MT_WORKERS_SHARED;
    params.features = UCP_FEATURE_RMA | UCP_FEATURE_AM | UCP_FEATURE_WAKEUP;
    params.mt_workers_shared = 1; // memory is registered by callers while the thread makes progress
    // Built against newer headers, asked for as 1.13: an older library refuses a plain ucp_init.
    throw_unless_ok(ucp_init_version(1, 13, &params, config, &handle_), "TransportUnavailableError",
                    "UCX " + ucx_version() + " cannot open a context; do UCX_TLS and UCX_NET_DEVICES name something?");
    query();
}

Context::~Context() {
    if (!left_open_)
        ucp_cleanup(handle_);
}

void Context::query() {
    ucp_context_attr_t attr = {};
    attr.field_mask = UCP_ATTR_FIELD_MEMORY_TYPES;
    if (ucp_context_query(handle_, &attr) == UCS_OK)
        memory_types_ = attr.memory_types;
    // "#      resource 1  :  md 1  dev 1  flags -- tcp/eth0"
    std::istringstream lines(printed([&](FILE *out) { ucp_context_print_info(handle_, out); }));
    for (std::string line; std::getline(lines, line);)
        if (const size_t at = line.find(" -- "); at != std::string::npos && line.find(" resource ") < at)
            resources_.push_back(line.substr(at + 4));
}

ucp_mem_h Context::map(void *addr, size_t nbytes, ucs_memory_type_t type) const {
    ucp_mem_map_params_t params = {};
    params.field_mask =
        UCP_MEM_MAP_PARAM_FIELD_ADDRESS | UCP_MEM_MAP_PARAM_FIELD_LENGTH | UCP_MEM_MAP_PARAM_FIELD_MEMORY_TYPE;
    params.address = addr;
    params.length = nbytes;
    params.memory_type = type;
    ucp_mem_h memh = nullptr;
    char where[80];
    std::snprintf(where, sizeof where, "UCX cannot register %zu bytes at %p", nbytes, addr);
    throw_unless_ok(ucp_mem_map(handle_, &params, &memh), "RegistrationError",
                    std::string(where) + "; check ulimit -l (memlock), and for GPU memory nvidia-peermem or dmabuf");
    return memh;
}

void Context::unmap(ucp_mem_h memh) const noexcept { (void)ucp_mem_unmap(handle_, memh); }

std::string Context::pack_rkey(ucp_mem_h memh) const {
    void *buffer = nullptr;
    size_t nbytes = 0;
    throw_unless_ok(ucp_rkey_pack(handle_, memh, &buffer, &nbytes), "RegistrationError",
                    "UCX cannot export the key of registered memory");
    std::string rkey(static_cast<const char *>(buffer), nbytes);
    ucp_rkey_buffer_release(buffer);
    return rkey;
}

std::string printed(const std::function<void(FILE *)> &print) {
    char *text = nullptr;
    size_t nbytes = 0;
    FILE *stream = open_memstream(&text, &nbytes);
    if (!stream)
        throw StatusError("TransportError", "open_memstream failed: out of memory?", errno);
    print(stream);
    std::fclose(stream);
    std::unique_ptr<char, decltype(&std::free)> owner(text, &std::free);
    return {text, nbytes};
}

std::string joined(const std::vector<std::string> &words) {
    std::string all;
    for (const std::string &word : words)
        all += (all.empty() ? "" : " ") + word;
    return all;
}

std::string ucx_version() {
    unsigned major = 0, minor = 0, release = 0;
    ucp_get_version(&major, &minor, &release);
    return std::to_string(major) + "." + std::to_string(minor) + "." + std::to_string(release);
}

bool is_one_sided(const std::string &transport) noexcept {
    // Hardware READ, or a copy the reader's own CPU or GPU makes; tcp, ud and self have no GET of registered memory.
    constexpr std::string_view kKnown[] = {"rc_verbs", "rc_mlx5",  "dc_mlx5", "gga_mlx5", "srd", "rc_x",
                                           "dc_x",     "cuda_ipc", "cma",     "xpmem",    "knem", "rocm_ipc", "ze_ipc"};
    return std::find(std::begin(kKnown), std::end(kKnown), transport) != std::end(kKnown);
}

} // namespace kvrdma::ucx
