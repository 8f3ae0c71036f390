// Keeps UCX's sockets out of other processes.
//
// A child that is forked inherits them, and a peer learns that this process has died only when the last copy is closed:
// a helper process that outlives it would hide its death. UCX neither marks its sockets close-on-exec nor lists them, so
// they are looked up in the epoll sets they are in.
#pragma once

namespace kvrdma::ucx {

class ForkGuard {
  public:
    ForkGuard() = default;
    ~ForkGuard() { end(); }
    ForkGuard(const ForkGuard &) = delete;
    ForkGuard &operator=(const ForkGuard &) = delete;

    // From here on a forked child drops every socket that is found through `poll_fd`, an epoll set that holds those of
    // UCX's workers. To be ended before the set is closed.
    void begin(int poll_fd);
    void end();
    // The sockets there are now do not survive exec; to be repeated when there are new ones.
    void mark();

  private:
    void guard(int &known, int fd);

    int poll_fd_ = -1, async_fd_ = -1; // async: the set of UCX's own thread, in which it listens
};

} // namespace kvrdma::ucx
