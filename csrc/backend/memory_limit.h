// How much memory this process may still take, from the machine and from the cgroups it is in (v1 and v2).
#pragma once

#include <cstdint>
#include <string>

namespace tide {

struct MemoryRoom {
  int64_t total = 0;       // bytes the limit allows in all
  int64_t available = 0;   // bytes that can still be taken; page cache counts as available
  std::string limited_by;  // "MemAvailable" or the cgroup's directory
};

// The tightest limit right now. `root` is prepended to every path read ("" on a real machine).
MemoryRoom memory_room(const std::string& root = "");

// The largest amount that could ever be available: min(physical memory, every cgroup limit).
int64_t memory_bound(const std::string& root = "");

}  // namespace tide
