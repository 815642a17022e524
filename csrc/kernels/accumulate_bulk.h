// The bf16 -> fp32 reduction by bulk copies, where the device has them.
#pragma once

#include "accumulate.h"

namespace tide {

// Launches on `stream` and says so; false (nothing launched) when the device is older than sm_90, a pointer or the
// stride is not 16-byte aligned, or the piece is small. The caller checks the launch's status.
bool accumulate_bulk(const AccumulateArgs& args, int ctas, void* stream);

}  // namespace tide
