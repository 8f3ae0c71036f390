#include "endpoint.hpp"

#include <cstdlib>
#include <cstring>
#include <regex>

#include "wire_ids.hpp"

namespace kvrdma::ucx {

Endpoint::Endpoint(Shared &shared, std::shared_ptr<Peer> peer, PeerSpec spec, std::shared_ptr<Connecting> connecting)
    : shared_(shared), peer_(std::move(peer)), spec_(std::move(spec)), connecting_(std::move(connecting)),
      scratch_(shared.context, kChunks * kChunkBytes) {
    for (uint32_t chunk = 0; chunk < kChunks; ++chunk)
        free_chunks_.push_back(chunk);
}

Endpoint::~Endpoint() {
    for (ucp_rkey_h rkey : rkeys_)
        ucp_rkey_destroy(rkey);
    if (table_)
        ucp_rkey_destroy(table_);
}

std::string Endpoint::name() const { return "peer " + std::to_string(peer_->id); }

Failure Endpoint::failure_of(ucs_status_t status, const std::string &what) const {
    // A context told not to emulate cancels a GET for which it has no protocol.
    const bool refused = shared_.options.require_one_sided && status == UCS_ERR_CANCELED && !failing_;
    return {refused ? "NotOneSidedError" : kind_of(status), with_status(what, status), status};
}

void Endpoint::connect() {
    try {
        create();
        examine_lanes();
        send_hello();
    } catch (const StatusError &error) {
        close({error.kind(), error.what(), error.code()}, false);
    }
}

void Endpoint::create() {
    ucp_ep_params_t params = {};
    params.field_mask =
        UCP_EP_PARAM_FIELD_REMOTE_ADDRESS | UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE | UCP_EP_PARAM_FIELD_ERR_HANDLER;
    params.address = reinterpret_cast<const ucp_address_t *>(spec_.address.data());
    params.err_mode = shared_.options.peer_errors ? UCP_ERR_HANDLING_MODE_PEER : UCP_ERR_HANDLING_MODE_NONE;
    params.err_handler = {&Endpoint::on_error, this};
    throw_unless_ok(ucp_ep_create(shared_.worker, &params, &ep_), "ConnectError",
                    name() + " cannot be reached with the transports of this process; check UCX_TLS and "
                             "UCX_NET_DEVICES on both sides");
}

// Lines like "lane[0]:  2:tcp/lo.0 md[1] -> md[1]/tcp/sysdev[255] am keepalive wireup"; 1.13 can say it in no other way.
void Endpoint::examine_lanes() {
    static const std::regex lane(R"(lane\[\d+\]:\s*\d+:(\S+)/(\S+)\.\d+\s.*->([^\n]*))");
    static const std::regex reads(R"(\brma(_bw)?\b)"), reads_v1(R"(\brma\b)");
    const std::string text = printed([&](FILE *out) { ucp_ep_print_info(ep_, out); });
    std::string found, one_sided;
    for (std::sregex_iterator it(text.begin(), text.end(), lane), end; it != end; ++it) {
        const std::string transport = (*it)[1], device = transport + "/" + (*it)[2].str(), uses = (*it)[3];
        found += (found.empty() ? "" : " ") + device;
        // Before 1.16 a lane of bulk reads (rma_bw) serves rendezvous only, never GET.
        if (is_one_sided(transport) && std::regex_search(uses, shared_.context.can_refuse_emulation() ? reads : reads_v1))
            one_sided += (one_sided.empty() ? "" : " ") + device;
    }
    one_sided_ = !one_sided.empty();
    via_ = one_sided_ ? one_sided : found + " (emulated)";
    if (!one_sided_ && shared_.options.require_one_sided)
        throw StatusError("NotOneSidedError",
                          name() + " is reached over " + found +
                              ", which has no one-sided read: its CPU would have to serve every byte, and "
                              "require_one_sided rules that out. This process has: " +
                              joined(shared_.context.resources()) +
                              ". For RDMA install a UCX with verbs, set KVRDMA_UCX_LIB to it, and let UCX_NET_DEVICES "
                              "name an InfiniBand or RoCE device on both hosts",
                          UCS_ERR_UNSUPPORTED);
}

void Endpoint::send_hello() {
    hello_.peer = peer_->id;
    hello_.instance = spec_.instance;
    ucp_request_param_t param = {};
    param.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA | UCP_OP_ATTR_FIELD_FLAGS;
    param.cb.send = &Endpoint::on_hello_sent;
    param.user_data = this;
    param.flags = UCP_AM_SEND_FLAG_REPLY | UCP_AM_SEND_FLAG_EAGER;
    const ucs_status_ptr_t sent = ucp_am_send_nbx(ep_, kAskHello, &hello_, sizeof hello_, nullptr, 0, &param);
    if (UCS_PTR_IS_ERR(sent))
        throw_unless_ok(UCS_PTR_STATUS(sent), "ConnectError", name() + " cannot be greeted");
    if (sent)
        ++outstanding_;
}

void Endpoint::on_hello_sent(void *request, ucs_status_t status, void *self) {
    Endpoint &endpoint = *static_cast<Endpoint *>(self);
    --endpoint.outstanding_;
    if (status != UCS_OK)
        endpoint.fail({"ConnectError", with_status(endpoint.name() + " cannot be reached", status), status});
    ucp_request_free(request);
}

void Endpoint::on_hello(const Cookie &instance, const std::string &version) {
    if (closing_ || failing_ || !connecting_)
        return;
    try {
        if (instance != spec_.instance)
            throw StatusError("PeerIdentityError",
                              name() + " has restarted: another transport (UCX " + version +
                                  ") answers at this address; ask it for its new address and keys");
        unpack_keys();
        probe();
    } catch (const StatusError &error) {
        close({error.kind(), error.what(), error.code()}, false);
    }
}

void Endpoint::unpack_keys() {
    throw_unless_ok(ucp_ep_rkey_unpack(ep_, spec_.table_rkey.data(), &table_), "ConnectError",
                    name() + ": UCX cannot use its address");
    for (size_t i = 0; i < spec_.regions.size(); ++i) {
        ucp_rkey_h rkey = nullptr;
        throw_unless_ok(ucp_ep_rkey_unpack(ep_, spec_.regions[i].rkey.data(), &rkey), "ConnectError",
                        name() + ": UCX cannot use the key of region " + std::to_string(i));
        rkeys_.push_back(rkey);
    }
}

// Reads the peer's own cookie: the first one-sided read shows that the path works, or that there is none.
void Endpoint::probe() {
    ucp_request_param_t param = {};
    param.cb.send = &Endpoint::on_probe;
    param.user_data = this;
    const ucs_status_ptr_t got = get(scratch_.data(), sizeof(Cookie), spec_.table_addr, table_, param);
    if (UCS_PTR_IS_PTR(got))
        ++outstanding_;
    else
        probe_arrived(UCS_PTR_RAW_STATUS(got));
}

void Endpoint::on_probe(void *request, ucs_status_t status, void *self) {
    Endpoint &endpoint = *static_cast<Endpoint *>(self);
    --endpoint.outstanding_;
    ucp_request_free(request);
    endpoint.probe_arrived(status);
}

void Endpoint::probe_arrived(ucs_status_t status) {
    if (closing_ || failing_)
        return;
    if (status != UCS_OK)
        return fail(failure_of(status, name() + " (" + via_ + ") cannot be read"));
    if (std::memcmp(scratch_.data(), spec_.instance.data(), sizeof(Cookie)) != 0)
        return fail({"PeerIdentityError", name() + " has closed its transport; ask it for its new address", 0});
    connecting_->one_sided = one_sided_;
    connecting_->via = via_;
    std::exchange(connecting_, nullptr)->end({});
}

void Endpoint::on_error(void *self, ucp_ep_h, ucs_status_t status) {
    Endpoint &endpoint = *static_cast<Endpoint *>(self);
    endpoint.fail({endpoint.connecting_ ? "ConnectError" : "PeerLostError",
                   with_status(endpoint.name() + " (" + endpoint.via_ + ") is gone", status), status});
}

void Endpoint::fail(Failure why) {
    if (failing_ || closing_)
        return;
    failing_ = true;
    failure_ = std::move(why);
    shared_.failed.push_back(this);
}

// Nothing is reported before every request's callback has come: until then it may still write.
void Endpoint::close(Failure why, bool lost) {
    if (closing_)
        return;
    closing_ = true;
    failure_ = std::move(why);
    lost_ = lost && !connecting_;
    {
        std::lock_guard lock(peer_->mutex);
        peer_->gone = true;
        peer_->why = failure_.message;
    }
    posting_.clear();
    checking_.clear();
    arrived_.clear();
    if (!ep_) {
        closed_ = true;
        return;
    }
    ucp_request_param_t param = {};
    param.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA | UCP_OP_ATTR_FIELD_FLAGS;
    param.cb.send = &Endpoint::on_closed;
    param.user_data = this;
    param.flags = UCP_EP_CLOSE_FLAG_FORCE;
    const ucs_status_ptr_t closing = ucp_ep_close_nbx(std::exchange(ep_, nullptr), &param);
    closed_ = !UCS_PTR_IS_PTR(closing);
}

void Endpoint::on_closed(void *request, ucs_status_t, void *self) {
    static_cast<Endpoint *>(self)->closed_ = true;
    ucp_request_free(request);
}

void Endpoint::report() {
    while (!reads_.empty())
        end_read(*reads_.begin()->second);
    if (connecting_)
        connecting_->end(failure_);
    if (lost_)
        shared_.done.push({"PeerLostError", 0, peer_->id, 0, 0, 0, failure_.message, failure_.code});
}

} // namespace kvrdma::ucx
