// Tells a forked child apart from the process that made an object, without a system call per check.
#pragma once

#include <cstdint>

namespace tide {

class ForkGuard {
 public:
  ForkGuard();
  // True in every process forked (by fork(), directly or further down) after this object was made.
  bool in_child() const;

 private:
  uint64_t generation_;
};

}  // namespace tide
