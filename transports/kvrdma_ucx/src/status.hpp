// From ucs_status_t to the error classes of kvrdma.errors: the only place that knows both.
#pragma once

#include <string>

#include <ucs/type/status.h>

#include "errors.hpp"

namespace kvrdma::ucx {

// An outcome as it is reported later, by poll() or to a waiting connect().
struct Failure {
    const char *kind = nullptr; // null: none
    std::string message;
    int code = 0;

    explicit operator bool() const noexcept { return kind != nullptr; }
};

// The class of an error on a connected endpoint.
const char *kind_of(ucs_status_t status) noexcept;

// "what: text of the status (status -25)"
std::string with_status(const std::string &what, ucs_status_t status);

void throw_unless_ok(ucs_status_t status, const char *kind, const std::string &what);

} // namespace kvrdma::ucx
