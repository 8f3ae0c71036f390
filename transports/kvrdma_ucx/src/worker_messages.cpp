// Messages as they come in, inside ucp_worker_progress: checked, copied, and acted on at once or by the next step.
#include <cstring>

#include "crowding.hpp"
#include "worker.hpp"

namespace kvrdma::ucx {

namespace {

constexpr uint32_t kMostRegionsAsked = kAskPieces;

// Only whole messages that UCX holds in memory: nobody sends others.
template <void (Worker::*receive)(const void *, size_t, const char *, size_t)>
ucs_status_t receiver(void *self, const void *header, size_t header_nbytes, void *data, size_t nbytes,
                      const ucp_am_recv_param_t *param) {
    if (!(param->recv_attr & UCP_AM_RECV_ATTR_FLAG_RNDV))
        (static_cast<Worker *>(self)->*receive)(header, header_nbytes, static_cast<const char *>(data), nbytes);
    return UCS_OK;
}

template <typename Header> bool read_header(Header &to, const void *from, size_t nbytes) {
    if (nbytes != sizeof to)
        return false;
    std::memcpy(&to, from, sizeof to);
    return to.magic == kMagic;
}

} // namespace

void Worker::listen() {
    const auto receive = [this](ucp_worker_h worker, unsigned id, ucp_am_recv_callback_t callback) {
        ucp_am_handler_param_t param = {};
        param.field_mask =
            UCP_AM_HANDLER_PARAM_FIELD_ID | UCP_AM_HANDLER_PARAM_FIELD_CB | UCP_AM_HANDLER_PARAM_FIELD_ARG;
        param.id = id;
        param.cb = callback;
        param.arg = this;
        throw_unless_ok(ucp_worker_set_am_recv_handler(worker, &param), "TransportUnavailableError",
                        "UCX cannot receive active messages");
    };
    receive(server_, kAskHello, &receiver<&Worker::ask_hello>);
    receive(server_, kAskRead, &receiver<&Worker::ask_read>);
    receive(server_, kGoodbye, &receiver<&Worker::goodbye>);
    receive(reader_, kAnswerHello, &receiver<&Worker::answer_hello>);
    receive(reader_, kData, &receiver<&Worker::data>);
}

void Worker::ask_hello(const void *header, size_t header_nbytes, const char *data, size_t nbytes) {
    Hello hello;
    if (!stopping_ && read_header(hello, header, header_nbytes) && hello.address_nbytes == nbytes && nbytes > 0 &&
        hello.checksum == checksum_of(data, nbytes))
        greetings_.push_back({hello, std::string(data, nbytes)});
}

void Worker::answer_hello(const void *header, size_t header_nbytes, const char *, size_t) {
    Hello hello;
    if (!read_header(hello, header, header_nbytes))
        return;
    hello.ucx_version[sizeof hello.ucx_version - 1] = 0;
    answers_.push_back(hello);
}

void Worker::ask_read(const void *header, size_t header_nbytes, const char *data, size_t nbytes) {
    AskRead ask;
    if (!read_header(ask, header, header_nbytes))
        return;
    const auto found = consumers_.find(ask.session);
    if (found == consumers_.end())
        return;
    const size_t regions_nbytes = ask.regions * sizeof(WireRegion);
    if (ask.regions > kMostRegionsAsked || ask.pieces > kAskPieces || ask.pieces == 0 ||
        nbytes != regions_nbytes + ask.pieces * sizeof(WirePiece))
        return found->second->fail();
    Asked asked{ask.ask, std::vector<WireRegion>(ask.regions), std::vector<WirePiece>(ask.pieces)};
    std::memcpy(asked.regions.data(), data, regions_nbytes);
    std::memcpy(asked.pieces.data(), data + regions_nbytes, ask.pieces * sizeof(WirePiece));
    for (const WirePiece &piece : asked.pieces)
        if (piece.region >= ask.regions || piece.nbytes == 0 || piece.nbytes > kDataBytes)
            return found->second->fail();
    serving_ = true;
    crowded_ |= ask.place == place_now();
    found->second->add(std::move(asked));
}

void Worker::goodbye(const void *header, size_t header_nbytes, const char *, size_t) {
    Goodbye message;
    if (!read_header(message, header, header_nbytes))
        return;
    if (const auto found = consumers_.find(message.session); found != consumers_.end())
        found->second->fail();
}

void Worker::data(const void *header, size_t header_nbytes, const char *data, size_t nbytes) {
    Data arrived;
    if (!read_header(arrived, header, header_nbytes))
        return;
    serving_ = true;
    if (const auto found = endpoints_.find(arrived.peer); found != endpoints_.end())
        found->second->on_data(arrived, reinterpret_cast<const uint8_t *>(data), nbytes);
}

} // namespace kvrdma::ucx
