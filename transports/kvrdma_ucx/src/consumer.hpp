// A process that reads this one and has no one-sided way to: its asks are answered here, by the progress thread.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <vector>

#include <ucp/api/ucp.h>

#include "messages.hpp"
#include "regions.hpp"

namespace kvrdma::ucx {

struct Asked {
    uint64_t ask;
    std::vector<WireRegion> regions;
    std::vector<WirePiece> pieces;
    uint32_t next = 0;
};

class Consumer {
  public:
    Consumer(Regions &regions, uint64_t session, const Hello &hello, std::string address);

    void connect(ucp_worker_h server, ucp_err_handling_mode_t mode);
    void add(Asked asked);
    // Sends one message, if there is something to answer and room for it. Returns whether there is more to do now.
    bool work();
    bool is_from(const std::string &address) const noexcept { return address == address_; }
    uint64_t peer() const noexcept { return peer_; }
    void fail() noexcept { failed_ = true; }
    bool failed() const noexcept { return failed_; }
    bool closing() const noexcept { return closing_; }
    void close();
    bool finished() const noexcept { return closed_ && sending_ == 0; }

  private:
    struct Message {
        Data header;
        std::vector<uint8_t> bytes;
        Consumer *consumer;
    };

    bool can_send() const noexcept;
    void answer_hello();
    void fill(Message &message, Asked &asked);
    void send(Message &message, size_t nbytes);

    static void on_error(void *self, ucp_ep_h ep, ucs_status_t status);
    static void on_sent(void *request, ucs_status_t status, void *message);
    static void on_closed(void *request, ucs_status_t status, void *self);

    Regions &regions_;
    const uint64_t session_, peer_;
    const std::string address_;
    Hello answer_;
    ucp_ep_h ep_ = nullptr;
    std::deque<Asked> asked_;
    size_t pieces_waiting_ = 0;
    std::vector<std::unique_ptr<Message>> messages_;
    std::vector<Message *> free_;
    uint32_t sending_ = 0; // requests whose callback has not come
    bool failed_ = false, closing_ = false, closed_ = false;
};

} // namespace kvrdma::ucx
