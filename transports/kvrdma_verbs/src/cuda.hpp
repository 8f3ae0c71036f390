// GPU memory for a NIC: exported as a dmabuf where the driver can, else left to nvidia-peermem.
#pragma once

#include <cstdint>

namespace kvrdma::verbs {

class Dmabuf {
  public:
    // Throws RegistrationError unless this machine has a CUDA driver.
    Dmabuf(uint64_t addr, uint64_t nbytes, int index);
    ~Dmabuf();
    Dmabuf(const Dmabuf &) = delete;
    Dmabuf &operator=(const Dmabuf &) = delete;

    int fd() const noexcept { return fd_; } // negative where there is none
    uint64_t offset() const noexcept { return offset_; }

  private:
    int fd_ = -1;
    uint64_t offset_ = 0;
};

} // namespace kvrdma::verbs
