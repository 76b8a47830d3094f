// What moves: boxes of tensors strung on a *wire*, a line of bytes that source and reader count alike.
//
// Item k of a route covers wire bytes [at, at + bytes); every item begins at a multiple of 16 and the fewer than 16 bytes between two items belong to nobody.
// A Place says where wire bytes lie in this rank's view of memory; a Cursor walks one by carries, with divisions only where it is first set down.
#pragma once
#include "portable.hpp"

namespace purlin {

constexpr int max_ranks = 16;
constexpr int max_dims = 4;      // strided dims of a box beside its contiguous run
constexpr int max_tensors = 16;  // inputs, and outputs, of one call
constexpr int max_grants = 4;    // outputs a direct call can grant

constexpr int vector_bytes = 16, wide_bytes = 32;  // what a lane moves at once, and where a GPU has wider ones

// n / divisor without a division, for n < 2^31: multiply by 2^(32 + shift) / divisor, rounded up (Granlund and Montgomery 1994).
struct Divider {
  unsigned divisor, multiplier, shift;

  PURLIN_FN unsigned divide(unsigned n) const { return divisor == 1 ? n : multiply_high(n, multiplier) >> shift; }
};
PURLIN_FN Divider divider(unsigned divisor) {
  unsigned bits = 0;  // of divisor - 1
  while (bits < 32 && (1ull << bits) < divisor) ++bits;
  unsigned shift = bits > 0 ? bits - 1 : 0;
  return {divisor, static_cast<unsigned>(((1ull << (32 + shift)) + divisor - 1) / divisor), shift};
}

struct Box {
  i64 offset;                              // bytes after the tensor's first byte
  i64 run;                                 // contiguous bytes
  i64 extent[max_dims], stride[max_dims];  // [dims], outermost first; stride in bytes
  int dims;
  int tensor;  // which of the call's tensors
  // filled by measure()
  int align;                            // the largest power of two up to 16 that divides offset, run and strides
  Divider by_run, by_extent[max_dims];  // in vectors of 16 bytes; of use when align is 16
};

PURLIN_FN void measure(Box& box) {
  i64 all = box.offset | box.run | vector_bytes;
  for (int d = 0; d < box.dims; ++d) all |= box.stride[d];
  box.align = static_cast<int>(all & -all);
  if (box.align < vector_bytes || box.run / vector_bytes >> 31) return;
  box.by_run = divider(static_cast<unsigned>(box.run / vector_bytes));
  for (int d = 0; d < box.dims; ++d) box.by_extent[d] = divider(static_cast<unsigned>(box.extent[d]));
}

struct Item {
  i64 at, bytes;  // wire bytes [at, at + bytes); never none
  Box box;
};

struct Range {
  i64 lo, hi;  // wire bytes
  PURLIN_FN bool empty() const { return lo >= hi; }
};

// Wire bytes [lo, lo + bytes) of some items, cut into chunks of `chunk` bytes (a multiple of 16) that are dealt to the teams in turn.
// A *flat* route is one stretch of one tensor and needs no items: wire byte x lies at tensor + offset + x.
struct Route {
  const Item* items;
  int count;  // 0: flat
  i64 lo, bytes, chunk;
  i64 offset = 0;
  int tensor = 0;

  PURLIN_FN bool flat() const { return count == 0; }

  PURLIN_FN Range range(int step, int team, int teams) const {
    i64 from = lo + (static_cast<i64>(step) * teams + team) * chunk;
    return {from, smaller(from + chunk, lo + bytes)};
  }
  PURLIN_FN int messages(int team, int teams) const {  // how many of its chunks are dealt to this team
    i64 all = bytes > 0 ? ceil_div(bytes, chunk) : 0;
    return all > team ? static_cast<int>(ceil_div(all - team, teams)) : 0;
  }
};

struct Grant {
  Word place;  // offset of a granted output in its reader's arena
  Word tag;
};

// Where wire bytes lie: one after the other, or in boxes of tensors, or in boxes of a peer's granted outputs.
struct Place {
  const Item* items;  // nullptr: wire byte x lies at begin() + x
  int count;
  char* first;
  char* const* tensors;  // base of each tensor, or nullptr
  char* arena;           // with `grants`: tensor k begins at arena + grants[k].place, of a flat place the one there is
  const Grant* grants;
  bool shared;  // a slot, or a peer's: another rank reads what is written here

  PURLIN_FN bool flat() const { return items == nullptr; }
  PURLIN_FN char* begin() const { return grants ? first + grants->place : first; }  // flat() only
  PURLIN_FN char* base(int tensor) const { return grants ? arena + grants[tensor].place : tensors[tensor]; }
};
// `flat`: all routes of the call are, and the compiler knows it.
template <bool flat = false>
PURLIN_FN Place in_tensors(const Route& route, char* const* tensors) {
  if (flat || route.flat()) return {nullptr, 0, tensors[route.tensor] + route.offset, nullptr, nullptr, nullptr, false};
  return {route.items, route.count, nullptr, tensors, nullptr, nullptr, false};
}
// Unless the compiler knows it to be flat, grants are looked at where bytes are stored: who only loads may be ahead of them.
template <bool flat = false>
PURLIN_FN Place in_granted(const Route& route, char* arena, const Grant* grants) {
  if constexpr (flat)
    return {nullptr, 0, arena + grants[route.tensor].place + route.offset, nullptr, nullptr, nullptr, true};
  if (route.flat()) return {nullptr, 0, arena + route.offset, nullptr, arena, grants + route.tensor, true};
  return {route.items, route.count, nullptr, nullptr, arena, grants, true};
}
PURLIN_FN Place in_slot(char* slot, i64 origin) {  // whose first byte is wire byte `origin`
  return {nullptr, 0, slot - origin, nullptr, nullptr, nullptr, true};
}

// A position on a Place. at() is nullptr on the bytes between two items.
class Cursor {
 public:
  PURLIN_FN Cursor(const Place& place, i64 wire) : place_(place) {
    if (place.flat()) {
      row_ = place.begin() + wire;
      left_ = forever;
    } else {
      while (item_ < place.count && place.items[item_].at + place.items[item_].bytes <= wire) ++item_;
      set_down(wire);
    }
  }
  PURLIN_FN char* at() const { return row_; }
  PURLIN_FN i64 left() const { return left_; }  // bytes that lie together from here on
  PURLIN_FN void advance(i64 bytes) {           // bytes <= left()
    left_ -= bytes;
    if (row_) row_ += bytes;
    if (left_ == 0) next_run();
  }

 private:
  static constexpr i64 forever = i64{1} << 62;

  PURLIN_FN void set_down(i64 wire) {
    if (item_ == place_.count) return rest();
    const Item& item = place_.items[item_];
    if (wire < item.at) return gap(item.at - wire);
    const Box& box = item.box;
    i64 within = wire - item.at, run = within / box.run;
    for (int d = box.dims - 1; d >= 0; --d) {
      index_[d] = run % box.extent[d];
      run /= box.extent[d];
    }
    left_ = box.run - within % box.run;
    row_ = start_of_run(box) + within % box.run;
  }
  PURLIN_FN char* start_of_run(const Box& box) const {
    i64 offset = box.offset;
    for (int d = 0; d < box.dims; ++d) offset += index_[d] * box.stride[d];
    return place_.base(box.tensor) + offset;
  }
  PURLIN_FN void next_run() {
    if (!row_) return set_down(place_.items[item_].at);  // end of a gap
    const Item& item = place_.items[item_];
    const Box& box = item.box;
    int d = box.dims - 1;
    for (; d >= 0 && ++index_[d] == box.extent[d]; --d) index_[d] = 0;
    if (d >= 0) {
      row_ = start_of_run(box);
      left_ = box.run;
    } else {
      i64 end = item.at + item.bytes;
      ++item_;
      set_down(end);
    }
  }
  PURLIN_FN void gap(i64 bytes) {
    row_ = nullptr;
    left_ = bytes;
  }
  PURLIN_FN void rest() { gap(forever); }

  const Place place_;
  int item_ = 0;
  i64 index_[max_dims] = {};
  char* row_ = nullptr;
  i64 left_ = 0;
};

// Calls piece(to, from, bytes) for every stretch of `range` that lies together on both sides.
template <class F>
PURLIN_FN void for_each_piece(const Place& to, const Place& from, Range range, F piece) {
  Cursor write(to, range.lo), read(from, range.lo);
  for (i64 wire = range.lo; wire < range.hi;) {
    i64 bytes = smaller(range.hi - wire, smaller(write.left(), read.left()));
    if (write.at() && read.at()) piece(write.at(), read.at(), bytes);
    write.advance(bytes);
    read.advance(bytes);
    wire += bytes;
  }
}

}  // namespace purlin
