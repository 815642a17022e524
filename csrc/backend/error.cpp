#include "error.h"

#include <cstring>

namespace tide {

std::string Speaker::prefix(const std::string& call) const {
  std::string text = "tide[rank " + std::to_string(rank) + "/" + std::to_string(world) + ", group \"" + group + "\"";
  if (!call.empty()) text += ", " + call;
  return text + "]: ";
}

void fail(ErrorKind kind, const Speaker& who, const std::string& call, const std::string& what) {
  throw Error(kind, who.prefix(call) + what);
}

std::string errno_text(const std::string& call, int error_number) {
  return call + " failed: " + std::strerror(error_number) + " (errno " + std::to_string(error_number) + ")";
}

}  // namespace tide
