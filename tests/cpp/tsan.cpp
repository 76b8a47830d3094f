// The protocol on threads, with the CPU Atom, under ThreadSanitizer: ranks run ahead of each other, teams run together or one after another, the two roles
// of a team in lockstep or side by side. Agreeing calls never raise and are right to the byte; a rank that disagrees is noticed, long before the deadline.
//   tsan [--seeds N] [--first S] [--failures N]
#include "program.hpp"
#include "purlin/atom/cpu.hpp"
#include "purlin/snac.hpp"

#include <thread>

namespace purlin::test {
namespace {

static_assert(Atom<cpu::Cpu<cpu::Roles::lockstep>> && Atom<cpu::Cpu<cpu::Roles::side_by_side>>);

constexpr Lines lines{cpu::payload_bytes, cpu::line_bytes};

std::atomic<int> races{0};  // that ThreadSanitizer has reported

struct Skew {  // when a rank is late
  int percent;
  std::chrono::microseconds late;
};

template <cpu::Roles roles>
class Run {
 public:
  Run(const Program& program, Skew skew, Word seed)
      : p_(program), skew_(skew), seed_(seed), world_(program.setting, program.plans) {
    wrong_.resize(static_cast<size_t>(p_.setting.limits.ranks));
    at_.resize(wrong_.size());
  }

  std::string run() {
    std::vector<std::thread> ranks;
    for (int r = 0; r < p_.setting.limits.ranks; ++r) ranks.emplace_back([this, r] { live(r); });
    for (std::thread& t : ranks) t.join();
    return judge();
  }

 private:
  void live(int r) {
    Random random(seed_ + static_cast<Word>(r));
    for (int plan : p_.schedule[static_cast<size_t>(r)]) {
      if (random.chance(skew_.percent)) std::this_thread::sleep_for(skew_.late);
      world_.prepare(plan, r);
      call(random, r, plan);
      if (fault(r) != Fault::none) return;
      std::string wrong = world_.check(plan, r);
      if (!wrong.empty()) wrong_[static_cast<size_t>(r)] = wrong;
      ++at_[static_cast<size_t>(r)];
    }
    for (int other = 0; other < p_.setting.limits.ranks; ++other)  // it leaves for good
      if (other != r) cpu::shared(post(other, r)).store(farewell, std::memory_order_release);
  }
  Word* post(int at, int of) {
    int ranks = p_.setting.limits.ranks;
    return Inbox{world_.geometry(), world_.arena(at)}.post((of - at - 1 + ranks) % ranks);
  }
  void call(Random& random, int r, int plan) {
    Call c = world_.call(plan, r);
    c.parts = random.chance(50) ? 3 : 1;
    auto team = [&](int t) {
      cpu::Host host;
      host.timeout = std::chrono::seconds(8);
      cpu::Cpu<roles> atom(c, t, host);
      snac::run(atom, c);
    };
    if (random.chance(50)) {
      for (int t = 0; t < c.teams; ++t) team(t);
    } else {
      std::vector<std::thread> teams;
      for (int t = 1; t < c.teams; ++t) teams.emplace_back(team, t);
      team(0);
      for (std::thread& t : teams) t.join();
    }
  }
  Fault fault(int r) {
    Word word = cpu::shared(Inbox{world_.geometry(), world_.arena(r)}.poison()).load();
    return word == 0 ? Fault::none : decode(word).fault;
  }
  std::string judge() {
    bool right = true;
    Fault first = Fault::none;
    for (int r = 0; r < p_.setting.limits.ranks; ++r) {
      const std::string& wrong = wrong_[static_cast<size_t>(r)];
      if (!wrong.empty() && wrong != "wrong data") return wrong;
      right = right && wrong.empty();
      if (first == Fault::none) first = fault(r);
      if (std::string dead = world_.canaries(r); !dead.empty()) return dead;
    }
    if (first == Fault::stall) return may_stall(p_, at_) ? "" : "a wait ends at its deadline";
    if (p_.odd.rank >= 0) return first == Fault::none ? unnoticed(p_, right) : "";
    if (first != Fault::none) return "agreeing calls end in fault " + std::to_string(static_cast<int>(first));
    return right ? "" : "wrong data";
  }

  const Program& p_;
  const Skew skew_;
  const Word seed_;
  World world_;
  std::vector<std::string> wrong_;
  std::vector<size_t> at_;  // which call of its schedule a rank is in
};

std::string explore(Word seed) {
  Random random(seed * 2 + 1);
  Program p = draw_program(random, lines, seed % 5 == 4 ? Agree::no : Agree::yes);
  Skew skew = random.chance(30) ? Skew{30, std::chrono::milliseconds(4)} : Skew{30, std::chrono::microseconds(50)};
  if (random.chance(50)) return Run<cpu::Roles::lockstep>(p, skew, random.next()).run();
  return Run<cpu::Roles::side_by_side>(p, skew, random.next()).run();
}

int main(int argc, char** argv) {
  Word seeds = 1000, first = 0;
  int failures = 5;
  for (int i = 1; i < argc; ++i) {
    std::string option = argv[i];
    if (i + 1 == argc) return std::printf("tsan: %s needs a number\n", argv[i]), 2;
    if (option == "--seeds") seeds = std::stoull(argv[++i]);
    else if (option == "--first") first = std::stoull(argv[++i]);
    else if (option == "--failures") failures = std::stoi(argv[++i]);
    else return std::printf("usage: tsan [--seeds N] [--first S] [--failures N]\n"), 2;
  }
  int passed = 0, failed = 0;
  for (Word seed = first; seed < first + seeds && failed < failures; ++seed) {
    races = 0;
    std::string wrong = explore(seed);
    if (races > 0) wrong = std::to_string(races) + " data races" + (wrong.empty() ? "" : ", " + wrong);
    ++(wrong.empty() ? passed : failed);
    if (!wrong.empty()) std::printf("seed %llu: %s\n", seed, wrong.c_str()), std::fflush(stdout);
  }
  std::printf("%d passed, %d failed\n", passed, failed);
  return failed != 0;
}

}  // namespace
}  // namespace purlin::test

extern "C" void __tsan_on_report(void*) { ++purlin::test::races; }  // it calls this by name

int main(int argc, char** argv) { return purlin::test::main(argc, argv); }
