// Layouts, plans and the environment table for Python; no torch.
#pragma once

#include <pybind11/pybind11.h>

namespace tide {

void bind_plans(pybind11::module_& m);

}  // namespace tide
