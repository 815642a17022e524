#include "slot_cast.h"

#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <climits>

#include "../kernels/cast.h"
#include "error.h"

namespace tide {

bool cast_into_slot(const std::vector<at::Tensor>& to, const std::vector<at::Tensor>& from, int64_t ctas) {
  if (to.size() != from.size()) {
    throw Error(ErrorKind::usage, "tide: cast_into_slot: got " + std::to_string(to.size()) + " places and " +
                                      std::to_string(from.size()) + " tensors; expected as many of each");
  }
  if (to.empty() || !cast_launch()) return false;
  const at::Device device = to[0].device();
  if (!device.is_cuda()) return false;
  std::vector<Cast> casts;
  casts.reserve(to.size());
  for (size_t i = 0; i < to.size(); ++i) {
    const at::Tensor &target = to[i], &source = from[i];
    if (target.numel() != source.numel()) {
      throw Error(ErrorKind::usage, "tide: cast_into_slot: tensor " + std::to_string(i) + " has " +
                                        std::to_string(source.numel()) + " elements; expected " +
                                        std::to_string(target.numel()));
    }
    if (target.scalar_type() != at::kBFloat16 || source.scalar_type() != at::kFloat || !source.is_contiguous() ||
        !target.is_contiguous() || source.device() != device || target.device() != device) {
      return false;
    }
    if (target.numel() > 0) casts.push_back({target.mutable_data_ptr(), source.const_data_ptr(), target.numel()});
  }
  const c10::DeviceGuard guard(device);
  const c10::impl::VirtualGuardImpl cuda(c10::DeviceType::CUDA);
  cast_launch()(casts, static_cast<int>(std::min<int64_t>(ctas, INT_MAX)),
                cuda.getStreamNativeHandle(cuda.getStream(device)));
  return true;
}

}  // namespace tide
