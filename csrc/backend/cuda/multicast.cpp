#include "multicast.h"

#include "../env.h"
#include "nccl.h"

namespace tide::cuda {

namespace {

constexpr char kNo = '0', kYes = '1';
constexpr size_t kLongest = 1000;  // bytes of a refusal; a record also holds more than that

std::string refusal(int world) {
  if (world <= 2) return "a group of two ranks has one peer to copy to";
  if (const std::string forbidden = multicast_forbidden(); !forbidden.empty()) return forbidden + " forbids it";
  if (!nccl().multicast_pointer) {
    return "NCCL " + version_text(nccl().version) + " (" + nccl().library + ") has no ncclGetLsaMultimemDevicePointer";
  }
  return "";
}

}  // namespace

std::string multicast_wish(int world, bool asked) {
  return asked ? kYes + refusal(world).substr(0, kLongest) : std::string(1, kNo);
}

Multicast agreed_multicast(const std::vector<std::string>& wishes) {
  size_t asking = wishes.size(), not_asking = wishes.size();
  for (size_t r = wishes.size(); r-- > 0;) (wishes[r][0] == kYes ? asking : not_asking) = r;
  if (asking == wishes.size()) return {};
  if (not_asking < wishes.size()) {
    return {false, "got TIDE_MULTICAST=1 on rank " + std::to_string(asking) + " and 0 on rank " +
                       std::to_string(not_asking) + ", expected the same on every rank; set it alike everywhere"};
  }
  for (size_t r = 0; r < wishes.size(); ++r) {
    if (wishes[r].size() > 1) return {false, "rank " + std::to_string(r) + ": " + wishes[r].substr(1)};
  }
  return {true, ""};
}

}  // namespace tide::cuda
