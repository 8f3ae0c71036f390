// Numbers both sides of a connection agree on, and the sizes of what is read from a peer's cookie table.
#pragma once

#include <cstdint>

namespace kvrdma::ucx {

constexpr unsigned kAskHello = 1, kAnswerHello = 2; // active message ids

constexpr uint32_t kChunks = 8, kChunkBytes = 4096; // cookie reads in flight per peer, and their size

} // namespace kvrdma::ucx
