#include "plan_bindings.h"

#include <pybind11/operators.h>
#include <pybind11/stl.h>

#include "env.h"
#include "error.h"
#include "plan.h"

namespace py = pybind11;

namespace tide {

namespace {

py::tuple address(const Address& a) {
  const char* space = "none";
  switch (a.space) {
    case Space::none:
      break;
    case Space::input:
      space = "input";
      break;
    case Space::output:
      space = "output";
      break;
    case Space::window:
      space = "window";
      break;
    case Space::multicast:
      space = "multicast";
      break;
  }
  return py::make_tuple(space, a.index, a.offset);
}

const char* name(StepKind kind) {
  switch (kind) {
    case StepKind::copy:
      return "copy";
    case StepKind::fill:
      return "fill";
    case StepKind::signal:
      return "signal";
    case StepKind::wait:
      return "wait";
    case StepKind::accumulate:
      return "accumulate";
  }
  return "?";
}

py::list steps(const Plan& plan) {
  py::list result;
  for (const Step& s : plan.steps) {
    py::dict d;
    d["kind"] = name(s.kind);
    d["peer"] = s.peer;
    d["flag"] = to_string(s.flag);
    d["value"] = s.value;
    d["to"] = address(s.to);
    d["from"] = address(s.from);
    d["bytes"] = s.bytes;
    d["rows"] = s.rows;
    d["to_pitch"] = s.to_pitch;
    d["from_pitch"] = s.from_pitch;
    d["staged"] = s.staged;
    d["stride"] = s.stride;
    d["type"] = to_string(s.type);
    result.append(d);
  }
  return result;
}

ElementType element_type(const std::string& name) {
  for (ElementType type : {ElementType::bytes, ElementType::f32, ElementType::f64, ElementType::bf16, ElementType::i32,
                           ElementType::i64}) {
    if (name == to_string(type)) return type;
  }
  throw Error(ErrorKind::usage, "tide: plan: no such element type: " + name);
}

Plan make(const std::string& op, int rank, int world, int64_t itemsize, int64_t numel,
          std::shared_ptr<ParameterLayout> layout, bool in_arena, bool placed, bool separate_inputs,
          std::vector<int64_t> in_splits, std::vector<int64_t> out_splits, int64_t budget, int depth,
          int64_t smallest_chunk, const std::string& in_type, const std::string& out_type,
          std::vector<int64_t> peer_offsets, bool multicast, const std::vector<std::string>& in_types,
          std::optional<Strided> in_form, std::optional<Strided> out_form,
          std::vector<std::optional<Strided>> peer_forms) {
  Request q;
  if (op == "all_gather") {
    q.op = Channel::all_gather;
  } else if (op == "reduce_scatter") {
    q.op = Channel::reduce_scatter;
  } else if (op == "all_to_all") {
    q.op = Channel::all_to_all;
  } else {
    throw Error(ErrorKind::usage, "tide: plan: got op " + op + ", expected all_gather, reduce_scatter or all_to_all");
  }
  q.rank = rank;
  q.world = world;
  q.in_type = element_type(in_type);
  q.out_type = element_type(out_type);
  q.itemsize = itemsize;
  q.out_itemsize = q.in_type == q.out_type ? itemsize : element_size(q.out_type);
  q.numel = numel;
  q.layout = std::move(layout);
  q.placed = placed;
  q.separate_inputs = separate_inputs;
  q.in_splits = std::move(in_splits);
  q.out_splits = std::move(out_splits);
  q.peer_offsets = std::move(peer_offsets);
  q.in_form = in_form;
  q.out_form = out_form;
  q.peer_forms = std::move(peer_forms);
  for (const std::string& name : in_types) q.in_types.push_back(element_type(name));
  q.reduction = Reduction::sum;
  if (q.op == Channel::reduce_scatter && q.in_type == ElementType::bytes) {
    throw Error(ErrorKind::usage, "tide: plan: reduce_scatter needs in_type and out_type");
  }
  if (q.op == Channel::all_to_all && in_arena && static_cast<int>(q.peer_offsets.size()) != world) {
    throw Error(ErrorKind::usage, "tide: plan: an all_to_all into the arena needs peer_offsets, one per rank");
  }
  if (multicast && (q.op != Channel::all_gather || !in_arena)) {
    throw Error(ErrorKind::usage, "tide: plan: multicast is for an all_gather into the arena");
  }
  Capabilities capabilities;
  if (multicast) {  // which only CUDA has
    capabilities.device = Device::cuda;
    capabilities.plain_slots = true;
    capabilities.multicast = true;
  }
  capabilities.shared_memory = true;
  capabilities.outputs_known = true;
  capabilities.every_output_in_arena = in_arena;
  if (depth < 2)
    throw Error(ErrorKind::usage, "tide: plan: got depth " + std::to_string(depth) + ", expected 2 or more");
  Staging staging;
  staging.budget_bytes = budget;
  staging.depth = depth;
  staging.smallest_chunk_bytes = smallest_chunk;
  const Selection selection = select(capabilities, q);
  q.multicast = selection.multicast;
  return make_plan(q, selection.path, staging);
}

}  // namespace

void bind_plans(py::module_& m) {
  py::class_<ParameterLayout, std::shared_ptr<ParameterLayout>>(m, "ParameterLayout")
      .def(py::init(
               [](int world, std::vector<int64_t> shards, std::optional<std::vector<int64_t>> numels, int64_t align) {
                 return std::make_shared<ParameterLayout>(world, std::move(shards),
                                                          numels ? std::move(*numels) : std::vector<int64_t>{}, align);
               }),
           py::arg("world_size"), py::arg("shard_numels"), py::arg("numels") = std::nullopt, py::arg("align") = 1)
      .def_property_readonly("world_size", &ParameterLayout::world)
      .def_property_readonly("align", &ParameterLayout::align)
      .def_property_readonly("hash", &ParameterLayout::hash)
      .def_property_readonly("total_shard_numel", &ParameterLayout::total_shard_numel)
      .def_property_readonly("total_gathered_numel", &ParameterLayout::total_gathered_numel)
      .def_property_readonly("shard_numels",
                             [](const ParameterLayout& self) {
                               std::vector<int64_t> v;
                               for (size_t i = 0; i < self.parameters(); ++i) v.push_back(self.shard_numel(i));
                               return v;
                             })
      .def_property_readonly("numels",
                             [](const ParameterLayout& self) {
                               std::vector<int64_t> v;
                               for (size_t i = 0; i < self.parameters(); ++i) v.push_back(self.numel(i));
                               return v;
                             })
      .def_property_readonly("shard_offsets",
                             [](const ParameterLayout& self) {
                               std::vector<int64_t> v;
                               for (size_t i = 0; i < self.parameters(); ++i) v.push_back(self.shard_offset(i));
                               return v;
                             })
      .def_property_readonly("gathered_offsets",
                             [](const ParameterLayout& self) {
                               std::vector<int64_t> v;
                               for (size_t i = 0; i < self.parameters(); ++i) v.push_back(self.gathered_offset(i));
                               return v;
                             })
      .def("__repr__", [](const ParameterLayout& self) { return "ParameterLayout(" + self.describe() + ")"; });

  py::class_<Strided>(m, "Strided")
      .def(py::init([](int64_t stride, int64_t rows, int64_t row_bytes, int64_t pitch) {
             return Strided{stride, rows, row_bytes, pitch};
           }),
           py::arg("stride"), py::arg("rows"), py::arg("row_bytes"), py::arg("pitch"))
      .def_readonly("stride", &Strided::stride)
      .def_readonly("rows", &Strided::rows)
      .def_readonly("row_bytes", &Strided::row_bytes)
      .def_readonly("pitch", &Strided::pitch)
      .def("disjoint", &disjoint, py::arg("elements"))
      .def(py::self == py::self)
      .def("__repr__", [](const Strided& self) {
        return "Strided(stride=" + std::to_string(self.stride) + ", rows=" + std::to_string(self.rows) +
               ", row_bytes=" + std::to_string(self.row_bytes) + ", pitch=" + std::to_string(self.pitch) + ")";
      });
  m.def(
      "strided_form",
      [](const std::vector<int64_t>& sizes, const std::vector<int64_t>& strides, int64_t itemsize) {
        return strided_form(sizes, strides, itemsize);
      },
      py::arg("sizes"), py::arg("strides"), py::arg("itemsize"));
  // (to, from, rows, bytes of one, pitch of to, pitch of from) of each copy.
  m.def(
      "strided_copies",
      [](const std::optional<Strided>& from, int64_t from_at, const std::optional<Strided>& to, int64_t to_at,
         int64_t bytes) {
        py::list result;
        for (const RowsAt& c : copies(from, from_at, to, to_at, bytes)) {
          result.append(py::make_tuple(c.to, c.from, c.rows.rows, c.rows.bytes, c.rows.to_pitch, c.rows.from_pitch));
        }
        return result;
      },
      py::arg("from"), py::arg("from_at"), py::arg("to"), py::arg("to_at"), py::arg("bytes"));

  py::class_<Plan>(m, "Plan")
      .def_property_readonly("op", [](const Plan& p) { return to_string(p.op); })
      .def_property_readonly("path", [](const Plan& p) { return to_string(p.path); })
      .def_readonly("rank", &Plan::rank)
      .def_readonly("world", &Plan::world)
      .def_readonly("window_bytes", &Plan::window_bytes)
      .def_property_readonly("steps", &steps)
      .def("print", &Plan::print);
  m.def("plan", &make, py::arg("op"), py::arg("rank"), py::arg("world"), py::arg("itemsize"), py::arg("numel"),
        py::arg("layout") = nullptr, py::arg("in_arena") = false, py::arg("placed") = false,
        py::arg("separate_inputs") = false, py::arg("in_splits") = std::vector<int64_t>{},
        py::arg("out_splits") = std::vector<int64_t>{}, py::arg("budget") = 4 << 20, py::arg("depth") = 2,
        py::arg("smallest_chunk") = 4096, py::arg("in_type") = "bytes", py::arg("out_type") = "bytes",
        py::arg("peer_offsets") = std::vector<int64_t>{}, py::arg("multicast") = false,
        py::arg("in_types") = std::vector<std::string>{}, py::arg("in_form") = std::nullopt,
        py::arg("out_form") = std::nullopt, py::arg("peer_forms") = std::vector<std::optional<Strided>>{});

  m.def("env_table", [] {
    py::list result;
    for (const auto& v : env_table()) result.append(py::make_tuple(v.name, v.meaning, v.allowed, v.standard));
    return result;
  });
  m.def("env", [] {
    const Env env = read_env();
    py::dict d;
    d["arena_bytes"] = env.arena_bytes;
    d["staging_bytes"] = env.staging_bytes;
    d["handshake_seconds"] = env.handshake_seconds;
    d["recorded_calls"] = env.recorded_calls;
    d["shared_memory"] = env.shared_memory;
    d["fsdp2"] = env.fsdp2;
    d["cuda"] = env.cuda;
    d["nccl_library"] = env.nccl_library;
    d["cuda_staging_bytes"] = env.cuda_staging_bytes;
    d["slot_reuse"] = env.slot_reuse;
    d["multicast"] = env.multicast;
    d["accumulate_ctas"] = env.accumulate_ctas;
    d["cuda_plain_bytes"] = env.cuda_plain_bytes;
    d["raise_on_timeout"] = env.raise_on_timeout;
    return d;
  });
}

}  // namespace tide
