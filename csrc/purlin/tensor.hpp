// What a tensor's maker tells of it without an object of Python's: DLPack's exchange API, a table of C functions that the type of a tensor carries.
#pragma once
#include "portable.hpp"

#include <cstdint>
#include <cstring>

namespace purlin {

struct TensorView {  // DLTensor of dlpack.h; it points into the tensor
  char* data;
  std::int32_t device_kind, device;
  std::int32_t dims;
  std::uint8_t code, bits;
  std::uint16_t lanes;
  const i64 *shape, *strides;
  std::uint64_t data_offset;
};

// Of these a view does not tell all: which are lazy conjugates, and which integers have fewer bits than the byte they lie in.
inline bool is_vague(const TensorView& t) {
  constexpr std::uint8_t integers = 0, unsigned_integers = 1, complex_numbers = 5;  // codes of types
  return t.code == complex_numbers || ((t.code == integers || t.code == unsigned_integers) && t.bits <= 8);
}

struct TensorApi {  // DLPackExchangeAPI of dlpack.h 1.2 and later, as far as it is used here
  std::uint32_t major, minor;
  void* older;
  void *allocate, *to_managed, *from_managed;
  // Not 0: this tensor cannot be told of, and Python has an error. nullptr: none can.
  int (*view)(void* tensor, TensorView* out);
};

// All of some tensors that a plan depends on, one behind the other, so that equal bytes are equal tensors.
class TensorFacts {
 public:
  static constexpr int most_dims = 8, most_bytes = 4096;

  // False: too much.
  bool add(const TensorView& t) {
    std::int32_t head[] = {t.dims, t.code << 24 | t.bits << 16 | t.lanes, t.device_kind, t.device};
    if (t.dims > most_dims || bytes_ + sizeof head + 2 * most_dims * sizeof(i64) > most_bytes) return false;
    append(head, sizeof head);
    append(t.shape, static_cast<std::size_t>(t.dims) * sizeof(i64));
    append(t.strides, static_cast<std::size_t>(t.dims) * sizeof(i64));
    return true;
  }
  const char* data() const { return facts_; }
  std::size_t bytes() const { return bytes_; }

 private:
  void append(const void* what, std::size_t size) {
    if (size > 0) std::memcpy(facts_ + bytes_, what, size);
    bytes_ += size;
  }

  char facts_[most_bytes];
  std::size_t bytes_ = 0;
};

}  // namespace purlin
