// One C++ exception for everything a native transport reports; one translator turns it into Python's classes.
#pragma once

#include <stdexcept>
#include <string>

namespace kvrdma {

// `kind` is the name of a class in kvrdma.errors; `code` the native status (errno, ucs_status_t) or 0.
class StatusError : public std::runtime_error {
  public:
    StatusError(const char *kind, const std::string &message, int code = 0)
        : std::runtime_error(message), kind_(kind), code_(code) {}
    const char *kind() const noexcept { return kind_; }
    int code() const noexcept { return code_; }

  private:
    const char *kind_;
    int code_;
};

} // namespace kvrdma
