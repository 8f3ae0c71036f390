// Reads without a one-sided path: the peer is asked for pieces and sends their bytes in messages.
#include <algorithm>
#include <cstring>

#include "crowding.hpp"
#include "cuda.hpp"
#include "endpoint.hpp"

namespace kvrdma::ucx {

void Endpoint::post_asks(uint32_t quantum) {
    while (quantum-- > 0 && can_post()) {
        Read &read = *posting_.front();
        posting_.pop_front();
        const bool posted = read.failure || post_ask(read);
        requeue(read, posting_, posted && read.next_row < read.end);
    }
}

bool Endpoint::post_ask(Read &read) {
    const uint64_t id = next_ask_++;
    Ask &ask = *(asks_[id] = std::make_unique<Ask>(Ask{this, &read, {}, {}, {}, 0, false}));
    std::vector<WireRegion> regions;
    std::vector<WirePiece> pieces;
    fill(ask, regions, pieces);
    ask.missing = ask.parts.size();
    ask.header.place = place_now();
    ask.header.session = session_;
    ask.header.ask = id;
    ask.header.regions = static_cast<uint32_t>(regions.size());
    ask.header.pieces = static_cast<uint32_t>(pieces.size());
    const size_t regions_nbytes = regions.size() * sizeof(WireRegion);
    ask.payload.resize(regions_nbytes + pieces.size() * sizeof(WirePiece));
    std::memcpy(ask.payload.data(), regions.data(), regions_nbytes);
    std::memcpy(ask.payload.data() + regions_nbytes, pieces.data(), pieces.size() * sizeof(WirePiece));
    if (send(ask)) {
        ++read.outstanding;
        return true;
    }
    asks_.erase(id);
    return false;
}

// Takes the next pieces of the read, each no longer than a message.
void Endpoint::fill(Ask &ask, std::vector<WireRegion> &regions, std::vector<WirePiece> &pieces) {
    Read &read = *ask.read;
    uint64_t nbytes = 0;
    uint32_t last_region = ~0u;
    while (read.next_row < read.end && pieces.size() < kAskPieces && nbytes < kAskBytes) {
        const Row &row = read.rows[read.next_row];
        if (row.remote_region() != last_region) { // rows are sorted by region, so that few are named twice
            last_region = row.remote_region();
            regions.push_back({spec_.regions[last_region].slot, 0, spec_.regions[last_region].cookie});
        }
        const auto take = static_cast<uint32_t>(
            std::min({row.length - read.row_offset, uint64_t{kDataBytes}, uint64_t{kAskBytes - nbytes}}));
        pieces.push_back({static_cast<uint32_t>(regions.size() - 1), take, row.offset + read.row_offset});
        ask.parts.push_back({row.local + read.row_offset, row.local_region(), take, false});
        nbytes += take;
        read.row_offset += take;
        if (read.row_offset == row.length)
            read.row_offset = 0, ++read.next_row;
    }
}

bool Endpoint::send(Ask &ask) {
    ucp_request_param_t param = {};
    param.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA | UCP_OP_ATTR_FIELD_FLAGS;
    param.flags = UCP_AM_SEND_FLAG_EAGER;
    param.cb.send = &Endpoint::on_ask_sent;
    param.user_data = &ask;
    const ucs_status_ptr_t sent = ucp_am_send_nbx(ep_, kAskRead, &ask.header, sizeof ask.header, ask.payload.data(),
                                                  ask.payload.size(), &param);
    if (UCS_PTR_IS_ERR(sent)) {
        fail_read(*ask.read, UCS_PTR_STATUS(sent), "cannot be asked for");
        return false;
    }
    ask.sent = sent == nullptr;
    outstanding_ += !ask.sent;
    return true;
}

void Endpoint::on_ask_sent(void *request, ucs_status_t status, void *argument) {
    Ask &ask = *static_cast<Ask *>(argument);
    Endpoint &endpoint = *ask.endpoint;
    ucp_request_free(request);
    --endpoint.outstanding_;
    ask.sent = true;
    if (status != UCS_OK && !endpoint.closing_)
        endpoint.fail({"PeerLostError", with_status(endpoint.name() + " (" + endpoint.lanes_ + ") is gone", status), status});
    if (ask.missing == 0)
        endpoint.asks_.erase(ask.header.ask);
}

void Endpoint::on_data(const Data &header, const uint8_t *bytes, size_t nbytes) {
    const auto found = asks_.find(header.ask);
    if (closing_ || failing_ || found == asks_.end()) // from here on nothing is written for reads that were given up
        return;
    Ask &ask = *found->second;
    if (header.outcome != Served::kBytes)
        ask_failed(ask, header);
    else if (!place(ask, header, bytes, nbytes))
        return fail({"PeerLostError", name() + " sent bytes that were not asked for: it is not a sound kvrdma", 0});
    if (ask.missing == 0)
        ask_ended(header.ask);
}

// Checks the whole message against what was asked before the first byte is written.
bool Endpoint::place(Ask &ask, const Data &header, const uint8_t *bytes, size_t nbytes) {
    const size_t parts = ask.parts.size();
    if (header.count == 0 || header.first >= parts || header.count > parts - header.first)
        return false;
    Part *const first = &ask.parts[header.first], *const end = first + header.count;
    uint64_t expected = 0;
    for (const Part *part = first; part != end; ++part) {
        expected += part->nbytes;
        if (part->arrived)
            return false;
    }
    if (expected != nbytes)
        return false;
    for (Part *part = first; part != end; bytes += part->nbytes, ++part) {
        const bool cuda = shared_.regions.type(part->slot) == UCS_MEMORY_TYPE_CUDA;
        if (const int error = copy_in(part->local, bytes, part->nbytes, cuda); error && !ask.read->failure)
            ask.read->failure = {"TransportError", "bytes from " + name() + " cannot be copied to the GPU (CUDA error " +
                                                       std::to_string(error) + ")", error};
        part->arrived = true;
    }
    ask.missing -= header.count;
    return true;
}

void Endpoint::ask_failed(Ask &ask, const Data &header) {
    ask.missing = 0; // the peer drops the rest of it
    if (ask.read->failure)
        return;
    const std::string read = "read " + std::to_string(ask.read->id) + " of " + name();
    if (header.outcome == Served::kStale)
        ask.read->failure = {"StaleRegionError",
                             read + " (" + via_ + ") names a region that was deregistered there: the bytes must not be "
                                    "used; ask the peer for new keys", 0};
    else
        ask.read->failure = {"TransportError",
                             read + (header.outcome == Served::kOutOfBounds ? " leaves the region it was registered with"
                                                                            : " cannot be copied from the peer's GPU"), 0};
}

void Endpoint::ask_ended(uint64_t id) {
    Ask &ask = *asks_[id];
    part_ended(*ask.read);
    if (ask.sent)
        asks_.erase(id);
}

} // namespace kvrdma::ucx
