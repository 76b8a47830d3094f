// What Python sees: plans, geometries and endpoints; tensors come as addresses.
#include "purlin/endpoint.hpp"
#include "purlin/tensor.hpp"

#include <nanobind/nanobind.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

namespace nb = nanobind;
using namespace purlin;

namespace {

bool interrupted() {
  nb::gil_scoped_acquire gil;
  return PyErr_CheckSignals() != 0;
}

using Numbers = std::vector<i64>;

std::vector<RouteText> routes(const std::vector<Numbers>& all) {
  std::vector<RouteText> out;
  for (const Numbers& numbers : all) out.push_back({numbers});
  return out;
}

// {what, role, use, team, step, peer, call, message, bytes, begin, end}, as csrc/purlin/trace.hpp has them.
std::vector<std::vector<i64>> events(const Trace& trace) {
  std::vector<std::vector<i64>> out;
  for (const Event& e : trace.events())
    out.push_back({static_cast<i64>(e.what), static_cast<i64>(e.role), static_cast<i64>(e.use), e.team, e.step, e.peer,
                   static_cast<i64>(e.call), static_cast<i64>(e.message), e.bytes, e.begin, e.end});
  return out;
}

int run(Endpoint& end, const Plan& plan, const std::vector<std::uintptr_t>& inputs,
        const std::vector<std::uintptr_t>& outputs, std::uintptr_t stream) {
  Outcome how;
  {
    nb::gil_scoped_release free;
    how = end.run(plan, inputs, outputs, stream);
  }
  if (PyErr_Occurred()) throw nb::python_error();
  return static_cast<int>(how);
}

// Tensors of one type exactly: a subclass may mean something else by its storage.
class Tensors {
 public:
  explicit Tensors(nb::object type) : type_(std::move(type)) {
    nb::object capsule = nb::getattr(type_, "__dlpack_c_exchange_api__", nb::none());
    if (!PyCapsule_IsValid(capsule.ptr(), "dlpack_exchange_api")) return;
    auto api = static_cast<const TensorApi*>(PyCapsule_GetPointer(capsule.ptr(), "dlpack_exchange_api"));
    if (api->major == 1) view_ = api->view;
  }

  // {facts, addresses} of a list or a tuple; None where one of them cannot be told of, or has no memory.
  nb::object look(nb::handle tensors) const {
    bool list = PyList_Check(tensors.ptr());
    if (!view_ || !(list || PyTuple_Check(tensors.ptr()))) return nb::none();
    Py_ssize_t count = PySequence_Fast_GET_SIZE(tensors.ptr());
    TensorFacts facts;
    nb::object addresses = nb::steal(PyList_New(count));
    for (Py_ssize_t i = 0; i < count; ++i) {
      std::uintptr_t address = add(PySequence_Fast_GET_ITEM(tensors.ptr(), i), facts);
      if (address == 0) return nb::none();
      PyList_SET_ITEM(addresses.ptr(), i, PyLong_FromSize_t(address));
    }
    nb::object told = nb::steal(PyBytes_FromStringAndSize(facts.data(), static_cast<Py_ssize_t>(facts.bytes())));
    return nb::steal(PyTuple_Pack(2, told.ptr(), addresses.ptr()));
  }

 private:
  // Where it lies; 0: not to be told.
  std::uintptr_t add(PyObject* tensor, TensorFacts& facts) const {
    TensorView view;
    if (reinterpret_cast<PyObject*>(Py_TYPE(tensor)) != type_.ptr()) return 0;
    if (view_(tensor, &view) != 0) return PyErr_Clear(), 0;
    if (!view.data || is_vague(view) || !facts.add(view)) return 0;
    return reinterpret_cast<std::uintptr_t>(view.data + view.data_offset);
  }

  nb::object type_;
  decltype(TensorApi::view) view_ = nullptr;
};

// Calls add() with every identity that `holder` holds. A weak reference stands for the object it leads to, None when that is gone.
template <class Add>
void each_identity(PyObject* holder, Add add) {
  auto id = [](const void* object) { return reinterpret_cast<std::uintptr_t>(object); };
  if (PyDict_Check(holder)) {
    PyObject *key, *value;
    add(static_cast<std::uintptr_t>(PyDict_Size(holder)));
    for (Py_ssize_t at = 0; PyDict_Next(holder, &at, &key, &value);) add(id(key)), add(id(value));
  } else if (PyList_Check(holder) || PyTuple_Check(holder)) {
    Py_ssize_t count = PySequence_Fast_GET_SIZE(holder);
    add(static_cast<std::uintptr_t>(count));
    for (Py_ssize_t i = 0; i < count; ++i) add(id(PySequence_Fast_GET_ITEM(holder, i)));
  } else {
    nb::object object = PyWeakref_Check(holder) ? nb::steal(PyObject_CallNoArgs(holder)) : nb::borrow(holder);
    nb::object dict = nb::steal(PyObject_GenericGetDict(object.ptr(), nullptr));
    if (!dict) PyErr_Clear();
    add(id(Py_TYPE(object.ptr()))), add(id(dict.ptr()));
  }
}

nb::bytes identities(const nb::list& holders, const nb::bytes& known) {
  using Id = std::uintptr_t;
  auto before = reinterpret_cast<const Id*>(known.c_str());
  std::size_t count = known.size() / sizeof(Id), at = 0;
  bool same = true;
  for (nb::handle holder : holders)
    each_identity(holder.ptr(), [&](Id id) { same = same && at < count && before[at] == id, ++at; });
  if (same && at == count) return known;

  std::vector<Id> found;
  for (nb::handle holder : holders) each_identity(holder.ptr(), [&](Id id) { found.push_back(id); });
  return nb::bytes(found.data(), found.size() * sizeof(Id));
}

}  // namespace

// Without the GIL runs what allocates on a GPU, gives memory back or loads kernels: it may wait for the GPU, and that for the thread of another rank.
NB_MODULE(PURLIN_MODULE, m) {
  m.doc() = "An Atom under purlin_core: protocol calls over memory that peers can write, tensors as addresses.";
  m.attr("built_for") = PURLIN_BUILT_FOR;
  nb::set_leak_warnings(false);  // a communicator that lives until the interpreter ends is no leak

  nb::class_<Geometry>(m, "Geometry")
      .def(
          "__init__",
          [](Geometry* g, int ranks, int teams, int slots, i64 slot_bytes, i64 window_bytes, i64 heap_bytes) {
            new (g) Geometry(geometry_of(ranks, teams, slots, slot_bytes, window_bytes, heap_bytes));
          },
          nb::kw_only(), nb::arg("ranks"), nb::arg("teams"), nb::arg("slots"), nb::arg("slot_bytes"),
          nb::arg("window_bytes"), nb::arg("heap_bytes"))
      .def_ro("ranks", &Geometry::ranks)
      .def_ro("teams", &Geometry::teams)
      .def_ro("slots", &Geometry::slots)
      .def_ro("slot_bytes", &Geometry::slot_bytes)
      .def_ro("window_bytes", &Geometry::window_bytes)
      .def_ro("heap_bytes", &Geometry::heap_bytes)
      .def_ro("rings_at", &Geometry::rings_at)
      .def_ro("packets_at", &Geometry::packets_at)
      .def_ro("heap_at", &Geometry::heap_at)
      .def_ro("arena_bytes", &Geometry::arena_bytes);

  nb::class_<Plan>(m, "Plan")
      .def(
          "__init__",
          [](Plan* plan, const Geometry& geometry, int kind, int regime, int op, int dtype, int rank, int teams,
             int parts, int lag, int grants, unsigned signature, const Numbers& own_from, const Numbers& own_to,
             const std::vector<Numbers>& send, const std::vector<Numbers>& remote, const std::vector<Numbers>& receive,
             const Numbers& reach, const std::vector<unsigned>& send_signatures,
             const std::vector<unsigned>& receive_signatures, const Numbers& input_spans, const Numbers& output_spans,
             bool overlap_allowed, bool onto_sent) {
            PlanText text{kind,
                          regime,
                          op,
                          dtype,
                          rank,
                          geometry.ranks,
                          teams,
                          parts,
                          lag,
                          grants,
                          signature,
                          {own_from},
                          {own_to},
                          routes(send),
                          routes(remote),
                          routes(receive),
                          reach,
                          send_signatures,
                          receive_signatures,
                          input_spans,
                          output_spans,
                          overlap_allowed,
                          onto_sent};
            nb::gil_scoped_release others_run;
            new (plan) Plan(text, geometry);
          },
          nb::arg("geometry"), nb::kw_only(), nb::arg("kind"), nb::arg("regime"), nb::arg("op"), nb::arg("dtype"),
          nb::arg("rank"), nb::arg("teams"), nb::arg("parts"), nb::arg("lag"), nb::arg("grants"), nb::arg("signature"),
          nb::arg("own_from"), nb::arg("own_to"), nb::arg("send"), nb::arg("remote"), nb::arg("receive"),
          nb::arg("reach"), nb::arg("send_signatures"), nb::arg("receive_signatures"), nb::arg("input_spans"),
          nb::arg("output_spans"), nb::arg("overlap_allowed"), nb::arg("onto_sent"))
      .def_prop_ro("steps", [](const Plan& plan) { return plan.call().steps; });

  nb::class_<Trace>(m, "Trace")
      .def(
          "__init__", [](Trace* trace, std::size_t most) { new (trace) Trace(most); }, nb::arg("most"))
      .def_prop_ro("lost", &Trace::lost)
      .def("events", &events);

  nb::class_<Endpoint>(m, "Endpoint")
      .def(
          "__init__",
          [](Endpoint* end, int rank, const Geometry& geometry, const std::vector<std::uintptr_t>& arenas,
             double timeout_s) {
            nb::gil_scoped_release others_run;
            new (end) Endpoint(rank, geometry, arenas, timeout_s, interrupted);
          },
          nb::arg("rank"), nb::arg("geometry"), nb::kw_only(), nb::arg("arenas"), nb::arg("timeout_s"))
      .def("run", &run, nb::arg("plan"), nb::arg("inputs"), nb::arg("outputs"), nb::arg("stream"),
           "0: done; else the number of an Outcome.")
      .def("abort", &Endpoint::abort, nb::arg("fault"), nb::arg("about"))
      .def("leave", &Endpoint::leave, "No further call of this rank will come.")
      .def("record", &Endpoint::record, nb::arg("trace").none(), "Write down what calls do from now on; None: no more.")
      .def("begin_at", &Endpoint::begin_at, nb::arg("message"),
           "Count messages and calls from here; before first use, on every rank alike.")
      .def_prop_ro("fault",
                   [](const Endpoint& end) {
                     Death f = end.death();
                     return std::make_tuple(f.what, f.by, f.about);
                   })
      .def_prop_ro("stalled",
                   [](const Endpoint& end) {
                     Stalled s = end.stalled();
                     return std::make_tuple(s.what, s.use, s.step, s.team, s.peer);
                   })
      .def_prop_ro("calls", &Endpoint::calls)
      .def_prop_ro("signature", &Endpoint::signature, "Of the call that failed; 0: unknown.")
      .def(
          "post",
          [](const Endpoint& end, int rank) {
            Word w = end.post(rank);
            return std::make_tuple(number_of(w), signature_of(w));
          },
          nb::arg("rank"));

  nb::class_<Tensors>(m, "Tensors")
      .def(nb::init<nb::object>(), nb::arg("type"))
      .def("look", &Tensors::look, nb::arg("tensors"),
           "(facts, addresses): equal facts are equal shapes, strides, dtypes and devices; None: ask the tensors.");

  m.def("identities", &identities, nb::arg("holders"), nb::arg("known"),
        "What holders hold, by identity: keys and values of a dict, items of a list or tuple, type and __dict__ of "
        "anything else. `known` itself where they are equal.");

  nb::class_<Memory>(m, "Memory")
      .def(nb::init<std::size_t>(), nb::arg("bytes"), nb::call_guard<nb::gil_scoped_release>())
      .def_prop_ro("address", &Memory::address)
      .def_prop_ro("bytes", &Memory::bytes);
  m.def(
      "give_back", &give_back, nb::call_guard<nb::gil_scoped_release>(),
      "Give back the memory of what has been destroyed. On a GPU that waits for its kernels, so destructors leave it.");
  m.def("can_reach", &can_reach, nb::arg("device"), nb::arg("peer"));
  m.def("reach", &reach, nb::arg("peer"), "Let the current device read and write memory of that one.");
  m.def("fuse", &fuse, nb::arg("ranks"), nb::call_guard<nb::gil_scoped_release>(),
        "Ranks of this process: let their calls be launched together, on one device as one kernel.");
}
