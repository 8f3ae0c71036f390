// A batch of rows on its way: copied by the caller, merged, posted piece by piece and checked by the progress thread.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "regions.hpp"
#include "rows.hpp"
#include "status.hpp"

namespace kvrdma::ucx {

class Endpoint;
struct Read;

// One GET of cookies: consecutive slots of the peer's table.
struct CookieCheck {
    Read *read;
    uint32_t first_slot, slots;
    uint32_t chunk; // of the endpoint's scratch memory
};

struct Read {
    uint64_t id = 0;
    uint64_t nrows = 0, rows_posted = 0, nbytes = 0;
    std::vector<Row> rows;
    size_t tail = 0; // the last of them, read once the others have arrived
    std::vector<uint32_t> local_slots; // busy until the read has ended
    Endpoint *endpoint = nullptr;

    // Of the progress thread.
    size_t end = 0; // of the rows that may be posted now
    size_t next_row = 0;
    uint64_t row_offset = 0;
    uint32_t outstanding = 0; // requests whose callback has not come
    bool queued = false;      // for posting pieces or checks
    bool planned = false;     // the data has arrived, `checks` are made
    std::vector<CookieCheck> checks;
    size_t next_check = 0;
    Failure failure;
};

} // namespace kvrdma::ucx
