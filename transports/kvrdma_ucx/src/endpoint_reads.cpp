// The reads of one peer: pieces posted in turn, cookies checked once the data has arrived.
#include <algorithm>
#include <bitset>
#include <cstring>

#include "cuda.hpp"
#include "endpoint.hpp"

namespace kvrdma::ucx {

namespace {

// Longer rows are read in pieces, so that one read cannot hold up the others of its peer.
constexpr uint64_t kPieceBytes = 4 << 20;

// Cookies this far apart still come by one read.
constexpr uint32_t kSlotGap = 32, kSlotsPerChunk = kChunkBytes / sizeof(Cookie);

} // namespace

void Endpoint::add(std::unique_ptr<Read> owned) {
    Read &read = *owned;
    read.endpoint = this;
    reads_.emplace(read.id, std::move(owned));
    if (!closing_)
        requeue(read, posting_, read.end > 0);
}

bool Endpoint::can_post() const noexcept {
    return !posting_.empty() && (one_sided_ ? outstanding_ < shared_.options.max_in_flight
                                            : asks_.size() < std::min<size_t>(shared_.options.max_in_flight, kMostAsks));
}

bool Endpoint::work(uint32_t quantum) {
    if (closing_ || failing_)
        return false;
    while (!arrived_.empty()) {
        Read &read = *arrived_.front();
        arrived_.pop_front();
        settle(read);
    }
    if (one_sided_) {
        post_checks();
        post_pieces(quantum);
    } else {
        post_asks(quantum);
    }
    return !arrived_.empty() || can_post();
}

// Puts a read that was at work back into its queue, or on to the next stage if nothing of it is in flight.
void Endpoint::requeue(Read &read, std::deque<Read *> &queue, bool more) {
    read.queued = more && !read.failure;
    if (read.queued)
        queue.push_back(&read);
    else if (read.outstanding == 0)
        arrived_.push_back(&read);
}

void Endpoint::post_pieces(uint32_t quantum) {
    while (quantum > 0 && can_post()) {
        Read &read = *posting_.front();
        posting_.pop_front();
        const uint32_t share = std::min<uint32_t>(quantum, shared_.options.max_in_flight - outstanding_);
        for (uint32_t i = 0; i < share && read.next_row < read.end && post_piece(read); ++i)
            --quantum;
        requeue(read, posting_, read.next_row < read.end);
    }
}

ucs_status_ptr_t Endpoint::get(void *to, size_t nbytes, uint64_t from, ucp_rkey_h rkey, ucp_request_param_t &param) {
    if (!(param.op_attr_mask & UCP_OP_ATTR_FIELD_MEMH)) { // a cookie
        param.memh = scratch_.memh();
        param.memory_type = UCS_MEMORY_TYPE_HOST;
    }
    param.op_attr_mask |= UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA | UCP_OP_ATTR_FIELD_MEMH |
                          UCP_OP_ATTR_FIELD_MEMORY_TYPE;
    return ucp_get_nbx(ep_, to, nbytes, from, rkey, &param);
}

// Returns whether the read may go on.
bool Endpoint::post_piece(Read &read) {
    const Row &row = read.rows[read.next_row];
    const uint64_t nbytes = std::min(row.length - read.row_offset, kPieceBytes);
    ucp_request_param_t param = {};
    param.op_attr_mask = UCP_OP_ATTR_FIELD_MEMH | UCP_OP_ATTR_FLAG_MULTI_SEND;
    param.memh = shared_.regions.memh(row.local_region());
    param.memory_type = shared_.regions.type(row.local_region());
    param.cb.send = &Endpoint::on_piece;
    param.user_data = &read;
    const uint64_t from = spec_.regions[row.remote_region()].addr + row.offset + read.row_offset;
    const ucs_status_ptr_t got =
        get(reinterpret_cast<void *>(row.local + read.row_offset), nbytes, from, rkeys_[row.remote_region()], param);
    if (UCS_PTR_IS_ERR(got)) {
        fail_read(read, UCS_PTR_STATUS(got), "cannot be posted");
        return false;
    }
    if (got)
        ++outstanding_, ++read.outstanding;
    read.row_offset += nbytes;
    if (read.row_offset == row.length)
        read.row_offset = 0, ++read.next_row;
    return true;
}

void Endpoint::on_piece(void *request, ucs_status_t status, void *argument) {
    Read &read = *static_cast<Read *>(argument);
    ucp_request_free(request);
    if (status != UCS_OK)
        read.endpoint->fail_read(read, status, "failed");
    read.endpoint->request_ended(read);
}

void Endpoint::request_ended(Read &read) {
    --outstanding_;
    part_ended(read);
}

void Endpoint::part_ended(Read &read) {
    if (--read.outstanding == 0 && !read.queued && !closing_)
        arrived_.push_back(&read);
}

void Endpoint::fail_read(Read &read, ucs_status_t status, const char *what) {
    if (closing_ || read.failure) // a closing endpoint cancels its reads; it knows the cause
        return;
    read.failure = failure_of(status, "read " + std::to_string(read.id) + " of " + name() + " (" + via_ + ") " + what);
    if (read.failure.kind == std::string("PeerLostError"))
        fail(read.failure);
}

void Endpoint::settle(Read &read) {
    if (!read.failure && read.end < read.rows.size()) {
        read.end = read.rows.size();
        requeue(read, posting_, true);
    } else if (one_sided_ && !read.failure && !read.planned && !read.rows.empty()) {
        plan_checks(read);
        requeue(read, checking_, true);
    } else {
        end_read(read);
    }
}

void Endpoint::plan_checks(Read &read) {
    read.planned = true;
    std::bitset<Regions::kSlots> seen;
    std::vector<uint32_t> slots;
    for (const Row &row : read.rows)
        if (const uint32_t slot = spec_.regions[row.remote_region()].slot; !seen.test(slot)) {
            seen.set(slot);
            slots.push_back(slot);
        }
    std::sort(slots.begin(), slots.end());
    for (uint32_t slot : slots) {
        CookieCheck *last = read.checks.empty() ? nullptr : &read.checks.back();
        if (last && slot - last->first_slot < kSlotsPerChunk && slot - last->first_slot - last->slots < kSlotGap)
            last->slots = slot - last->first_slot + 1;
        else
            read.checks.push_back({&read, slot, 1, 0});
    }
}

void Endpoint::post_checks() {
    while (!checking_.empty() && !free_chunks_.empty()) {
        Read &read = *checking_.front();
        checking_.pop_front();
        const bool posted = post_check(read.checks[read.next_check]);
        requeue(read, checking_, posted && ++read.next_check < read.checks.size());
    }
}

bool Endpoint::post_check(CookieCheck &check) {
    check.chunk = free_chunks_.back();
    free_chunks_.pop_back();
    ucp_request_param_t param = {};
    param.cb.send = &Endpoint::on_check;
    param.user_data = &check;
    const ucs_status_ptr_t got = get(scratch_.data() + check.chunk * kChunkBytes, check.slots * sizeof(Cookie),
                                     spec_.table_addr + check.first_slot * sizeof(Cookie), table_, param);
    if (UCS_PTR_IS_PTR(got)) {
        ++outstanding_, ++check.read->outstanding;
        return true;
    }
    if (UCS_PTR_IS_ERR(got))
        fail_read(*check.read, UCS_PTR_STATUS(got), "cannot be checked");
    else
        compare(check);
    free_chunks_.push_back(check.chunk);
    return !check.read->failure;
}

void Endpoint::on_check(void *request, ucs_status_t status, void *argument) {
    const CookieCheck &check = *static_cast<CookieCheck *>(argument);
    Endpoint &endpoint = *check.read->endpoint;
    ucp_request_free(request);
    if (status != UCS_OK)
        endpoint.fail_read(*check.read, status, "cannot be checked");
    else
        endpoint.compare(check);
    endpoint.free_chunks_.push_back(check.chunk);
    endpoint.request_ended(*check.read);
}

void Endpoint::compare(const CookieCheck &check) {
    Read &read = *check.read;
    const uint8_t *cookies = scratch_.data() + check.chunk * kChunkBytes;
    for (size_t i = 0; i < spec_.regions.size() && !read.failure; ++i) {
        const RemoteRegion &region = spec_.regions[i];
        const uint32_t at = region.slot - check.first_slot; // wraps for slots before
        if (at >= check.slots || std::memcmp(cookies + at * sizeof(Cookie), region.cookie.data(), sizeof(Cookie)) == 0)
            continue;
        const bool used = std::any_of(read.rows.begin(), read.rows.end(),
                                      [i](const Row &row) { return row.remote_region() == i; });
        if (used)
            read.failure = {"StaleRegionError",
                            "region " + std::to_string(i) + " (" + std::to_string(region.nbytes) + " bytes) of " + name() +
                                " was deregistered there before read " + std::to_string(read.id) +
                                " ended: its bytes must not be used; ask the peer for new keys",
                            0};
    }
}

void Endpoint::end_read(Read &read) {
    if (closing_ && !read.failure)
        read.failure = failure_;
    const auto on_gpu = [this](uint32_t slot) { return shared_.regions.type(slot) == UCS_MEMORY_TYPE_CUDA; };
    const bool copied = !one_sided_ && std::any_of(read.local_slots.begin(), read.local_slots.end(), on_gpu);
    const int error = copied ? finish_copies() : 0; // of a failed read, too: from here on nothing may write
    if (error && !read.failure)
        read.failure = {"TransportError",
                        "bytes from " + name() + " did not reach the GPU (CUDA error " + std::to_string(error) + ")", error};
    const bool flush = !read.failure && one_sided_ &&
                       std::any_of(read.local_slots.begin(), read.local_slots.end(),
                                   [this](uint32_t slot) { return shared_.regions.needs_flush(slot); });
    if (flush)
        flush_writes();
    shared_.regions.release(read.rows, read.local_slots);
    const Failure &why = read.failure;
    shared_.done.push({why ? why.kind : "", read.id, peer_->id, read.nrows, read.rows_posted, read.nbytes, why.message,
                       why.code});
    reads_.erase(read.id);
}

} // namespace kvrdma::ucx
