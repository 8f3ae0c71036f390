// Rows, and the three things done to a batch before it is posted: copy it with its bounds checked, sort, merge.
//
// A batch has a head, given as grids, and, behind it in the same array, a tail: rows that are read once the head has
// arrived.
// kvrdma/rows.py is the readable definition of the same functions.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <iterator>
#include <map>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "errors.hpp"

namespace kvrdma {

struct Row {
    uint64_t local;  // address
    uint64_t region; // remote region index; after take_rows the local region id is in its upper half
    uint64_t offset; // in the remote region
    uint64_t length;

    Row() noexcept {} // not zeroed: an array that is about to be filled is not written twice
    Row(uint64_t address, uint64_t remote, uint64_t from, uint64_t nbytes) noexcept
        : local(address), region(remote), offset(from), length(nbytes) {}
    Row operator+(const Row &more) const noexcept {
        return {local + more.local, region + more.region, offset + more.offset, length + more.length};
    }
    Row operator*(const Row &times) const noexcept {
        return {local * times.local, region * times.region, offset * times.offset, length * times.length};
    }
    // A copy for which every field is read exactly once, whatever another thread writes meanwhile.
    Row once() const volatile noexcept { return {local, region, offset, length}; }

    uint32_t remote_region() const noexcept { return static_cast<uint32_t>(region); }
    uint32_t local_region() const noexcept { return static_cast<uint32_t>(region >> 32); }
};
static_assert(sizeof(Row) == 32);

// Arrays of rows, used again: a fresh one of some hundred KiB is fresh pages each time, which cost a caller of read()
// more than everything else it does there. Thread-safe; keeps at most kKept arrays of at most kMaxRows rows.
class RowBuffers {
  public:
    // An array of any size and content.
    std::vector<Row> take() {
        std::lock_guard lock(mutex_);
        if (spare_.empty())
            return {};
        std::vector<Row> rows = std::move(spare_.back());
        spare_.pop_back();
        return rows;
    }

    void give_back(std::vector<Row> &&rows) {
        std::lock_guard lock(mutex_);
        if (spare_.size() < kKept && rows.capacity() <= kMaxRows)
            spare_.push_back(std::move(rows));
    }

  private:
    static constexpr size_t kKept = 4, kMaxRows = 1u << 18; // 32 MiB at most
    std::mutex mutex_;
    std::vector<std::vector<Row>> spare_;
};

// Registered regions by address. Regions may overlap, so every entry also knows the entry that reaches
// furthest among those starting at or before it.
class RegionTable {
  public:
    struct Entry {
        uint64_t begin, end;
        uint32_t id;
    };

    void add(uint32_t id, uint64_t addr, uint64_t nbytes) {
        regions_.emplace(id, Entry{addr, addr + nbytes, id});
        rebuild();
    }
    bool remove(uint32_t id) {
        const bool known = regions_.erase(id) > 0;
        rebuild();
        return known;
    }
    bool contains(uint32_t id) const { return regions_.count(id) > 0; }

    // The region that holds [addr, addr + length), or null.
    const Entry *find(uint64_t addr, uint64_t length) const noexcept {
        auto after = std::upper_bound(sorted_.begin(), sorted_.end(), addr,
                                      [](uint64_t a, const Slot &slot) { return a < slot.begin; });
        if (after == sorted_.begin())
            return nullptr;
        const Entry &entry = (after - 1)->furthest;
        return length <= entry.end - entry.begin && addr - entry.begin <= entry.end - entry.begin - length ? &entry
                                                                                                          : nullptr;
    }

  private:
    struct Slot {
        uint64_t begin;
        Entry furthest;
    };

    void rebuild() {
        sorted_.clear();
        for (const auto &[id, entry] : regions_)
            sorted_.push_back({entry.begin, entry});
        std::sort(sorted_.begin(), sorted_.end(), [](const Slot &a, const Slot &b) { return a.begin < b.begin; });
        for (size_t i = 1; i < sorted_.size(); ++i)
            if (sorted_[i - 1].furthest.end > sorted_[i].furthest.end)
                sorted_[i].furthest = sorted_[i - 1].furthest;
    }

    std::map<uint32_t, Entry> regions_;
    std::vector<Slot> sorted_;
};

inline std::string describe(const Row &row, size_t index) {
    char text[160];
    snprintf(text, sizeof text, "row %zu (local 0x%llx, region %llu, offset %llu, length %llu)", index,
             (unsigned long long)row.local, (unsigned long long)row.region, (unsigned long long)row.offset,
             (unsigned long long)row.length);
    return text;
}

[[noreturn]] inline void refuse(const Row &row, size_t index, const std::string &why) {
    throw StatusError("RowsError", describe(row, index) + ": " + why);
}

// Rows that follow each other and lie in the same region on either side.
struct Run {
    uint32_t local_region, remote_region;
    uint64_t begin, end; // local addresses, from the first byte that may be written to behind the last
};

// Rows of a caller's, in memory that another of its threads may write meanwhile.
class Table {
  public:
    Table() = default;
    Table(const Row *rows, size_t count) : rows_(rows), count_(count) {}
    size_t size() const noexcept { return count_; }
    Row operator[](size_t i) const noexcept { return const_cast<const volatile Row *>(rows_ + i)->once(); }
    void prefetch(size_t i) const noexcept { __builtin_prefetch(rows_ + std::min(i, count_ - 1)); }

  private:
    const Row *rows_ = nullptr;
    size_t count_ = 0;
};

inline const Row kOrigin(0, 0, 0, 0);

// Rows as a caller gives them: base + page * scale + cell of each of either, field by field, cells running fastest.
struct Grid {
    Table bases{&kOrigin, 1}, cells, pages{&kOrigin, 1};
    Row scale = kOrigin;
};

// A batch as a caller gives it.
struct Given {
    std::vector<Grid> head, tail;
    size_t count = 0, then_count = 0; // rows of either
};

// Of a head or a tail: that of both together can be counted, too, and no read is asked for more.
constexpr size_t kMostRows = 1ull << 31;

// Throws RowsError if they are too many.
inline size_t count_rows(const std::vector<Grid> &grids) {
    size_t total = 0;
    for (const Grid &grid : grids) {
        size_t rows = 0;
        if (__builtin_mul_overflow(grid.bases.size(), grid.pages.size(), &rows) ||
            __builtin_mul_overflow(rows, grid.cells.size(), &rows) || __builtin_add_overflow(total, rows, &total) ||
            total > kMostRows)
            throw StatusError("RowsError", "a grid of " + std::to_string(grid.bases.size()) + " bases, " +
                                               std::to_string(grid.pages.size()) + " pages and " +
                                               std::to_string(grid.cells.size()) + " cells: too many rows for one read");
    }
    return total;
}

struct Taken {
    uint64_t nbytes = 0, then_nbytes = 0;
};

// 2 KiB: the processor's own prefetching ends at each page, where cold memory costs most (10 to 6 ns a row).
constexpr size_t kPrefetchRows = 64;

// Writes out rows that a caller gave and may change meanwhile, checks them and tells `note` of every Run, in one pass:
// cold memory is what a caller of read() waits for. `rows` has room for them from `first` on. Returns their bytes.
// Throws RowsError for the first row that leaves its local or remote region.
template <typename Note>
uint64_t take_rows(const std::vector<Grid> &grids, std::vector<Row> &rows, size_t first, const RegionTable &local,
                   const std::vector<uint64_t> &remote, Note note) {
    const RegionTable::Entry *here = nullptr;
    uint64_t nbytes = 0, regions = ~0ull, begin = 0, end = 0;
    const auto noted = [&] {
        if (regions != ~0ull)
            note(Run{static_cast<uint32_t>(regions >> 32), static_cast<uint32_t>(regions), begin, end});
    };
    const auto take = [&](const Row &start, const Table &cells) {
        for (size_t i = 0; i < cells.size(); ++i) {
            cells.prefetch(i + kPrefetchRows);
            __builtin_prefetch(rows.data() + std::min(first + kPrefetchRows, rows.size() - 1), 1);
            const Row row = start + cells[i];
            if (row.region >= remote.size())
                refuse(row, first, "the peer has " + std::to_string(remote.size()) + " regions; no such region");
            const uint64_t size = remote[row.region];
            if (row.length > size || row.offset > size - row.length)
                refuse(row, first, "ends outside the remote region of " + std::to_string(size) + " bytes");
            if (!here || row.local < here->begin || row.length > here->end - here->begin ||
                row.local - here->begin > here->end - here->begin - row.length)
                here = local.find(row.local, row.length);
            if (!here)
                refuse(row, first, "its local bytes are in no region registered here");
            const uint64_t both = row.region | static_cast<uint64_t>(here->id) << 32;
            if (both != regions) {
                noted();
                regions = both, begin = end = row.local;
            }
            begin = std::min(begin, row.local);
            end = std::max(end, row.local + row.length);
            nbytes += row.length;
            rows[first++] = Row(row.local, both, row.offset, row.length);
        }
    };
    for (const Grid &grid : grids)
        for (size_t i = 0; i < grid.bases.size(); ++i) {
            const Row base = grid.bases[i];
            for (size_t page = 0; page < grid.pages.size(); ++page)
                take(base + grid.pages[page] * grid.scale, grid.cells);
        }
    noted();
    return nbytes;
}

// A whole batch, likewise: its tail lies behind its head.
template <typename Note>
Taken take_batch(const Given &given, std::vector<Row> &rows, const RegionTable &local,
                 const std::vector<uint64_t> &remote, Note note) {
    rows.resize(given.count + given.then_count);
    return {take_rows(given.head, rows, 0, local, remote, note),
            take_rows(given.tail, rows, given.count, local, remote, note)};
}

inline bool in_order(const std::vector<Row> &rows) noexcept {
    for (size_t i = 1; i < rows.size(); ++i)
        if (rows[i - 1].region > rows[i].region ||
            (rows[i - 1].region == rows[i].region && rows[i - 1].offset > rows[i].offset))
            return false;
    return true;
}

// Sorts by (region, offset) with a radix sort of 32-bit indices over the bits that vary: 8 bytes a row of extra
// memory and about 5 ns a row, where std::sort on rows takes 60.
class RowSorter {
  public:
    explicit RowSorter(std::vector<Row> &rows) : rows_(rows), order_(rows.size()), spare_(rows.size()) {
        for (uint32_t i = 0; i < order_.size(); ++i)
            order_[i] = i;
        sort_by([](const Row &row) { return row.offset; });
        sort_by([](const Row &row) { return row.region; });
        permute();
    }

  private:
    template <typename Field> void sort_by(Field field) {
        uint64_t varying = 0;
        for (const Row &row : rows_)
            varying |= field(row) ^ field(rows_[0]);
        while (varying) {
            const int shift = __builtin_ctzll(varying);
            pass([&](const Row &row) { return (field(row) >> shift) & (kBuckets - 1); });
            varying = shift + kBits < 64 ? varying >> (shift + kBits) << (shift + kBits) : 0;
        }
    }

    template <typename Digit> void pass(Digit digit) {
        uint32_t start[kBuckets] = {};
        for (const Row &row : rows_)
            ++start[digit(row)];
        uint32_t sum = 0;
        for (uint32_t &count : start)
            sum += std::exchange(count, sum);
        for (uint32_t i : order_)
            spare_[start[digit(rows_[i])]++] = i;
        order_.swap(spare_);
    }

    // Moves rows into the sorted order along the cycles of the permutation.
    void permute() {
        for (uint32_t first = 0; first < rows_.size(); ++first) {
            const Row held = rows_[first];
            uint32_t to = first;
            while (order_[to] != first) {
                const uint32_t from = order_[to];
                rows_[to] = rows_[from];
                order_[to] = to;
                to = from;
            }
            rows_[to] = held;
            order_[to] = to;
        }
    }

    static constexpr int kBits = 11;
    static constexpr uint32_t kBuckets = 1u << kBits;
    std::vector<Row> &rows_;
    std::vector<uint32_t> order_, spare_;
};

// Drops empty rows and joins those adjacent on both sides within one local and one remote region.
inline void merge_rows(std::vector<Row> &rows) {
    rows.erase(std::remove_if(rows.begin(), rows.end(), [](const Row &row) { return row.length == 0; }), rows.end());
    if (rows.size() < 2)
        return;
    if (!in_order(rows))
        RowSorter sorter(rows);
    size_t kept = 0;
    for (size_t i = 1; i < rows.size(); ++i) {
        Row &last = rows[kept];
        if (last.region == rows[i].region && last.offset + last.length == rows[i].offset &&
            last.local + last.length == rows[i].local)
            last.length += rows[i].length;
        else
            rows[++kept] = rows[i];
    }
    rows.resize(kept + 1);
}

// Does so with the head of a batch and moves its tail, without empty rows, up behind it. Returns the rows of the head.
inline size_t merge_batch(std::vector<Row> &rows, size_t tail) {
    const std::vector<Row> last(rows.end() - static_cast<std::ptrdiff_t>(tail), rows.end());
    rows.resize(rows.size() - tail);
    merge_rows(rows);
    const size_t head = rows.size();
    std::copy_if(last.begin(), last.end(), std::back_inserter(rows), [](const Row &row) { return row.length > 0; });
    return head;
}

} // namespace kvrdma
