#include "status.hpp"

namespace kvrdma::ucx {

const char *kind_of(ucs_status_t status) noexcept {
    switch (status) {
    case UCS_ERR_NO_MEMORY:
    case UCS_ERR_NO_RESOURCE:
    case UCS_ERR_INVALID_PARAM:
    case UCS_ERR_OUT_OF_RANGE:
    case UCS_ERR_EXCEEDS_LIMIT:
        return "TransportError";
    case UCS_ERR_UNSUPPORTED:
    case UCS_ERR_NOT_IMPLEMENTED:
        return "NotOneSidedError";
    default:
        return "PeerLostError";
    }
}

std::string with_status(const std::string &what, ucs_status_t status) {
    return what + ": " + ucs_status_string(status) + " (UCX status " + std::to_string(status) + ")";
}

void throw_unless_ok(ucs_status_t status, const char *kind, const std::string &what) {
    if (status != UCS_OK)
        throw StatusError(kind, with_status(what, status), status);
}

} // namespace kvrdma::ucx
