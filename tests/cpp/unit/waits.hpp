// The waits of the CPU Atom, one by one.
#pragma once
#include "../program.hpp"
#include "law.hpp"
#include "purlin/atom/cpu.hpp"

#include <thread>

namespace purlin::test {
namespace {

// Rank 0 of two ranks, in a call that rank 1 never makes.
struct Alone {
  std::vector<std::unique_ptr<Built>> plans;
  World world;
  Call call;
  cpu::Host host;

  static std::vector<std::unique_ptr<Built>> one_plan(Limits limits) {
    Random random(1);
    Shape shape = draw_shape(random, limits, Regime::direct, 400);
    shape.elements[1][0] = shape.elements[0][1] = 8;
    std::vector<std::unique_ptr<Built>> plans;
    plans.push_back(Builder(shape, limits, Wires::planned).build());
    return plans;
  }
  explicit Alone(std::chrono::milliseconds timeout = std::chrono::milliseconds(20))
      : plans(one_plan({2, 1, 2, 32, 64})),
        world({{2, 1, 2, 32, 64}, 5, {cpu::payload_bytes, cpu::line_bytes}}, plans),
        call(world.call(0, 0)) {
    host.timeout = timeout;
  }
  Inbox inbox() const { return {call.geometry, call.own_arena()}; }
  Word* word() const { return inbox().ready(0, 0, Use::ring, 5); }
  Arrival expect(Word tag) {
    cpu::Cpu<> atom(call, 0, host);
    return atom.expect(1, [&](int) { return Mark{word(), tag}; }, {Where::What::message, Use::ring, 0});
  }
  Arrival wait(Word count) {
    cpu::Cpu<> atom(call, 0, host);
    return atom.wait(1, [&](int) { return Mark{inbox().freed(0, 0, Use::ring), count}; },
                     {Where::What::credit, Use::ring, 0});
  }
  Arrival wait_at_home(Word count) {
    cpu::Cpu<> atom(call, 0, host);
    return atom.wait(1, [&](int) { return Mark{inbox().home(0, 0), count}; }, {Where::What::home, Use::home, 0});
  }
  Arrival granted(i64 place) {
    Grant* grant = inbox().grants(0, 0);
    *grant = {static_cast<Word>(place), tag(5, 1)};
    cpu::Cpu<> atom(call, 0, host);
    return atom.expect(1, [&](int) { return Mark{&grant->tag, tag(5, 1)}; }, {Where::What::grant, Use::direct, 0});
  }
  Fault fault(int rank) {
    Word w = cpu::shared(Inbox{call.geometry, call.arena[rank]}.poison()).load();
    return w ? decode(w).fault : Fault::none;
  }
  bool all_have(Fault f) { return fault(0) == f && fault(1) == f; }

  std::jthread rescue{[this](std::stop_token stop) {  // from a wait that does not end
    for (int k = 0; k < 300 && !stop.stop_requested(); ++k) std::this_thread::sleep_for(std::chrono::milliseconds(10));
    if (!stop.stop_requested()) cpu::poison(call.geometry, call.own_arena(), {Fault::died, 0, 0});
  }};
};

bool what_has_come_is_taken_at_once() {
  Alone a;
  *a.word() = tag(5, 3);
  return a.expect(tag(5, 3)) == Arrival::yes && a.wait(5) == Arrival::yes && a.wait(4) == Arrival::yes &&
         a.all_have(Fault::none);
}
bool a_wait_ends_at_its_deadline() {
  Alone a, b;
  bool ends = a.expect(tag(5, 3)) == Arrival::never && b.wait(6) == Arrival::never;
  return ends && a.all_have(Fault::stall) && b.all_have(Fault::stall) && a.host.record.peer == 1;
}
bool another_signature_is_another_call() {
  Alone a;
  *a.word() = tag(5, 4);
  return a.expect(tag(5, 3)) == Arrival::other && a.all_have(Fault::mismatch);
}
bool another_number_is_not_this_message() {
  Alone a;
  *a.word() = tag(6, 3);
  return a.expect(tag(5, 3)) == Arrival::never;
}
bool poison_ends_waits_and_calls() {
  Alone a(std::chrono::seconds(2)), b(std::chrono::seconds(2));
  cpu::poison(a.call.geometry, a.call.own_arena(), {Fault::died, 1, 1});
  cpu::poison(a.call.geometry, a.call.own_arena(), {Fault::stall, 0, 1});  // the first one stays
  std::thread later([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
    cpu::poison(b.call.geometry, b.call.own_arena(), {Fault::left, 1, 1});
  });
  bool ends =
      b.expect(tag(5, 3)) == Arrival::never && b.fault(1) == Fault::none;  // at its deadline it would tell the others
  later.join();
  return ends && a.expect(tag(5, 3)) == Arrival::never && a.fault(0) == Fault::died &&
         !cpu::Cpu<>(a.call, 0, a.host).enter();
}
bool a_post_of_another_call_ends_waits() {
  bool all = true;
  for (Word calls : {Word{5}, Word{6}, Word{9}}) {
    Alone a(std::chrono::seconds(2));
    *a.inbox().post(0) = tag(calls, a.call.signature + (calls == 5));
    all = all && a.expect(tag(5, 3)) == Arrival::other && a.all_have(Fault::mismatch);
  }
  return all;
}
bool a_farewell_ends_waits() {
  Alone a(std::chrono::seconds(2));
  *a.inbox().post(0) = farewell;
  return a.expect(tag(5, 3)) == Arrival::never && a.all_have(Fault::left);
}
bool a_post_of_this_call_or_an_earlier_one_does_not() {
  bool all = true;
  for (Word calls : {Word{5}, Word{4}, Word{0} - 3}) {
    Alone a;
    *a.inbox().post(0) = tag(calls, a.call.signature + (calls != 5));
    all = all && a.expect(tag(5, 3)) == Arrival::never && a.fault(0) == Fault::stall;
  }
  return all;
}
bool what_this_rank_itself_does_is_waited_for_whatever_peers_post() {
  bool all = true;
  for (Word post : {farewell, tag(9, 1)}) {
    Alone a(std::chrono::seconds(2));
    *a.inbox().post(0) = post;
    std::thread later([&] {
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
      cpu::shared(a.inbox().home(0, 0)).store(6, std::memory_order_release);
    });
    all = all && a.wait_at_home(6) == Arrival::yes && a.all_have(Fault::none);
    later.join();
  }
  return all;
}
bool after_a_post_the_message_is_looked_at_once_more() {
  static Alone* late;  // its message comes, and then its peer is past the call, just before the wait looks at the post
  Alone a(std::chrono::seconds(2));
  late = &a;
  a.host.interrupted = [] {
    *late->word() = tag(5, 3);
    *late->inbox().post(0) = tag(6, 1);
    return false;
  };
  return a.expect(tag(5, 3)) == Arrival::yes && a.all_have(Fault::none);
}
bool a_grant_outside_the_heap_is_refused() {
  Alone inside;
  const Geometry& g = inside.call.geometry;
  i64 last = g.arena_bytes - inside.call.pair[0].reach;
  bool all = inside.granted(g.heap_at) == Arrival::yes && inside.granted(last) == Arrival::yes;
  for (i64 place : {i64{0}, g.heap_at - 1, last + 1, i64{1} << 62, i64{-64}}) {
    Alone a;
    all = all && a.granted(place) == Arrival::never && a.all_have(Fault::grant);
  }
  return all;
}
bool an_interrupt_ends_waits() {
  Alone a(std::chrono::seconds(2));
  a.host.interrupted = [] { return true; };
  return a.expect(tag(5, 3)) == Arrival::never && a.all_have(Fault::interrupted);
}

void laws_of_waits() {
  law("what has come is taken at once", what_has_come_is_taken_at_once);
  law("a wait ends at its deadline", a_wait_ends_at_its_deadline);
  law("another signature is another call", another_signature_is_another_call);
  law("another number is not this message", another_number_is_not_this_message);
  law("poison ends waits and calls", poison_ends_waits_and_calls);
  law("a post of another call ends waits", a_post_of_another_call_ends_waits);
  law("a farewell ends waits", a_farewell_ends_waits);
  law("a post of this call, or an earlier one, does not", a_post_of_this_call_or_an_earlier_one_does_not);
  law("what this rank itself does is waited for, whatever peers post",
      what_this_rank_itself_does_is_waited_for_whatever_peers_post);
  law("after a look at the post the message is looked at once more", after_a_post_the_message_is_looked_at_once_more);
  law("a grant outside the heap is refused", a_grant_outside_the_heap_is_refused);
  law("an interrupt ends waits", an_interrupt_ends_waits);
}

}  // namespace
}  // namespace purlin::test
