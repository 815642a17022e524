#include "options_bindings.h"

#include <pybind11/chrono.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/extension.h>

#include "options.h"

namespace py = pybind11;

namespace tide {

namespace {

using Class = py::class_<BackendOptions, c10::intrusive_ptr<BackendOptions>, c10d::Backend::Options>;

// Python's integers alone, of which True and False are two: a string or a float was meant otherwise.
std::optional<int64_t> integer(const py::object& value) {
  if (!PyIndex_Check(value.ptr())) return std::nullopt;
  const auto number = py::reinterpret_steal<py::object>(PyNumber_Index(value.ptr()));
  if (!number) throw py::error_already_set();
  int overflow = 0;
  const long long result = PyLong_AsLongLongAndOverflow(number.ptr(), &overflow);
  if (overflow != 0) return std::nullopt;
  return result;
}

template <typename T>
void bind_option(Class& options, const char* name, T BackendOptions::* field) {
  options.def_property(
      name, [field](const BackendOptions& self) { return self.*field; },
      [field, name](BackendOptions& self, const py::object& value) {
        self.*field = static_cast<T>(allowed_option(name, integer(value), py::repr(value)));
      });
}

c10::intrusive_ptr<BackendOptions> make(const py::kwargs& given) {
  auto options = c10::make_intrusive<BackendOptions>();
  const py::object made = py::cast(options);
  for (const auto& [key, value] : given) {
    const auto name = key.cast<std::string>();
    if (!is_option(name)) {
      throw py::type_error("tide: Options got \"" + name + "\", which does not exist; expected any of " +
                           option_names() + "; correct the name");
    }
    py::setattr(made, name.c_str(), value);
  }
  return options;
}

}  // namespace

void bind_options(py::module_& m) {
  Class options(m, "Options");
  options.def(py::init(&make))
      .def("__copy__", [](const BackendOptions& self) { return c10::make_intrusive<BackendOptions>(self); })
      .def("__deepcopy__",
           [](const BackendOptions& self, const py::dict&) { return c10::make_intrusive<BackendOptions>(self); })
      .def_readwrite("group_name", &BackendOptions::group_name)
      .def_readwrite("_timeout", &BackendOptions::timeout)
      .def_readwrite("global_ranks_in_group", &BackendOptions::global_ranks_in_group);
  bind_option(options, "arena_bytes", &BackendOptions::arena_bytes);
  bind_option(options, "staging_bytes", &BackendOptions::staging_bytes);
  bind_option(options, "handshake_seconds", &BackendOptions::handshake_seconds);
  bind_option(options, "recorded_calls", &BackendOptions::recorded_calls);
  bind_option(options, "shared_memory", &BackendOptions::shared_memory);
  bind_option(options, "cuda", &BackendOptions::cuda);
  bind_option(options, "cuda_staging_bytes", &BackendOptions::cuda_staging_bytes);
  bind_option(options, "slot_reuse", &BackendOptions::slot_reuse);
  bind_option(options, "multicast", &BackendOptions::multicast);
  bind_option(options, "accumulate_ctas", &BackendOptions::accumulate_ctas);
  bind_option(options, "cuda_plain_bytes", &BackendOptions::cuda_plain_bytes);
  bind_option(options, "raise_on_timeout", &BackendOptions::raise_on_timeout);
}

}  // namespace tide
