// Python module tide_backend._C.
#include "repack/bindings.h"

#include <pybind11/chrono.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/extension.h>
#include <torch/version.h>

#include "../kernels/accumulate_cuda.h"
#include "backend.h"
#include "options_bindings.h"
#include "plan_bindings.h"
#include "slot_cast.h"
#include "work.h"

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
  auto make_inner = [held](const std::string& device, const c10::intrusive_ptr<c10d::Store>& from, int of_rank,
                           int of_size, std::chrono::milliseconds timeout) {
    py::gil_scoped_acquire gil;
    return (*held)(device, from, of_rank, of_size, timeout).cast<c10::intrusive_ptr<c10d::Backend>>();
  };
  return c10::make_intrusive<TideBackend>(store, rank, size, options, make_inner, raise_if_interrupted);
}

py::list records(TideBackend& self) {
  py::list result;
  for (const auto& [device, engine] : self.engines()) {
    for (const Call& call : engine->recorder().recent()) {
      py::dict d;
      d["device"] = device;
      d["op"] = to_string(call.op);
      d["sequence"] = call.sequence;
      d["path"] = call.reason.empty() ? "" : to_string(call.path);  // the reason comes with the decision
      d["reason"] = call.reason;
      d["label"] = call.label;
      d["dtype"] = call.text;
      d["bytes"] = call.bytes;
      d["repair_copies"] = call.repair_copies;
      d["kernel_copies"] = call.kernel_copies;
      d["repair_reason"] = call.repair_reason;
      d["state"] = to_string(call.state);
      d["seconds"] = call.finished > 0 ? call.finished - call.started : 0.0;
      result.append(d);
    }
  }
  return result;
}

py::list totals(TideBackend& self) {
  py::list result;
  for (const auto& [device, engine] : self.engines()) {
    for (const auto& [key, t] : engine->recorder().totals()) {
      py::dict d;
      d["device"] = device;
      d["op"] = to_string(std::get<0>(key));
      d["path"] = to_string(std::get<1>(key));
      d["reason"] = std::get<2>(key);
      d["calls"] = t.calls;
      d["bytes"] = t.bytes;
      d["repair_copies"] = t.repair_copies;
      d["kernel_copies"] = t.kernel_copies;
      d["seconds"] = t.seconds;
      result.append(d);
    }
  }
  return result;
}

void bind_backend(py::module_& m) {
  using NoGil = py::call_guard<py::gil_scoped_release>;
  py::class_<TideBackend, c10::intrusive_ptr<TideBackend>, c10d::Backend>(m, "TideBackend")
      .def(py::init(&make_backend), py::arg("store"), py::arg("rank"), py::arg("size"), py::arg("options"),
           py::arg("inner_factory"))
      .def(
          "connect", [](TideBackend& self, const std::string& device) { return self.connect(at::Device(device)); },
          py::arg("device") = "cpu", NoGil())
      .def_property_readonly("shared_memory",
                             [](TideBackend& self) { return self.shared_memory(at::Device(at::kCPU)); })
      .def(
          "slot",
          [](TideBackend& self, int64_t bytes, const std::string& device, uintptr_t stream,
             cuda::ParameterGroup group) -> std::pair<std::optional<at::Tensor>, std::string> {
            std::string reason;
            auto tensor = self.slot(bytes, at::Device(device), reinterpret_cast<void*>(stream), group, &reason);
            return {tensor, reason};
          },
          py::arg("nbytes"), py::arg("device") = "cpu", py::arg("stream") = 0,
          py::arg("parameter_group") = cuda::kNoParameters, NoGil())
      .def("in_arena", &TideBackend::in_arena)
      .def_property_readonly("options", &TideBackend::getBackendOptions)  // torch has it from 2.14 on
      // torch.distributed calls it on ranks outside a new subgroup when splitting is supported; tide's groups need
      // nothing from those.
      .def(
          "perform_nocolor_split", [](TideBackend&, const py::object&) {}, py::arg("device"))
      .def(
          "arena_bytes",
          [](TideBackend& self, const std::string& device) -> std::pair<int64_t, int64_t> {
            for (const auto& [name, engine] : self.engines()) {
              auto arena = engine->arena_if_connected();
              if (name == device && arena) return {arena->bytes_in_use(), arena->bytes_committed()};
            }
            return {0, 0};
          },
          py::arg("device") = "cpu")
      .def(
          "connect_inner", [](TideBackend& self, const std::string& device) { self.inner(c10::Device(device).type()); },
          NoGil())
      .def(
          "inner", [](TideBackend& self, const std::string& device) { return self.inner(c10::Device(device).type()); },
          NoGil())
      .def(
          "_leave", [](TideBackend& self) { self.leave(); }, NoGil())
      .def("records", &records)
      .def("totals", &totals)
      .def("reset_totals",
           [](TideBackend& self) {
             for (const auto& [device, engine] : self.engines()) engine->recorder().reset();
           })
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
      py::arg("tensor"), py::arg("layout"), py::kw_only(), py::arg("tensors") = std::nullopt, py::arg("placed") = false,
      py::arg("label") = "");
  m.def("repoint", &repoint, py::arg("tensor"), py::arg("base"), py::arg("byte_offset"), py::arg("nbytes"));
  m.def("cast_into_slot", &cast_into_slot, py::arg("to"), py::arg("sources"), py::arg("ctas"),
        py::call_guard<py::gil_scoped_release>());
}

}  // namespace

}  // namespace tide

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.attr("torch_version") = TORCH_VERSION;
  tide::register_errors();
  tide::bind_plans(m);
  tide::bind_layout(m);
  tide::bind_options(m);
  tide::bind_backend(m);
  tide::bind_repack(m);
  m.attr("with_cuda_kernels") = tide::accumulate_launch() != nullptr;
  m.def("_finish_callbacks", &tide::finish_callbacks, py::arg("longest"), py::call_guard<py::gil_scoped_release>());
  m.def("set_nccl_candidates", &tide::cuda::set_nccl_candidates);
  m.def("nccl", [] {
    const auto& nccl = tide::cuda::nccl();
    return py::make_tuple(nccl.library, nccl.version, nccl.problem);
  });
  m.def("driver_problem", [] { return tide::cuda::driver().problem; });
}
