// The soak of soak.hpp on the CPU: plans and endpoints as Python uses them, under ThreadSanitizer.
#include "plan.cpp"
#include "cpu.cpp"
#include "soak.hpp"

#include <atomic>
#include <list>

namespace purlin::test {
namespace {

std::atomic<int> races{0};  // that ThreadSanitizer has reported

class Cpu final : public Ground {
 public:
  Limits limits() const override { return {256 << 10, 128 << 10, 24, false, 4000}; }
  char* take(i64 bytes) override {
    std::vector<Line>& block = blocks_.emplace_back(static_cast<size_t>(ceil_div(larger<i64>(bytes, 1), line)));
    std::memset(block.data(), canary, block.size() * sizeof(Line));
    return block.data()->bytes;
  }
  void give_back() override { blocks_.clear(); }
  void write(char* to, const void* from, i64 bytes) override { std::memcpy(to, from, static_cast<size_t>(bytes)); }
  void read(void* to, const char* from, i64 bytes) override { std::memcpy(to, from, static_cast<size_t>(bytes)); }

  Stream stream(int) override { return 0; }
  void copy(Stream, char* to, const char* from, i64 bytes) override { write(to, from, bytes); }
  void compare(Stream, const char* at, const char* expected, i64 bytes, Word* first_wrong) override {
    for (i64 i = 0; i < bytes; ++i)
      if (at[i] != expected[i]) return void(*first_wrong = smaller(*first_wrong, static_cast<Word>(i)));
  }
  void dawdle(Stream, int microseconds) override {
    std::this_thread::sleep_for(std::chrono::microseconds(microseconds));
  }
  void finish(Stream) override {
    if (races > 0) throw std::runtime_error(std::to_string(races) + " data races");
  }

 private:
  struct alignas(line) Line {
    char bytes[line];
  };
  std::list<std::vector<Line>> blocks_;
};

}  // namespace
}  // namespace purlin::test

extern "C" void __tsan_on_report(void*) { ++purlin::test::races; }  // it calls this by name

int main(int argc, char** argv) {
  purlin::test::Cpu cpu;
  return purlin::test::soak(argc, argv, cpu);
}
