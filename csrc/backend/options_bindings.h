#pragma once

#include <pybind11/pybind11.h>

namespace tide {

// tide_backend.Options: every attribute is held to its range when it is set.
void bind_options(pybind11::module_& m);

}  // namespace tide
