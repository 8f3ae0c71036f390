#include "consumer.hpp"

#include <cstring>
#include <utility>

#include "context.hpp"
#include "status.hpp"

namespace kvrdma::ucx {

namespace {

constexpr size_t kMessages = 8;               // being sent to one consumer at a time
constexpr size_t kMostPiecesWaiting = 1 << 18; // far more than a consumer of this protocol version ever asks for

} // namespace

Consumer::Consumer(Regions &regions, uint64_t session, const Hello &hello, std::string address)
    : regions_(regions), session_(session), peer_(hello.peer), address_(std::move(address)) {}

void Consumer::connect(ucp_worker_h server, ucp_err_handling_mode_t mode) {
    ucp_ep_params_t params = {};
    params.field_mask =
        UCP_EP_PARAM_FIELD_REMOTE_ADDRESS | UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE | UCP_EP_PARAM_FIELD_ERR_HANDLER;
    params.address = reinterpret_cast<const ucp_address_t *>(address_.data());
    params.err_mode = mode;
    params.err_handler = {&Consumer::on_error, this};
    failed_ = ucp_ep_create(server, &params, &ep_) != UCS_OK;
    if (!failed_)
        answer_hello();
}

void Consumer::answer_hello() {
    answer_.peer = peer_;
    answer_.session = session_;
    answer_.instance = regions_.instance();
    std::strncpy(answer_.ucx_version, ucx_version().c_str(), sizeof answer_.ucx_version - 1);
    ucp_request_param_t param = {};
    param.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA | UCP_OP_ATTR_FIELD_FLAGS;
    param.flags = UCP_AM_SEND_FLAG_EAGER;
    param.user_data = this;
    param.cb.send = [](void *request, ucs_status_t, void *self) {
        --static_cast<Consumer *>(self)->sending_;
        ucp_request_free(request);
    };
    const ucs_status_ptr_t sent = ucp_am_send_nbx(ep_, kAnswerHello, &answer_, sizeof answer_, nullptr, 0, &param);
    sending_ += UCS_PTR_IS_PTR(sent);
    failed_ |= UCS_PTR_IS_ERR(sent);
}

void Consumer::add(Asked asked) {
    pieces_waiting_ += asked.pieces.size();
    if (pieces_waiting_ > kMostPiecesWaiting)
        failed_ = true;
    asked_.push_back(std::move(asked));
}

bool Consumer::can_send() const noexcept {
    return ep_ && !failed_ && !asked_.empty() && (!free_.empty() || messages_.size() < kMessages);
}

bool Consumer::work() {
    if (!can_send())
        return false;
    if (free_.empty()) {
        messages_.push_back(std::make_unique<Message>(Message{{}, std::vector<uint8_t>(kDataBytes), this}));
        free_.push_back(messages_.back().get());
    }
    Message &message = *free_.back();
    free_.pop_back();
    Asked &asked = asked_.front();
    fill(message, asked);
    if (asked.next == asked.pieces.size()) {
        pieces_waiting_ -= asked.pieces.size();
        asked_.pop_front();
    }
    return can_send();
}

// Copies whole pieces while they fit, all under one lock: nothing can be deregistered half-way.
void Consumer::fill(Message &message, Asked &asked) {
    message.header = {};
    message.header.peer = peer_;
    message.header.ask = asked.ask;
    message.header.first = asked.next;
    size_t nbytes = 0;
    const Regions::Reading reading(regions_);
    while (asked.next < asked.pieces.size()) {
        const WirePiece &piece = asked.pieces[asked.next];
        if (nbytes + piece.nbytes > kDataBytes)
            break;
        const WireRegion &region = asked.regions[piece.region];
        message.header.outcome = reading.copy(region, piece, message.bytes.data() + nbytes);
        if (message.header.outcome != Served::kBytes) { // the reader is told of the piece, the rest is not wanted
            message.header.first = asked.next;
            message.header.count = 0;
            asked.next = static_cast<uint32_t>(asked.pieces.size());
            nbytes = 0;
            break;
        }
        nbytes += piece.nbytes;
        ++message.header.count;
        ++asked.next;
    }
    send(message, nbytes);
}

void Consumer::send(Message &message, size_t nbytes) {
    ucp_request_param_t param = {};
    param.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA | UCP_OP_ATTR_FIELD_FLAGS |
                         UCP_OP_ATTR_FIELD_MEMORY_TYPE;
    param.flags = UCP_AM_SEND_FLAG_EAGER;
    param.memory_type = UCS_MEMORY_TYPE_HOST;
    param.user_data = &message;
    param.cb.send = &Consumer::on_sent;
    const ucs_status_ptr_t sent =
        ucp_am_send_nbx(ep_, kData, &message.header, sizeof message.header, message.bytes.data(), nbytes, &param);
    if (UCS_PTR_IS_PTR(sent)) {
        ++sending_;
        return;
    }
    failed_ |= UCS_PTR_IS_ERR(sent);
    free_.push_back(&message);
}

void Consumer::on_sent(void *request, ucs_status_t status, void *sent) {
    Message &message = *static_cast<Message *>(sent);
    Consumer &consumer = *message.consumer;
    --consumer.sending_;
    consumer.failed_ |= status != UCS_OK;
    consumer.free_.push_back(&message);
    ucp_request_free(request);
}

void Consumer::on_error(void *self, ucp_ep_h, ucs_status_t) { static_cast<Consumer *>(self)->failed_ = true; }

void Consumer::close() {
    failed_ = closing_ = true;
    asked_.clear();
    if (!ep_) {
        closed_ = true;
        return;
    }
    ucp_request_param_t param = {};
    param.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA | UCP_OP_ATTR_FIELD_FLAGS;
    param.cb.send = &Consumer::on_closed;
    param.user_data = this;
    param.flags = UCP_EP_CLOSE_FLAG_FORCE;
    closed_ = !UCS_PTR_IS_PTR(ucp_ep_close_nbx(std::exchange(ep_, nullptr), &param));
}

void Consumer::on_closed(void *request, ucs_status_t, void *self) {
    static_cast<Consumer *>(self)->closed_ = true;
    ucp_request_free(request);
}

} // namespace kvrdma::ucx
