// Laws of what GPUs add in registers, shown on the CPU: a vector's elements are added as each of them would be alone, for every dtype and op.
#include "purlin/atom/fold.cuh"

#include <cstdio>
#include <cstring>
#include <random>

namespace purlin::test {
namespace {

using namespace gpu;

constexpr int contributions = 3, trials = 1000;
constexpr const char* names[] = {"sum", "avg", "max", "min"};
int passed = 0, failed = 0;

std::mt19937_64& random() {
  static std::mt19937_64 engine(7);
  return engine;
}

// As csrc/purlin/numeric.hpp says it, without Fold.
template <class T>
typename T::Stored alone(const typename T::Stored (&values)[contributions], Op op) {
  auto total = T::widen(values[0]);
  for (int k = 1; k < contributions; ++k) {
    auto next = T::widen(values[k]);
    total = op == Op::max   ? numeric::join<Op::max>(total, next)
            : op == Op::min ? numeric::join<Op::min>(total, next)
                            : numeric::join<Op::sum>(total, next);
  }
  if (op == Op::avg) total = total / static_cast<decltype(total)>(contributions);
  return T::narrow(total);
}

template <class T, class V>
bool adds_each_element(Op op) {
  using Stored = typename T::Stored;
  constexpr int elements = sizeof(V) / sizeof(Stored);
  Stored in[contributions][elements], out[elements];
  V vectors[contributions];
  for (int k = 0; k < contributions; ++k) {
    for (Stored& value : in[k]) {
      std::uint64_t bits = random()();
      std::memcpy(&value, &bits, sizeof value);
    }
    std::memcpy(&vectors[k], in[k], sizeof(V));
  }
  auto fold = [&](auto accumulated) {
    accumulated.first(vectors[0]);
    for (int k = 1; k < contributions; ++k) accumulated.next(vectors[k], op);
    V result = accumulated.rounded(op, contributions);
    std::memcpy(out, &result, sizeof result);
  };
  if (is_extreme(op)) {
    fold(Fold<T, true, V>{});
  } else {
    fold(Fold<T, false, V>{});
  }
  for (int e = 0; e < elements; ++e) {
    Stored wanted = alone<T>({in[0][e], in[1][e], in[2][e]}, op);
    bool same = std::memcmp(&wanted, &out[e], sizeof wanted) == 0;
    if constexpr (std::is_floating_point_v<Stored>) same = same || (wanted != wanted && out[e] != out[e]);  // any NaN
    if (!same) return false;
  }
  return true;
}

template <class T, class V>
void law(Dtype dtype, const char* unit, Op op) {
  bool holds = true;
  for (int k = 0; holds && k < trials; ++k) holds = adds_each_element<T, V>(op);
  ++(holds ? passed : failed);
  if (!holds) std::printf("FAILED: dtype %d, %s of %s\n", static_cast<int>(dtype), names[static_cast<int>(op)], unit);
}

}  // namespace
}  // namespace purlin::test

int main() {
  using namespace purlin;
  for (int d = 0; d <= static_cast<int>(Dtype::uint8); ++d) {
    numeric::with_constant(static_cast<Dtype>(d), [](auto dtype) {
      using T = numeric::TypeOf<decltype(dtype)::value>;
      for (Op op : {Op::sum, Op::avg, Op::max, Op::min}) {
        if (op == Op::avg && std::is_integral_v<typename T::Wide>) continue;
        test::law<T, typename T::Stored>(dtype, "elements", op);
        test::law<T, Word>(dtype, "packets", op);
        test::law<T, uint4>(dtype, "vectors", op);
      }
    });
  }
  std::printf("%d passed, %d failed\n", test::passed, test::failed);
  return test::failed != 0;
}
