// The protocol on the weakest machine: random agreeing calls never raise, never stand still and are right to the byte, whatever the skew; calls on which one
// rank disagrees are noticed. First the machine shows that it finds out flawed Atoms.
//   model [--seeds N] [--first S] [--failures N] | --seed S [--trace]
#include "purlin/atom/model.hpp"
#include "program.hpp"
#include "purlin/snac.hpp"

#include <map>

namespace purlin::test {
namespace {

static_assert(Atom<model::Model>);
using model::Flaw;
using model::Machine;
using model::Temper;

constexpr Lines lines{model::payload_bytes, model::line_bytes};

struct Result {
  Machine::Ending ending = Machine::Ending::done;
  std::string wrong;  // empty: as it must be
  std::deque<std::string> trace;
};

// ---- runs -----------------------------------------------------------------------------------------------------------------------------------------------

class Run {
 public:
  Run(const Program& program, model::Stacks& stacks, Random random, Temper temper)
      : p_(program),
        world_(program.setting, program.plans),
        memory_(world_.first(), world_.bytes()),
        ranks_(static_cast<size_t>(program.setting.limits.ranks)),
        machine_(memory_, stacks, random, temper) {
    static const char* const names[] = {"source", "reader", "gatherer"};
    const Limits& l = p_.setting.limits;
    for (int r = 0; r < l.ranks; ++r) {
      model::Rank& rank = ranks_[static_cast<size_t>(r)];
      int roles = l.teams * model::roles_a_team;
      rank.actor = l.ranks * roles + r;
      rank.roles.resize(static_cast<size_t>(roles));
      for (int k = 0; k < roles; ++k) {
        model::Role& role = rank.roles[static_cast<size_t>(k)];
        role.actor = r * roles + k;
        role.rank = r;
        role.team = k / model::roles_a_team;
        role.name = names[k % model::roles_a_team];
        machine_.add(role);
      }
    }
    machine_.name = [this](const void* word) { return world_.name_of(word); };
    at_.resize(ranks_.size());
  }

  Result run(bool trace) {
    machine_.tracing = trace;
    for (int r = 0; r < p_.setting.limits.ranks; ++r) machine_.spawn(r, [this, r] { live(r); });
    Result result;
    result.ending = machine_.run();
    result.wrong = judge(result.ending);
    result.trace = machine_.trace();
    return result;
  }

 private:
  void live(int r) {
    for (int plan : p_.schedule[static_cast<size_t>(r)]) {
      host(r, plan, [&](const char* at, i64 bytes, model::Stamp by, const model::Clock& seen) {
        memory_.write(at, bytes, by, seen);
      });
      world_.prepare(plan, r);
      machine_.note(nullptr, "rank %d begins plan %d", r, plan);
      if (!call(r, plan)) return;
      host(r, plan, [&](const char* at, i64 bytes, model::Stamp by, const model::Clock& seen) {
        memory_.read(at, bytes, by, seen);
      });
      host(r, plan, [&](const char* at, i64 bytes, model::Stamp by, const model::Clock& seen) {
        memory_.write(at, bytes, by, seen);
      });
      std::string wrong = world_.check(plan, r);
      if (wrong == "wrong data") wrong_.push_back(r);
      else if (!wrong.empty()) throw model::Broken(wrong);
      ++at_[static_cast<size_t>(r)];
    }
    leave(r);
  }
  void leave(int r) {  // for good: the others may still be in calls that this rank has ended
    model::Rank& rank = ranks_[static_cast<size_t>(r)];
    for (int other = 0; other < p_.setting.limits.ranks; ++other)
      if (other != r)
        machine_.memory.store(post(other, r), farewell, host_stamp(rank), std::make_shared<model::Clock>(rank.host));
  }
  Word* post(int at, int of) {
    int ranks = p_.setting.limits.ranks;
    return Inbox{world_.geometry(), world_.arena(at)}.post((of - at - 1 + ranks) % ranks);
  }
  static model::Stamp host_stamp(model::Rank& rank) {
    return {static_cast<std::uint8_t>(rank.actor), ++rank.tick & 0xffffffu};
  }
  bool call(int r, int plan) {
    Call c = world_.call(plan, r);
    c.parts = machine_.random.chance(50) ? 3 : 1;
    model::Rank& rank = ranks_[static_cast<size_t>(r)];
    rank.start = rank.host;
    auto team = [&](int t, model::Roles roles) {
      model::Model atom(machine_, ranks_, c, t, roles);
      snac::run(atom, c);
    };
    auto roles = [&] { return static_cast<model::Roles>(machine_.random.below(3)); };
    if (machine_.random.chance(25)) {
      for (int t = 0; t < c.teams; ++t) team(t, roles());
    } else {
      std::vector<model::Fibre*> teams;
      for (int t = 0; t < c.teams; ++t) teams.push_back(&machine_.spawn(r, [&team, &roles, t] { team(t, roles()); }));
      for (model::Fibre* f : teams) machine_.join(*f);
    }
    return rank.poisoned_at < 0 || machine_.turns() < rank.poisoned_at;
  }
  template <class F>
  void host(int r, int plan, F touch) {  // what a rank does to its tensors between two calls
    model::Rank& rank = ranks_[static_cast<size_t>(r)];
    model::Stamp by = host_stamp(rank);
    rank.host.learn(by);
    world_.each_region(plan, r, [&](const char* at, i64 bytes) { touch(at, bytes, by, rank.host); });
  }

  std::string judge(Machine::Ending ending) {
    if (ending == Machine::Ending::broken) return machine_.broken;
    if (ending == Machine::Ending::dead) return may_stall(p_, at_) ? "" : "nothing can go on:\n" + machine_.blocked();
    std::string fault;
    for (const model::Rank& r : ranks_)
      if (!r.fault.empty()) fault = r.fault;
    if (p_.odd.rank < 0) {
      if (!fault.empty()) return "agreeing calls end in a fault: " + fault;
      if (!wrong_.empty()) return "wrong data at rank " + std::to_string(wrong_[0]);
      return "";
    }
    if (!fault.empty()) return "";
    return unnoticed(p_, wrong_.empty());
  }

  const Program& p_;
  World world_;
  model::Memory memory_;
  std::vector<model::Rank> ranks_;
  Machine machine_;
  std::vector<size_t> at_;  // which call of its schedule a rank is in
  std::vector<int> wrong_;
};

Temper draw_temper(Random& random, Flaw flaw) {
  static const int eager[] = {0, 0, 2, 20, 60}, stale[] = {0, 30, 80}, starve[] = {0, 1, 5}, yield[] = {10, 50, 100};
  return {random.pick(eager, 5), random.pick(stale, 3), random.pick(starve, 3), random.pick(yield, 3), flaw};
}

// ---- the machine finds out flawed Atoms -------------------------------------------------------------------------------------------------------------------

Shape tiny(Kind kind, Regime regime, Form form, i64 floats) {
  Shape s{kind, regime, form, 1, 0, {Op::sum, Dtype::float32}, 4, {}, 0x123456, 7};
  s.elements[0][1] = s.elements[0][0] = floats;
  return s;
}

struct Litmus {
  const char* name;
  Shape shape;
  Flaw flaw;
  Machine::Ending ending;
  int calls = 1;
};

// A message passed from rank 0 to rank 1, and two sums. Without a flaw they always work; with it they do not.
constexpr int litmus_seeds = 50;

bool passes(const Litmus& l, model::Stacks& stacks) {
  using Ending = Machine::Ending;
  std::map<Ending, int> seen;
  for (Word seed = 0; seed < litmus_seeds; ++seed) {
    Program p;
    p.setting = {{2, 1, 1, 16, 256}, 1, lines};
    p.schedule.assign(2, std::vector<int>(static_cast<size_t>(l.calls), plan(p, l.shape)));
    Random random(seed);
    Temper temper = draw_temper(random, l.flaw);
    Result result = Run(p, stacks, random, temper).run(false);
    ++seen[result.ending == Ending::done && !result.wrong.empty() ? Ending::broken : result.ending];
  }
  bool as_expected = l.ending == Ending::done ? seen[Ending::done] == litmus_seeds : seen[l.ending] > 0;
  std::printf("  %-60s %3d right, %3d broken, %3d stand still%s\n", l.name, seen[Ending::done], seen[Ending::broken],
              seen[Ending::dead], as_expected ? "" : "   FAILED");
  return as_expected;
}

struct Checked {
  int passed, failed;
};
Checked self_check(model::Stacks& stacks) {
  using Ending = Machine::Ending;
  Shape message = tiny(Kind::copy, Regime::staged, Form::apart, 4),
        stream = tiny(Kind::copy, Regime::staged, Form::apart, 24);
  Shape sums = tiny(Kind::all_reduce, Regime::staged, Form::apart, 24),
        shot = tiny(Kind::all_reduce, Regime::packet, Form::in_place, 12),
        lent = tiny(Kind::all_reduce, Regime::direct, Form::in_place, 12),
        read = tiny(Kind::reduce, Regime::direct, Form::apart, 12),
        packet = tiny(Kind::copy, Regime::packet, Form::apart, 4);
  const Litmus all[] = {
      {"a message, released and acquired", message, Flaw::none, Ending::done},
      {"a message, notify without release", message, Flaw::relaxed_notify, Ending::broken},
      {"a message, wait without acquire", message, Flaw::relaxed_wait, Ending::broken},
      {"a message, notify before what it tells of", message, Flaw::early_notify, Ending::broken},
      {"six messages through one slot", stream, Flaw::none, Ending::done},
      {"six messages, what is started is pushed out at the end only", stream, Flaw::no_push, Ending::dead},
      {"eight packets one way, through the windows twice", packet, Flaw::none, Ending::done, 8},
      {"sums sent on", sums, Flaw::none, Ending::done},
      {"sums sent on, operations of a role out of order", sums, Flaw::unordered, Ending::broken},
      {"sums where they are lent", lent, Flaw::none, Ending::done},
      {"sums where they are lent, wait without acquire", lent, Flaw::relaxed_wait, Ending::broken},
      {"sums where they are lent, told before they are there", lent, Flaw::early_notify, Ending::broken},
      {"sums of inputs that are lent", read, Flaw::none, Ending::done},
      {"sums of inputs that are lent, wait without acquire", read, Flaw::relaxed_wait, Ending::broken},
      {"one shot in place", shot, Flaw::none, Ending::done},
      {"one shot in place, roles that do not meet", shot, Flaw::deaf_meet, Ending::broken},
  };
  int passed = 0;
  for (const Litmus& l : all) passed += passes(l, stacks);
  return {passed, static_cast<int>(std::size(all)) - passed};
}

// ---- exploration --------------------------------------------------------------------------------------------------------------------------------------------

struct Tally {
  std::map<std::string, long> of;
  void add(const Program& p) {
    const Limits& l = p.setting.limits;
    ++of[std::to_string(l.ranks) + (l.ranks == 1 ? " rank" : " ranks")];
    ++of[std::to_string(l.slots) + (l.slots == 1 ? " slot" : " slots")];
    ++of[p.setting.start < 100 ? "from 1" : p.setting.start < 1ull << 33 ? "from 2^32" : "from 2^40"];
    ++of[p.odd.rank < 0 ? "agreeing" : std::string("disagreeing about ") + p.odd.field];
    static const char* const regimes[] = {"staged", "packet", "direct"};
    static const char* const kinds[] = {"copy", "reduce", "all-reduce"};
    for (int plan : p.schedule[0]) {
      const Shape& s = p.plans[static_cast<size_t>(plan)]->shape;
      std::string how =
          s.in_one_exchange() ? s.form == Form::in_place ? " in one exchange, in place" : " in one exchange" : "";
      ++of[std::string("calls ") + regimes[static_cast<int>(s.regime)] + " " + kinds[static_cast<int>(s.kind)] + how];
      ++of["calls lag " + std::to_string(s.lag)];
      ++of["calls " + std::to_string(s.teams) + (s.teams == 1 ? " team" : " teams")];
    }
  }
};

Result explore(Word seed, bool trace, model::Stacks& stacks, Tally* tally) {
  Random random(seed * 2 + 1);
  Program p = draw_program(random, lines, seed % 4 == 3 ? Agree::no : Agree::yes);
  if (tally) tally->add(p);
  Temper temper = draw_temper(random, Flaw::none);
  return Run(p, stacks, Random(random.next()), temper).run(trace);
}

int show(Word seed, bool trace, model::Stacks& stacks) {
  Result r = explore(seed, trace, stacks, nullptr);
  for (const std::string& l : r.trace) std::printf("%s\n", l.c_str());
  std::printf("seed %llu: %s\n", seed, r.wrong.empty() ? "right" : r.wrong.c_str());
  return !r.wrong.empty();
}

int main(int argc, char** argv) {
  Word seeds = 40000, first = 0, one = 0;
  int failures = 5;
  bool single = false, trace = false;
  for (int i = 1; i < argc; ++i) {
    std::string option = argv[i];
    if (option == "--trace") trace = true;
    else if (i + 1 == argc) return std::printf("model: %s needs a number\n", argv[i]), 2;
    else if (option == "--seeds") seeds = std::stoull(argv[++i]);
    else if (option == "--first") first = std::stoull(argv[++i]);
    else if (option == "--failures") failures = std::stoi(argv[++i]);
    else if (option == "--seed") one = std::stoull(argv[++i]), single = true;
    else return std::printf("usage: model [--seeds N] [--first S] [--failures N] | --seed S [--trace]\n"), 2;
  }
  model::Stacks stacks;
  if (single) return show(one, trace, stacks);
  std::printf("Atoms without and with a flaw, %d seeds each\n", litmus_seeds);
  auto [passed, failed] = self_check(stacks);
  Tally tally;
  for (Word seed = first; seed < first + seeds && failed < failures; ++seed) {
    Result r = explore(seed, false, stacks, &tally);
    if (r.wrong.empty()) {
      ++passed;
      continue;
    }
    ++failed;
    std::printf("seed %llu: %s\n  again with its last operations: model --seed %llu --trace\n", seed, r.wrong.c_str(),
                seed);
  }
  for (const auto& [what, n] : tally.of) std::printf("  %8ld  %s\n", n, what.c_str());
  std::printf("%d passed, %d failed\n", passed, failed);
  return failed != 0;
}

}  // namespace
}  // namespace purlin::test

int main(int argc, char** argv) { return purlin::test::main(argc, argv); }
