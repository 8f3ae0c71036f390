// What both native transports need at the border to Python: the error translator and the shape of an event.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "completions.hpp"
#include "errors.hpp"
#include "rows.hpp"

namespace kvrdma {

namespace nb = nanobind;

using RowArray = nb::ndarray<const uint64_t, nb::shape<-1, 4>, nb::c_contig, nb::device::cpu>;
using Event = std::tuple<std::string, uint64_t, uint64_t, uint64_t, uint64_t, uint64_t, std::string, int>;

using GridArrays = std::vector<std::tuple<RowArray, RowArray, RowArray, RowArray>>; // bases, cells, pages, scale

inline Table table_of(const RowArray &rows) { return {reinterpret_cast<const Row *>(rows.data()), rows.shape(0)}; }

inline std::vector<Grid> grids_of(const GridArrays &arrays) {
    std::vector<Grid> grids;
    for (const auto &[bases, cells, pages, scale] : arrays) {
        if (scale.shape(0) != 1)
            throw StatusError("RowsError", "the scale of a grid is one row, not " + std::to_string(scale.shape(0)));
        grids.push_back({table_of(bases), table_of(cells), table_of(pages), table_of(scale)[0]});
    }
    return grids;
}

inline Given given_of(const GridArrays &grids, const GridArrays &then) {
    Given given{grids_of(grids), grids_of(then)};
    given.count = count_rows(given.head);
    given.then_count = count_rows(given.tail);
    return given;
}

inline std::vector<Event> events_of(std::vector<Completion> &&done) {
    std::vector<Event> events;
    events.reserve(done.size());
    for (auto &c : done)
        events.emplace_back(c.kind, c.read, c.peer, c.rows, c.rows_posted, c.nbytes, c.message, c.code);
    return events;
}

inline void register_translator() {
    nb::register_exception_translator([](const std::exception_ptr &raised, void *) {
        try {
            std::rethrow_exception(raised);
        } catch (const StatusError &error) {
            nb::object type = nb::module_::import_("kvrdma.errors").attr(error.kind());
            nb::object code = error.code() ? nb::object(nb::int_(error.code())) : nb::none();
            // Not type(...): what runs Python in here may be killed at the interpreter's end, see unlocked.hpp.
            nb::object value = type.attr("__new__")(type, error.what());
            value.attr("code") = code;
            PyErr_SetObject(type.ptr(), value.ptr());
        }
    });
}

} // namespace kvrdma
