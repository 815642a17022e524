// Python's view of the repacking solver: submodule `repack` of the extension.
#pragma once

#include <pybind11/pybind11.h>

namespace tide {

void bind_repack(pybind11::module_& m);

}  // namespace tide
