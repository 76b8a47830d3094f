// Seeded random numbers, the same on every machine: a failing seed fails again.
#pragma once
#include "../portable.hpp"

namespace purlin::model {

class Random {  // splitmix64
 public:
  explicit Random(Word seed) : state_(seed) {}

  Word next() {
    Word z = state_ += 0x9e3779b97f4a7c15ull;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ z >> 27) * 0x94d049bb133111ebull;
    return z ^ z >> 31;
  }
  i64 below(i64 n) { return static_cast<i64>(next() >> 1) % n; }   // [0, n)
  i64 between(i64 lo, i64 hi) { return lo + below(hi - lo + 1); }  // [lo, hi]
  bool chance(int percent) { return below(100) < percent; }
  double unit() { return static_cast<double>(next() >> 11) * 0x1p-53; }  // [0, 1)
  template <class T>
  T& pick(T* items, i64 count) {
    return items[below(count)];
  }
  template <class Items>
  auto& pick(Items& items) {
    return items[static_cast<unsigned long>(below(static_cast<i64>(items.size())))];
  }

 private:
  Word state_;
};

}  // namespace purlin::model
