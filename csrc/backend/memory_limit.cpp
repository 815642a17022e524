#include "memory_limit.h"

#include <algorithm>
#include <fstream>
#include <limits>
#include <optional>
#include <sstream>
#include <vector>

namespace tide {
namespace {

constexpr int64_t kUnlimited = std::numeric_limits<int64_t>::max();

// The number after `key` in a file of "key number" or "key: number kB" lines.
std::optional<int64_t> field(const std::string& path, const std::string& key) {
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) {
    std::istringstream words(line);
    std::string name, unit;
    int64_t value = 0;
    if (words >> name >> value && name == key) return words >> unit && unit == "kB" ? value * 1024 : value;
  }
  return std::nullopt;
}

// A file that holds one number; "max" does not count as one.
std::optional<int64_t> number(const std::string& path) {
  std::ifstream file(path);
  int64_t value = 0;
  if (file >> value) return value;
  return std::nullopt;
}

struct CgroupFiles {
  const char* mount;
  const char* limit;
  const char* usage;
  const char* active_cache;
  const char* inactive_cache;
};

constexpr CgroupFiles kV2{"/sys/fs/cgroup", "memory.max", "memory.current", "active_file", "inactive_file"};
constexpr CgroupFiles kV1{"/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes",
                          "total_active_file", "total_inactive_file"};

// Every limit on the way from this process's cgroup up to the root. In a container the path in
// /proc/self/cgroup may be the host's and not exist here; the mount's own root then holds the limit.
void add_cgroup_limits(const std::string& root, const CgroupFiles& files, std::string path,
                       std::vector<MemoryRoom>* rooms) {
  for (;;) {
    const std::string directory = root + files.mount + (path == "/" ? "" : path) + "/";
    const auto limit = number(directory + files.limit);
    const auto usage = number(directory + files.usage);
    if (limit && usage) {
      // The kernel drops clean page cache before it refuses an allocation; shared memory is not in these two.
      const int64_t cache = field(directory + "memory.stat", files.active_cache).value_or(0) +
                            field(directory + "memory.stat", files.inactive_cache).value_or(0);
      rooms->push_back({*limit, *limit - std::max<int64_t>(0, *usage - cache), "cgroup " + directory});
    }
    if (path.empty() || path == "/") return;
    path.resize(path.rfind('/'));
  }
}

std::vector<MemoryRoom> all_rooms(const std::string& root) {
  std::vector<MemoryRoom> rooms;
  const std::string meminfo = root + "/proc/meminfo";
  const auto total = field(meminfo, "MemTotal:");
  const auto available = field(meminfo, "MemAvailable:");
  if (total && available) rooms.push_back({*total, *available, "MemAvailable"});
  std::ifstream cgroups(root + "/proc/self/cgroup");
  for (std::string line; std::getline(cgroups, line);) {
    const size_t first = line.find(':');
    const size_t second = line.find(':', first + 1);
    if (first == std::string::npos || second == std::string::npos) continue;
    const std::string controllers = "," + line.substr(first + 1, second - first - 1) + ",";
    const std::string path = line.substr(second + 1);
    if (controllers == ",,") add_cgroup_limits(root, kV2, path, &rooms);
    if (controllers.find(",memory,") != std::string::npos) add_cgroup_limits(root, kV1, path, &rooms);
  }
  return rooms;
}

}  // namespace

MemoryRoom memory_room(const std::string& root) {
  MemoryRoom tightest{kUnlimited, kUnlimited, "nothing"};
  for (const MemoryRoom& room : all_rooms(root))
    if (room.available < tightest.available) tightest = room;
  return tightest;
}

int64_t memory_bound(const std::string& root) {
  int64_t bound = kUnlimited;
  for (const MemoryRoom& room : all_rooms(root)) bound = std::min(bound, room.total);
  return bound;
}

}  // namespace tide
