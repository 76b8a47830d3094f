// The model Atom: as weak as the contract allows. What a role starts is kept and performed later, as late as the next thing that waits for it; the order
// within a role (R1), and nothing else, is kept. A word published by notify carries what its role had done and seen; wait and expect learn it.
// Packets carry their payload and nothing else; what tell and grant publish is what the call before had seen.
#pragma once
#include "model_acts.hpp"

namespace purlin::model {

class Model : Acts {
 public:
  static constexpr bool flat = false;
  Model(Machine& machine, std::vector<Rank>& ranks, const Call& call, int team, Roles roles)
      : Acts(machine, ranks, call, team, roles) {}

  int team() const { return team_; }
  int teams() const { return c_.teams; }
  Word sent(Use use, int peer) const { return *c_.count(peer, team_).sent_on(use); }
  Word taken(Use use, int peer) const { return *c_.count(peer, team_).taken_on(use); }
  bool enter() { return !poisoned(); }
  void leave() {
    for (Role* r : {&gatherer(), &reader(), &source()}) {
      rank().host.join(r->seen);
      rank().host.learn(r->now());
    }
    if (++c_.progress->left < static_cast<Word>(c_.teams)) return;
    c_.progress->left = 0;
    ++c_.progress->calls;
  }

  template <class C, class S>
  void both(int lag, C consume, S stage) {
    three(lag, concepts::Role{}, consume, stage);
  }
  template <class G, class C, class S>
  void three(int lag, G gather, C consume, S stage) {
    for (Role* r : {&gatherer(), &reader(), &source()}) begin(*r);
    if (roles_ == Roles::side_by_side) {
      Fibre& second = m_.spawn(c_.rank, [&] { live(reader(), consume); });
      Fibre& third = m_.spawn(c_.rank, [&] { live(gatherer(), gather); });
      live(source(), stage);
      m_.join(second);
      m_.join(third);
      return;
    }
    if (roles_ == Roles::in_turn) {
      Fibre& crew = m_.spawn(c_.rank, [&] { live_in_turn(lag, gather, consume); });
      live(source(), stage);
      m_.join(crew);
      return;
    }
    as(reader()), consume.open();
    as(gatherer()), gather.open();
    as(source()), stage.open();
    for (Role* r : {&gatherer(), &reader(), &source()}) r->phase = Role::Phase::steps;
    int last = std::max({stage.steps(), consume.steps() + lag, gather.steps() + 2 * lag});
    for (int i = 0; i < last; ++i) {
      step(source(), stage, i);
      step(reader(), consume, i - lag);
      step(gatherer(), gather, i - 2 * lag);
    }
    end(source(), stage);
    end(reader(), consume);
    end(gatherer(), gather);
  }

  // As early as can be, or, where the hint is not taken, as late.
  void ahead(Place from, Range range) {
    starts("ahead");
    if (!m_.random.chance(50)) return;
    Role& r = role();
    m_.note(&r, "reads ahead, wire [%lld, %lld)", range.lo, range.hi);
    r.held.push_back({from, range, std::make_shared<std::string>(load(r, view(r, r.seen), from, range))});
    m_.yield();
  }
  void copy(Place to, Place from, Range range) {
    starts("copy");
    Role& r = role();
    auto known = std::find_if(r.held.begin(), r.held.end(), [&](const Held& some) { return some.is(from, range); });
    auto held = known == r.held.end() ? nullptr : known->bytes;
    r.queue.push_back([this, &r, seen = r.seen, to, from, range, held] {
      m_.note(&r, "copies wire [%lld, %lld)", range.lo, range.hi);
      Clock now = view(r, seen);
      knows_grants(r, to, now);
      for_each_piece(to, held ? in_slot(held->data(), range.lo) : from, range,
                     [&](char* write, const char* read, i64 bytes) {
                       if (write == read) return;
                       if (!held) m_.memory.read(read, bytes, r.now(), now);
                       m_.memory.write(write, bytes, r.now(), now);
                       std::memcpy(write, read, static_cast<size_t>(bytes));
                     });
      return true;
    });
    m_.yield();
  }
  template <class T, class F>
  void reduce(int places, T to, Place own, int n, F slot, int self, Range range, Sum sum) {
    starts("reduce");
    std::vector<const char*> from;
    for (int k = 0; k < n; ++k) from.push_back(k == self ? nullptr : slot(k));
    role().queue.push_back(folding(to(0), own, std::move(from), range, sum, nullptr));
    m_.yield();
    for (int k = 1; k < places; ++k) copy(to(k), to(0), range);
  }

  template <class F>
  void notify(int n, F mark) {
    starts("notify");
    Role& r = role();
    std::vector<Mark> marks = wanted(n, mark);
    if (m_.temper.flaw == Flaw::early_notify) {
      for (Mark m : marks) r.loose.push_back([this, &r, seen = r.seen, m] { return store(r, m, view(r, seen)), true; });
    } else if (!marks.empty()) {
      r.queue.push_back([this, &r, seen = r.seen, marks]() mutable {
        i64 k = m_.random.below(static_cast<i64>(marks.size()));
        store(r, marks[static_cast<size_t>(k)], view(r, seen));
        marks.erase(marks.begin() + k);
        return marks.empty();
      });
    }
    m_.yield();
  }
  template <class F>
  void lend(int n, F line) {
    starts("lend");
    Role& r = role();
    std::vector<GrantMark> lines;
    for (int p = 0; p < n; ++p)
      if (GrantMark m = line(p); m.line) lines.push_back(m);
    if (!lines.empty())
      r.queue.push_back([this, &r, seen = r.seen, lines]() mutable {
        i64 k = m_.random.below(static_cast<i64>(lines.size()));
        show(r, lines[static_cast<size_t>(k)], view(r, seen));
        lines.erase(lines.begin() + k);
        return lines.empty();
      });
    m_.yield();
  }
  template <class F>
  void tell(int n, F mark) {
    opens("tell");
    Role& r = role();
    for (Mark m : wanted(n, mark)) r.loose.push_back([this, &r, m] { return store(r, m, r.start), true; });
    m_.yield();
  }
  template <class F>
  void grant(int n, F line) {
    opens("grant");
    Role& r = role();
    for (int p = 0; p < n; ++p) {
      GrantMark m = line(p);
      if (!m.line) continue;
      r.loose.push_back([this, &r, m] { return show(r, m, r.start), true; });
    }
    m_.yield();
  }
  template <class F>
  void keep(int n, F mark) {
    if (role().phase != Role::Phase::close) throw Broken("keep outside close()");
    for (Mark m : wanted(n, mark)) *m.word = m.value;
  }

  template <class F>
  Arrival wait(int n, F mark, Where where) {
    auto all = awaited(n, mark);
    return settle(all, reaches, where);
  }
  template <class F>
  Arrival expect(int n, F mark, Where where) {
    auto all = awaited(n, mark);
    return settle(all, is_message, where);
  }

  template <class C, class F, class G>
  Arrival put(int n, C credit, F source, G window, Where where) {
    starts("put");
    if (Arrival got = wait(n, credit, where); got != Arrival::yes) return got;
    Role& r = role();
    for (int p = 0; p < n; ++p) {
      Bytes from = source(p);
      if (from.range.empty()) continue;
      Lines lines = window(p);
      Packet out{lines.window, lines.tag, from.place, from.range};
      r.queue.push_back([this, &r, seen = r.seen, out] { return pack(r, view(r, seen), out), true; });
    }
    m_.yield();
    return Arrival::yes;
  }
  template <class F>
  Arrival take(int n, F packet, Where where) {
    std::vector<Incoming> all;
    for (int p = 0; p < n; ++p)
      if (Packet in = packet(p); in.window) all.push_back({p, in, {}});
    if (Arrival got = settle(all, where); got != Arrival::yes) return got;
    Role& r = role();
    for (Incoming& in : all)
      r.queue.push_back([this, &r, seen = r.seen, in = std::move(in)] { return unpack(r, view(r, seen), in), true; });
    return Arrival::yes;
  }
  template <class F>
  Arrival take_reduce(Place to, Place own, int n, F packet, int self, Sum sum, Where where) {
    std::vector<Incoming> all;
    for (int k = 0; k < n; ++k)
      if (k != self) all.push_back({c_.peer_of(k), packet(k), {}});
    if (Arrival got = settle(all, where); got != Arrival::yes) return got;
    std::vector<const char*> from;
    auto kept = std::make_shared<std::vector<Incoming>>(std::move(all));
    for (const Incoming& in : *kept) from.push_back(in.bytes());
    from.insert(from.begin() + self, nullptr);
    role().queue.push_back(folding(to, own, std::move(from), packet(self).range, sum, kept));
    return Arrival::yes;
  }

  // What either role started before has read its sources; what it writes to peers may still be on its way.
  void meet() {
    Role& r = role();
    m_.perform_queue(r);
    met_clock_.join(r.seen);
    met_clock_.learn(r.now());
    ++met_;
    if (roles_ != Roles::lockstep && m_.temper.flaw != Flaw::deaf_meet)
      m_.block([this] { return met_ == 2; }, [] { return std::string("the other role"); });
    if (m_.temper.flaw != Flaw::deaf_meet) r.seen.join(met_clock_);
  }
  void drain() {
    Role& r = role();
    r.draining = true;
    m_.block([&r] { return r.idle(); }, [] { return std::string("what it started"); });
    r.draining = false;
  }

 private:
  // -- roles
  void begin(Role& r) {
    r.start = r.seen = rank().start;
    r.phase = Role::Phase::open;
    r.failed = false;
  }
  template <class R>
  void live(Role& r, R& behaves) {
    as(r);
    behaves.open();
    r.phase = Role::Phase::steps;
    for (int i = 0; i < behaves.steps(); ++i) step(r, behaves, i);
    end(r, behaves);
  }
  template <class G, class C>
  void live_in_turn(int lag, G& gather, C& consume) {
    as(reader()), consume.open();
    as(gatherer()), gather.open();
    reader().phase = gatherer().phase = Role::Phase::steps;
    for (int i = 0, last = std::max(consume.steps(), gather.steps() + lag); i < last; ++i) {
      step(reader(), consume, i);
      step(gatherer(), gather, i - lag);
    }
    end(reader(), consume);
    end(gatherer(), gather);
  }
  template <class R>
  void step(Role& r, R& behaves, int i) {
    if (i < 0 || i >= behaves.steps()) return;
    as(r);
    behaves.step(i);
    r.held.clear();
  }
  template <class R>
  void end(Role& r, R& behaves) {
    as(r);
    drain();
    r.phase = Role::Phase::close;
    behaves.close();
    r.phase = Role::Phase::idle;
  }
  void starts(const char* what) {
    if (role().failed) throw Broken(std::string("R5: a role starts a ") + what + " after a wait that failed");
    if (role().phase != Role::Phase::steps) throw Broken(std::string(what) + " outside step()");
  }
  void opens(const char* what) {
    if (role().phase != Role::Phase::open) throw Broken(std::string(what) + " outside open()");
  }
  int met_ = 0;
  Clock met_clock_;
};

}  // namespace purlin::model
