// Python module tide_backend._C.
#include <pybind11/chrono.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/extension.h>
#include <torch/version.h>

#include "backend.h"
#include "plan_bindings.h"
#include "repack/bindings.h"

namespace py = pybind11;

namespace tide {

namespace {

// Called while a call waits, without the GIL; throws when a signal handler raised (Ctrl-C).
void raise_if_interrupted() {
  py::gil_scoped_acquire gil;
  if (PyErr_CheckSignals() != 0) throw py::error_already_set();
}

// Python's exceptions, by kind, from tide_backend.errors.
void register_errors() {
  py::register_exception_translator([](std::exception_ptr p) {
    try {
      if (p) std::rethrow_exception(p);
    } catch (const Error& error) {
      const char* name = "TideError";
      switch (error.kind()) {
        case ErrorKind::usage:
          name = "UsageError";
          break;
        case ErrorKind::peer:
          name = "PeerError";
          break;
        case ErrorKind::timeout:
          name = "CollectiveTimeoutError";
          break;
        case ErrorKind::driver:
          name = "DriverError";
          break;
      }
      py::object type = py::module_::import("tide_backend.errors").attr(name);
      PyErr_SetString(type.ptr(), error.what());
    }
  });
}

c10::intrusive_ptr<TideBackend> make_backend(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                                             const c10::intrusive_ptr<BackendOptions>& options, py::function factory) {
  // The factory is a Python object: it must be released with the GIL held, whichever thread drops the backend.
  auto held = std::shared_ptr<py::function>(new py::function(std::move(factory)), [](py::function* f) {
    py::gil_scoped_acquire gil;
    delete f;
  });
  auto make_inner = [held](const std::string& device) {
    py::gil_scoped_acquire gil;
    return (*held)(device).cast<c10::intrusive_ptr<c10d::Backend>>();
  };
  return c10::make_intrusive<TideBackend>(store, rank, size, options, make_inner, raise_if_interrupted);
}

py::list records(TideBackend& self) {
  py::list result;
  for (const Call& call : self.engine().recorder().recent()) {
    py::dict d;
    d["op"] = to_string(call.op);
    d["sequence"] = call.sequence;
    d["path"] = to_string(call.path);
    d["reason"] = call.reason;
    d["label"] = call.label;
    d["dtype"] = call.text;
    d["bytes"] = call.bytes;
    d["repair_copies"] = call.repair_copies;
    d["state"] = to_string(call.state);
    d["seconds"] = call.finished > 0 ? call.finished - call.started : 0.0;
    result.append(d);
  }
  return result;
}

py::list totals(TideBackend& self) {
  py::list result;
  for (const auto& [key, t] : self.engine().recorder().totals()) {
    py::dict d;
    d["op"] = to_string(std::get<0>(key));
    d["path"] = to_string(std::get<1>(key));
    d["reason"] = std::get<2>(key);
    d["calls"] = t.calls;
    d["bytes"] = t.bytes;
    d["repair_copies"] = t.repair_copies;
    d["seconds"] = t.seconds;
    result.append(d);
  }
  return result;
}

void bind_backend(py::module_& m) {
  py::class_<BackendOptions, c10::intrusive_ptr<BackendOptions>, c10d::Backend::Options>(m, "Options")
      .def(py::init<>())
      .def_readwrite("arena_bytes", &BackendOptions::arena_bytes)
      .def_readwrite("staging_bytes", &BackendOptions::staging_bytes)
      .def_readwrite("handshake_seconds", &BackendOptions::handshake_seconds)
      .def_readwrite("recorded_calls", &BackendOptions::recorded_calls)
      .def_readwrite("shared_memory", &BackendOptions::shared_memory)
      .def_readwrite("group_name", &BackendOptions::group_name)
      .def_readwrite("_timeout", &BackendOptions::timeout)
      .def_readwrite("global_ranks_in_group", &BackendOptions::global_ranks_in_group);

  using NoGil = py::call_guard<py::gil_scoped_release>;
  py::class_<TideBackend, c10::intrusive_ptr<TideBackend>, c10d::Backend>(m, "TideBackend")
      .def(py::init(&make_backend), py::arg("store"), py::arg("rank"), py::arg("size"), py::arg("options"),
           py::arg("inner_factory"))
      .def("connect", &TideBackend::connect, NoGil())
      .def_property_readonly("shared_memory", [](TideBackend& self) { return self.engine().shared_memory(); })
      .def(
          "slot",
          [](TideBackend& self, int64_t bytes) -> std::pair<std::optional<at::Tensor>, std::string> {
            std::string reason;
            auto tensor = self.slot(bytes, &reason);
            return {tensor, reason};
          },
          py::arg("nbytes"), NoGil())
      .def("in_arena", &TideBackend::in_arena)
      .def("arena_bytes",
           [](TideBackend& self) -> std::pair<int64_t, int64_t> {
             auto arena = self.engine().arena_if_connected();
             if (!arena) return {0, 0};
             return {arena->bytes_in_use(), arena->bytes_committed()};
           })
      .def("connect_inner", [](TideBackend& self, const std::string& device) { self.inner(c10::Device(device).type()); },
           NoGil())
      .def("inner", [](TideBackend& self, const std::string& device) { return self.inner(c10::Device(device).type()); },
           NoGil())
      .def("records", &records)
      .def("totals", &totals)
      .def("reset_totals", [](TideBackend& self) { self.engine().recorder().reset(); })
      .def_property_readonly("speaker", [](TideBackend& self) { return self.engine().speaker().prefix(); });
}

void bind_layout(py::module_& m) {
  m.def(
      "apply_layout",
      [](const at::Tensor& tensor, std::shared_ptr<ParameterLayout> layout,
         std::optional<std::vector<at::Tensor>> tensors, bool placed, std::string label) {
        AppliedLayout applied;
        applied.layout = std::move(layout);
        applied.separate = tensors.has_value();
        if (tensors) applied.tensors = std::move(*tensors);
        applied.placed = placed;
        applied.label = std::move(label);
        LayoutTable::global().put(tensor, std::move(applied));
      },
      py::arg("tensor"), py::arg("layout"), py::kw_only(), py::arg("tensors") = std::nullopt,
      py::arg("placed") = false, py::arg("label") = "");
  m.def("repoint", &repoint, py::arg("tensor"), py::arg("base"), py::arg("byte_offset"), py::arg("nbytes"));
}

}  // namespace

}  // namespace tide

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.attr("torch_version") = TORCH_VERSION;
  tide::register_errors();
  tide::bind_plans(m);
  tide::bind_layout(m);
  tide::bind_backend(m);
  tide::bind_repack(m);
}
