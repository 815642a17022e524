#include "bindings.h"

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <chrono>
#include <numeric>
#include <optional>
#include <stdexcept>

#include "balance.h"
#include "solver.h"

namespace py = pybind11;

namespace tide {
namespace {

using namespace repack;

const char* form_name(Form form) {
  switch (form) {
    case Form::baseline:
      return "baseline";
    case Form::partition:
      return "partition";
    case Form::spill:
      return "spill";
  }
  throw std::logic_error("unknown form");
}

const char* rule_name(Rule rule) {
  switch (rule) {
    case Rule::step:
      return "step";
    case Rule::layer:
      return "layer";
    case Rule::work:
      return "work";
    case Rule::fixed:
      return "fixed";
  }
  throw std::logic_error("unknown rule");
}

py::tuple samples_tuple(std::vector<int> samples) {
  std::sort(samples.begin(), samples.end());
  py::tuple result(samples.size());
  for (size_t i = 0; i < samples.size(); ++i) result[i] = samples[i];
  return result;
}

// (form, [(first_rank, width, samples), ...], numbers)
py::tuple parent_tuple(const ParentResult& parent) {
  py::list children;
  for (const Child& child : parent.layout.children) {
    children.append(py::make_tuple(child.first_rank, child.width, samples_tuple(child.samples)));
  }
  py::dict numbers;
  numbers["tokens"] = parent.tokens;
  numbers["max_rows"] = parent.layout.max_rows;
  numbers["bound_rows"] = parent.bound_rows;
  numbers["balanced_rows"] = parent.balanced_rows;
  numbers["exchange_rows"] = parent.layout.exchange_rows;
  numbers["attention_us"] = parent.attention_us;
  numbers["rows_us"] = parent.layout.rows_us;
  numbers["full_us"] = parent.layout.full_us;
  numbers["sparse_us"] = parent.layout.sparse_us;
  numbers["baseline_rows_us"] = parent.baseline_us;
  numbers["partition_rows_us"] = parent.partition_us;
  return py::make_tuple(form_name(parent.layout.form), children, numbers);
}

Sync sync_from(const std::string& name) {
  if (name == "step") return Sync::step;
  if (name == "layer") return Sync::layer;
  throw std::invalid_argument("sync: got \"" + name + "\", expected \"step\" or \"layer\"");
}

Membership membership_from(const std::string& name) {
  if (name == "solve") return Membership::solve;
  if (name == "work") return Membership::work;
  if (name == "fixed") return Membership::fixed;
  throw std::invalid_argument("membership: got \"" + name + "\", expected \"solve\", \"work\" or \"fixed\"");
}

// One class: (count, width, unit, attention, full, sparse[4], spread, samples or None for all, fixed members)
using ClassTuple = std::tuple<int, int, int, double, double, std::array<double, kChildWidths>, double,
                              std::optional<std::vector<int>>, Members>;

ParentClass class_from(ClassTuple t, size_t samples) {
  ParentClass spec;
  const int unit = std::get<2>(t);
  spec.shape = {std::get<0>(t), std::get<1>(t), unit, std::get<1>(t) / unit};
  spec.costs = {std::get<3>(t), std::get<4>(t), std::get<5>(t), std::get<6>(t)};
  if (std::get<7>(t)) {
    spec.samples = std::move(*std::get<7>(t));
  } else {
    spec.samples.resize(samples);
    std::iota(spec.samples.begin(), spec.samples.end(), 0);
  }
  spec.fixed = std::move(std::get<8>(t));
  return spec;
}

py::dict solve_bound(const Lengths& lengths, std::vector<ClassTuple> tuples, const std::string& sync,
                     const std::string& membership, bool guard, bool spill, double slack, int64_t max_rows,
                     int64_t max_parent_tokens) {
  std::vector<ParentClass> classes;
  for (auto& t : tuples) classes.push_back(class_from(std::move(t), lengths.size()));
  Options options{sync_from(sync), membership_from(membership), guard, spill, slack, {}};
  if (max_rows > 0) options.limits.rows_per_rank = max_rows;
  if (max_parent_tokens > 0) options.limits.tokens_per_parent = max_parent_tokens;
  Solution solution;
  double solve_ms = 0;
  {
    py::gil_scoped_release release;
    const auto start = std::chrono::steady_clock::now();
    solution = solve(lengths, classes, options);
    solve_ms = std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count();
  }
  py::list parents;
  for (const ParentResult& parent : solution.parents) parents.append(parent_tuple(parent));
  py::dict result;
  result["parents"] = parents;
  result["rule"] = rule_name(solution.rule);
  result["cost_us"] = solution.cost_us;
  result["baseline_us"] = solution.baseline_us;
  result["work_us"] = solution.work_us;
  result["balance_us"] = solution.balance_us;
  result["bound_us"] = solution.bound_us;
  result["core_ms"] = solve_ms;
  return result;
}

}  // namespace

void bind_repack(py::module_& m) {
  py::module_ sub = m.def_submodule("repack", "Solver of layerwise repacking; see tide_backend.repack.solve");
  sub.def("solve", &solve_bound, py::arg("lengths"), py::arg("classes"), py::arg("sync"), py::arg("membership"),
          py::arg("guard"), py::arg("spill"), py::arg("slack"), py::arg("max_rows"), py::arg("max_parent_tokens"));
  sub.def(
      "balance", [](const std::vector<int64_t>& weights, int bins) { return balance(weights, bins).bin_of; },
      py::arg("weights"), py::arg("bins"), "Bin of each weight; weights sorted, heaviest first.");
  sub.def("split_bound", &split_bound, py::arg("weights"), py::arg("bins"));
}

}  // namespace tide
