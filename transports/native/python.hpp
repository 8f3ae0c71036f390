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

using GridArrays = std::vector<std::tuple<RowArray, RowArray>>; // bases and cells

inline Grid grid_of(const RowArray &bases, const RowArray &cells) {
    return {reinterpret_cast<const Row *>(bases.data()), bases.shape(0), reinterpret_cast<const Row *>(cells.data()),
            cells.shape(0)};
}

inline Given given_of(const GridArrays &grids, const GridArrays &then) {
    Given given;
    for (const auto &[bases, cells] : grids)
        given.head.push_back(grid_of(bases, cells));
    for (const auto &[bases, cells] : then)
        given.tail.push_back(grid_of(bases, cells));
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
