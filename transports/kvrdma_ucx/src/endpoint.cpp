#include "endpoint.hpp"

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <set>
#include <sstream>

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
    // Told not to emulate, UCX cancels a GET for which it has no protocol.
    const bool refused = status == UCS_ERR_CANCELED && !failing_;
    return {refused ? "NotOneSidedError" : kind_of(status), with_status(what, status), status};
}

void Endpoint::connect(uint64_t oldest_peer) {
    hello_.oldest = oldest_peer;
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
    params.err_mode = error_mode(shared_.options);
    params.err_handler = {&Endpoint::on_error, this};
    throw_unless_ok(ucp_ep_create(shared_.worker, &params, &ep_), "ConnectError",
                    name() + " cannot be reached with the transports of this process; check UCX_TLS and "
                             "UCX_NET_DEVICES on both sides");
}

// Lines like "#  lane[0]:  2:tcp/lo.0 md[1]  -> md[1]/tcp/sysdev[255] am keepalive": 1.13 can say it in no other way.
// A GET may take the lanes of bulk reads (rma_bw) where UCX can be told not to emulate it, and a probe proves it: they
// alone prove nothing, for 1.18 emulates GET over RC, too. Of 1.13, lines like "#  get[0]: 0..(inf)" tell its lanes.
void Endpoint::examine_lanes() {
    const std::string told = printed([&](FILE *out) { ucp_ep_print_info(ep_, out); });
    std::istringstream lines(told);
    for (std::string line; std::getline(lines, line);) {
        const size_t lane = line.find("lane["), arrow = line.find("->");
        char transport[64], device[64];
        int number = 0;
        if (lane == std::string::npos || arrow == std::string::npos ||
            std::sscanf(line.c_str() + lane, "lane[%d]: %*d:%63[^/]/%63s", &number, transport, device) != 3)
            continue;
        const std::string full = device, via = std::string(transport) + "/" + full.substr(0, full.rfind('.'));
        lanes_ += (lanes_.empty() ? "" : " ") + via;
        const bool reads = shared_.context.refuses_emulation()
                               ? line.find(" rma_bw#", arrow) != std::string::npos
                               : told.find(" get[" + std::to_string(number) + "]:") != std::string::npos;
        if (reads && is_one_sided(transport))
            one_sided_lanes_ += (one_sided_lanes_.empty() ? "" : " ") + via;
    }
    via_ = lanes_;
    if (one_sided_lanes_.empty() && shared_.options.require_one_sided)
        refuse_emulation(lanes_ + ", which has no one-sided read");
}

void Endpoint::refuse_emulation(const std::string &found) const {
    throw StatusError("NotOneSidedError",
                      name() + " is reached over " + found +
                          ": its CPU would have to serve every byte, and require_one_sided (--require-rdma, "
                          "KVRDMA_REQUIRE_ONE_SIDED) rules that out. This process has: " +
                          joined(shared_.context.resources()) +
                          ". For RDMA use a UCX with verbs (KVRDMA_UCX_LIB) and let UCX_NET_DEVICES name an InfiniBand or "
                          "RoCE device on both hosts; for GPU memory load nvidia-peermem or use dmabuf",
                      UCS_ERR_UNSUPPORTED);
}

void Endpoint::send_hello() {
    hello_.peer = peer_->id;
    hello_.instance = spec_.instance;
    const std::string &ours = shared_.worker_address;
    hello_.address_nbytes = static_cast<uint32_t>(ours.size());
    hello_.checksum = checksum_of(ours.data(), ours.size());
    ucp_request_param_t param = {};
    param.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA | UCP_OP_ATTR_FIELD_FLAGS;
    param.cb.send = &Endpoint::on_hello_sent;
    param.user_data = this;
    // REPLY makes UCX connect both ways, so that the peer's endpoint to us is the other end of this one.
    param.flags = UCP_AM_SEND_FLAG_REPLY | UCP_AM_SEND_FLAG_EAGER;
    const ucs_status_ptr_t sent =
        ucp_am_send_nbx(ep_, kAskHello, &hello_, sizeof hello_, ours.data(), ours.size(), &param);
    if (UCS_PTR_IS_ERR(sent))
        throw_unless_ok(UCS_PTR_STATUS(sent), "ConnectError", name() + " cannot be greeted: check UCX_TLS and UCX_NET_DEVICES on both sides");
    if (sent)
        ++outstanding_;
    else
        greeted_ = true;
}

void Endpoint::on_hello_sent(void *request, ucs_status_t status, void *self) {
    Endpoint &endpoint = *static_cast<Endpoint *>(self);
    --endpoint.outstanding_;
    endpoint.greeted_ = status == UCS_OK;
    if (status != UCS_OK)
        endpoint.fail({"ConnectError", with_status(endpoint.name() + " cannot be reached: is it up? check UCX_NET_DEVICES on both sides", status), status});
    ucp_request_free(request);
}

void Endpoint::on_hello(const Hello &answer) {
    if (closing_ || failing_ || !connecting_ || session_)
        return;
    try {
        if (answer.instance != spec_.instance)
            throw StatusError("PeerIdentityError",
                              name() + " has restarted: another transport (UCX " + answer.ucx_version +
                                  ") answers at this address; ask it for its new address and keys");
        if (answer.protocol != kProtocol)
            throw StatusError("ConnectError", name() + " speaks version " + std::to_string(answer.protocol) +
                                                  " of the ucx messages, this side " + std::to_string(kProtocol) +
                                                  ": use one kvrdma version");
        session_ = answer.session;
        if (one_sided_lanes_.empty())
            return connected(false);
        unpack_keys();
        plan_probes();
        probe_next();
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

// Whether a read works is the only proof of a one-sided path: the peer's own cookie, and one region of every GPU.
void Endpoint::plan_probes() {
    std::set<int> seen;
    for (size_t i = 0; i < spec_.regions.size(); ++i)
        if (const RemoteRegion &region = spec_.regions[i]; region.cuda >= 0 && seen.insert(region.cuda).second)
            probes_.push_back({rkeys_[i], region.addr, std::min<uint64_t>(region.nbytes, sizeof(Cookie))});
    probes_.push_back({table_, spec_.table_addr, sizeof(Cookie)});
}

void Endpoint::probe_next() {
    const Probe &probe = probes_.back();
    ucp_request_param_t param = {};
    param.cb.send = &Endpoint::on_probe;
    param.user_data = this;
    const ucs_status_ptr_t got = get(scratch_.data(), probe.nbytes, probe.addr, probe.rkey, param);
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
    const Failure failure = status == UCS_OK ? Failure{} : failure_of(status, name() + " (" + lanes_ + ") cannot be read");
    if (failure && failure.kind != std::string("NotOneSidedError"))
        return fail(failure);
    const bool own_cookie = probes_.back().rkey == table_;
    probes_.pop_back();
    if (!failure && own_cookie && std::memcmp(scratch_.data(), spec_.instance.data(), sizeof(Cookie)) != 0)
        return fail({"PeerIdentityError", name() + " has closed its transport; ask it for its new address", 0});
    if (!failure && !probes_.empty())
        return probe_next();
    try {
        if (failure && shared_.options.require_one_sided)
            refuse_emulation(lanes_ + ", but UCX has no one-sided way to this memory");
        connected(!failure);
    } catch (const StatusError &error) {
        fail({error.kind(), error.what(), error.code()});
    }
}

void Endpoint::connected(bool one_sided) {
    one_sided_ = one_sided;
    via_ = one_sided ? one_sided_lanes_ : lanes_ + " (served by the peer's CPU)";
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
    if (!failing_ && !greeted_ && shared_.context.aborts_half_open()) {
        parked_ = true;
        return;
    }
    if (!failing_ && session_)
        say_goodbye();
    ucp_request_param_t param = {};
    param.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA | UCP_OP_ATTR_FIELD_FLAGS;
    param.cb.send = &Endpoint::on_closed;
    param.user_data = this;
    param.flags = UCP_EP_CLOSE_FLAG_FORCE;
    const ucs_status_ptr_t closing = ucp_ep_close_nbx(std::exchange(ep_, nullptr), &param);
    closed_ = !UCS_PTR_IS_PTR(closing);
}

// As far as the socket takes it now: the forced close that follows cancels what is left.
void Endpoint::say_goodbye() {
    goodbye_.session = session_;
    ucp_request_param_t param = {};
    param.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA | UCP_OP_ATTR_FIELD_FLAGS;
    param.flags = UCP_AM_SEND_FLAG_EAGER;
    param.user_data = this;
    param.cb.send = [](void *request, ucs_status_t, void *self) {
        --static_cast<Endpoint *>(self)->outstanding_;
        ucp_request_free(request);
    };
    outstanding_ += UCS_PTR_IS_PTR(ucp_am_send_nbx(ep_, kGoodbye, &goodbye_, sizeof goodbye_, nullptr, 0, &param));
}

void Endpoint::on_closed(void *request, ucs_status_t, void *self) {
    static_cast<Endpoint *>(self)->closed_ = true;
    ucp_request_free(request);
}

void Endpoint::report() {
    while (!reads_.empty())
        end_read(*reads_.begin()->second);
    if (connecting_) {
        const bool cancelled = failure_.kind == std::string("ReadCancelledError");
        connecting_->end(cancelled ? Failure{"TransportClosedError", "the transport was closed while connecting", 0}
                                   : failure_);
    }
    if (lost_)
        shared_.done.push({"PeerLostError", 0, peer_->id, 0, 0, 0, failure_.message, failure_.code});
}

} // namespace kvrdma::ucx
