// Geometries and plans on the host: what planning wrote in numbers becomes a Call, cut into chunks. The same for every Atom.
#include "purlin/endpoint.hpp"

#include <stdexcept>

namespace purlin {
namespace {

template <class F>
void for_each_route(Call& call, F f) {
  f(call.own_from);
  f(call.own_to);
  for (int p = 0; p < call.peers(); ++p) {
    f(call.pair[p].send);
    f(call.pair[p].remote);
    f(call.pair[p].receive);
  }
}

std::size_t first_of(const Route& route) { return reinterpret_cast<std::size_t>(route.items); }

}  // namespace

Geometry geometry_of(int ranks, int teams, int slots, i64 slot_bytes, i64 window_bytes, i64 heap_bytes) {
  constexpr i64 most = i64{1} << 30;
  if (slot_bytes > most || window_bytes > most) throw std::invalid_argument("a slot or window is larger than 1 GiB");
  Geometry g{};
  g.ranks = ranks;
  g.teams = teams;
  g.slots = slots;
  g.slot_bytes = static_cast<int>(slot_bytes);
  g.window_bytes = static_cast<int>(window_bytes);
  g.window_stored = static_cast<int>(stored_bytes(window_bytes));
  g.heap_bytes = heap_bytes;
  return lay_out(g);
}

Plan::Plan(const PlanText& text, const Geometry& geometry)
    : input_spans_(text.input_spans), output_spans_(text.output_spans), overlap_allowed_(text.overlap_allowed) {
  call_.kind = static_cast<Kind>(text.kind);
  call_.regime = static_cast<Regime>(text.regime);
  call_.sum = {static_cast<Op>(text.op), static_cast<Dtype>(text.dtype)};
  call_.rank = text.rank;
  call_.ranks = text.ranks;
  call_.teams = text.teams;
  call_.parts = text.parts;
  call_.lag = text.lag;
  call_.grants = text.grants;
  call_.signature = text.signature;
  call_.onto_sent = text.onto_sent;
  call_.even = true;
  call_.own_from = route(text.own_from);
  call_.own_to = route(text.own_to);
  for (std::size_t p = 0; p < text.send.size(); ++p) {
    Pair& pair = call_.pair[p];
    pair.send = route(text.send[p]);
    pair.remote = route(text.remote[p]);
    pair.receive = route(text.receive[p]);
    pair.reach = text.reach[p];
    pair.send_signature = text.send_signatures[p];
    pair.receive_signature = text.receive_signatures[p];
  }
  for_each_route(call_, [&](Route& r) { cut(r, geometry); });
  const i64 packet = smaller(i64{geometry.window_bytes} * call_.teams, i64{1} << 30);
  for (int p = 0; p < call_.peers(); ++p)
    if (call_.regime == Regime::packet && larger(call_.pair[p].send.bytes, call_.pair[p].receive.bytes) > packet)
      throw std::invalid_argument("a message of a packet call is larger than its window");
  call_.steps = steps();
  call_.flat = true;
  for_each_route(call_, [&](Route& r) { call_.flat &= r.flat(); });
  for (int p = 0; p < call_.peers(); ++p)
    if (call_.kind != Kind::copy && !call_.pair[p].remote.flat())
      throw std::invalid_argument("what a peer lends is read where it lies in one stretch only");
  kept_ = keep_items(items_);
  for_each_route(call_, [&](Route& r) { r.items = kept_.get() + first_of(r); });
}

// Until it is known where the items lie, a route holds the index of its first.
Route Plan::route(const RouteText& text) {
  const std::vector<i64>& n = text.numbers;
  std::size_t first = items_.size();
  for (std::size_t i = 2; i < n.size();) {
    Item& item = items_.emplace_back();
    item.box.tensor = static_cast<int>(n[i]);
    item.at = n[i + 1];
    item.box.offset = n[i + 2];
    item.box.run = item.bytes = n[i + 3];
    item.box.dims = static_cast<int>(n[i + 4]);
    i += 5;
    for (int d = 0; d < item.box.dims; ++d) {
      item.box.extent[d] = n[i + static_cast<std::size_t>(d)];
      item.box.stride[d] = n[i + static_cast<std::size_t>(item.box.dims + d)];
      item.bytes *= item.box.extent[d];
    }
    i += 2 * static_cast<std::size_t>(item.box.dims);
    measure(item.box);
    call_.even &= item.box.dims == 0 ? item.box.offset % vector_bytes == 0 : item.box.align == vector_bytes;
  }
  Route route{reinterpret_cast<const Item*>(first), static_cast<int>(items_.size() - first), n[0], n[1], 0};
  if (route.count == 1 && items_.back().box.dims == 0) {
    const Item& item = items_.back();
    if (route.lo < item.at || route.lo + route.bytes > item.at + item.bytes)
      throw std::invalid_argument("a route reaches beyond its one item");
    route.offset = item.box.offset - item.at;
    route.tensor = item.box.tensor;
    route.count = 0;
    items_.pop_back();
  }
  return route;
}

// Every chunk is a multiple of what lanes move at once, the same for source and reader: it follows from the bytes of the pair alone.
void Plan::cut(Route& route, const Geometry& geometry) const {
  i64 unit = call_.regime == Regime::direct ? wide_bytes : vector_bytes;
  i64 even = round_up(larger(ceil_div(route.bytes, call_.teams), unit), unit);
  route.chunk = call_.regime == Regime::staged ? smaller<i64>(even, geometry.slot_bytes) : even;
}

int Plan::steps() const {
  int most = call_.own_from.messages(0, call_.teams);
  for (int p = 0; p < call_.peers(); ++p)
    most = larger(most,
                  larger(call_.pair[p].send.messages(0, call_.teams), call_.pair[p].receive.messages(0, call_.teams)));
  return most;
}

bool Plan::takes(std::size_t inputs, std::size_t outputs) const {
  return inputs == input_spans_.size() && outputs == output_spans_.size() && inputs <= max_tensors &&
         outputs <= max_tensors;
}

bool Plan::overlaps(std::span<const std::uintptr_t> inputs, std::span<const std::uintptr_t> outputs) const {
  if (overlap_allowed_) return false;
  auto meet = [](std::uintptr_t a, i64 a_bytes, std::uintptr_t b, i64 b_bytes) {
    return a_bytes > 0 && b_bytes > 0 && a < b + static_cast<std::uintptr_t>(b_bytes) &&
           b < a + static_cast<std::uintptr_t>(a_bytes);
  };
  for (std::size_t o = 0; o < outputs.size(); ++o) {
    for (std::size_t i = 0; i < inputs.size(); ++i)
      if (meet(outputs[o], output_spans_[o], inputs[i], input_spans_[i])) return true;
    for (std::size_t other = 0; other < o; ++other)
      if (meet(outputs[o], output_spans_[o], outputs[other], output_spans_[other])) return true;
  }
  return false;
}

}  // namespace purlin
