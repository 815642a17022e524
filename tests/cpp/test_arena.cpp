// Range allocator, copies and memory limits against plain models. Exit code 0 is success.
#include <algorithm>
#include <cstring>
#include <map>
#include <random>

#include "../../csrc/backend/memory_limit.h"
#include "../../csrc/backend/range_allocator.h"
#include "../../csrc/backend/shm_arena.h"
#include "../../csrc/kernels/copy.h"
#include "ranks.h"

namespace tide::test {
namespace {

// The model marks every unit with the number of the range that holds it, and searches by brute force.
class Model {
 public:
  std::optional<int64_t> take(int64_t bytes) {
    int64_t best = -1, best_size = 0;
    for (size_t i = 0; i < owner_.size();) {
      size_t end = i;
      while (end < owner_.size() && owner_[end] == 0) ++end;
      const auto size = static_cast<int64_t>(end - i);
      if (size >= bytes && (best < 0 || size < best_size)) best = static_cast<int64_t>(i), best_size = size;
      i = end + 1;
    }
    if (best < 0) return std::nullopt;
    ++last_;
    for (int64_t i = 0; i < bytes; ++i) owner_[static_cast<size_t>(best + i)] = last_;
    return best;
  }
  // The free ranges of `least` to `most`, the smallest first.
  std::vector<Range> free_ranges(int64_t least, int64_t most) const {
    std::vector<Range> found;
    for (size_t i = 0; i < owner_.size();) {
      size_t end = i;
      while (end < owner_.size() && owner_[end] == 0) ++end;
      const auto size = static_cast<int64_t>(end - i);
      if (size >= std::max<int64_t>(least, 1) && size <= most) found.push_back({static_cast<int64_t>(i), size});
      i = end + 1;
    }
    std::stable_sort(found.begin(), found.end(), [](const Range& a, const Range& b) { return a.bytes < b.bytes; });
    return found;
  }
  void take_at(const Range& wanted) {
    ++last_;
    for (int64_t i = 0; i < wanted.bytes; ++i) owner_[static_cast<size_t>(wanted.offset + i)] = last_;
  }
  void give_back(int64_t offset) {
    const int id = owner_[static_cast<size_t>(offset)];
    for (int& owner : owner_)
      if (owner == id) owner = 0;
  }
  void grow(int64_t bytes) { owner_.resize(owner_.size() + static_cast<size_t>(bytes), 0); }
  int64_t free_tail() const {
    int64_t tail = 0;
    while (tail < static_cast<int64_t>(owner_.size()) && owner_[owner_.size() - 1 - static_cast<size_t>(tail)] == 0)
      ++tail;
    return tail;
  }
  int64_t in_use() const {
    int64_t used = 0;
    for (const int owner : owner_) used += owner != 0;
    return used;
  }
  bool taken(int64_t offset, int64_t bytes) const {
    if (offset < 0 || offset + bytes > static_cast<int64_t>(owner_.size()) || bytes == 0) return false;
    const int id = owner_[static_cast<size_t>(offset)];
    for (int64_t i = 0; i < bytes; ++i)
      if (owner_[static_cast<size_t>(offset + i)] != id) return false;
    return id != 0;
  }

 private:
  std::vector<int> owner_;
  int last_ = 0;
};

void allocator_fuzz() {
  for (unsigned seed = 0; seed < 40; ++seed) {
    std::mt19937 random(seed);
    const auto below = [&](int64_t n) { return static_cast<int64_t>(random() % static_cast<uint64_t>(n)); };
    RangeAllocator ranges;
    Model model;
    std::vector<int64_t> held;
    for (int step = 0; step < 2000; ++step) {
      const int64_t least = 1 + below(6), most = least + below(20);
      const auto free = ranges.free_ranges(least, most), expected = model.free_ranges(least, most);
      const auto same = [](const Range& a, const Range& b) { return a.offset == b.offset && a.bytes == b.bytes; };
      check(std::equal(free.begin(), free.end(), expected.begin(), expected.end(), same), "free ranges");
      if (!free.empty() && below(4) == 0) {
        const Range& room = free[static_cast<size_t>(below(static_cast<int64_t>(free.size())))];
        const int64_t bytes = 1 + below(room.bytes);
        const Range wanted{room.offset + below(room.bytes - bytes + 1), bytes};
        ranges.take(room, wanted);
        model.take_at(wanted);
        held.push_back(wanted.offset);
      } else if (held.empty() || below(100) < 40) {
        const int64_t bytes = 1 + below(below(4) == 0 ? 60 : 6);
        auto offset = ranges.take(bytes);
        check(offset == model.take(bytes), "best fit, lowest offset");
        if (!offset) {
          check(ranges.missing(bytes) == bytes - model.free_tail(), "missing");
          const int64_t growth = ranges.missing(bytes) + below(5);
          ranges.grow(growth);
          model.grow(growth);
          offset = ranges.take(bytes);
          check(offset && offset == model.take(bytes), "after growth");
        }
        held.push_back(*offset);
      } else {
        const auto victim = static_cast<size_t>(below(static_cast<int64_t>(held.size())));
        check(ranges.give_back(held[victim]).has_value(), "give_back");
        model.give_back(held[victim]);
        check(!ranges.give_back(held[victim]), "only once");
        held.erase(held.begin() + static_cast<std::ptrdiff_t>(victim));
      }
      check(ranges.in_use() == model.in_use(), "in use");
      const int64_t offset = below(ranges.span()), bytes = 1 + below(8);
      check(ranges.taken(offset, bytes) == model.taken(offset, bytes), "taken");
    }
    for (const int64_t offset : held) ranges.give_back(offset);
    check(ranges.in_use() == 0 && ranges.take(ranges.span()) == 0, "all free and in one piece");
  }
}

// Windows hold what was written to them while others come and go; committed memory is reused.
void arena_contents() {
  const int64_t limit = int64_t{64} << 20;
  ShmArena arena(create_memfd("tide-test", limit), limit, 1);
  std::mt19937 random(1);
  std::map<int64_t, std::pair<Window, unsigned char>> held;
  for (int step = 0; step < 400; ++step) {
    std::string why;
    const auto window = arena.acquire(static_cast<int64_t>(random() % (3 << 20)), &why);
    if (window) {
      const auto fill = static_cast<unsigned char>(random());
      std::memset(arena.address(*window), fill, static_cast<size_t>(window->bytes));
      held[window->offset] = {*window, fill};
    } else {
      check_contains(why, "arena limit");
    }
    while (held.size() > 12 || (!window && !held.empty())) {
      const auto victim = std::next(held.begin(), static_cast<std::ptrdiff_t>(random() % held.size()));
      const auto [old, fill] = victim->second;
      const std::byte* bytes = arena.address(old);
      for (int64_t i = 0; i < old.bytes; i += 509) check(bytes[i] == static_cast<std::byte>(fill), "content");
      arena.release(old);
      held.erase(victim);
      if (held.size() <= 12) break;
    }
  }
  check(arena.bytes_committed() <= limit && arena.bytes_in_use() <= arena.bytes_committed(), "counters");
}

// Every alignment of both sides and lengths around the change to streaming stores; nothing beyond is touched.
void copies_of_any_shape() {
  const int64_t mib = int64_t{1} << 20;
  std::vector<std::byte> from(static_cast<size_t>(2 * mib)), to(from.size());
  std::mt19937 random(3);
  for (std::byte& byte : from) byte = static_cast<std::byte>(random());
  for (const int64_t length : {int64_t{0}, int64_t{1}, int64_t{63}, mib - 1, mib, mib + 1, mib + 255, mib + 321}) {
    for (int round = 0; round < 12; ++round) {
      const int64_t source = random() % 200, target = round == 0 ? 0 : random() % 200;
      std::fill(to.begin(), to.end(), std::byte{0x5a});
      push_bytes(to.data() + target, from.data() + source, length);
      for (int64_t i = 0; i < static_cast<int64_t>(to.size()); ++i) {
        const bool inside = i >= target && i < target + length;
        const std::byte expected = inside ? from[static_cast<size_t>(i - target + source)] : std::byte{0x5a};
        if (to[static_cast<size_t>(i)] != expected) check(false, "byte " + std::to_string(i));
      }
    }
  }
}

void write(const std::string& path, const std::string& text) {
  std::filesystem::create_directories(std::filesystem::path(path).parent_path());
  std::ofstream(path) << text;
}

void memory_limits() {
  const int64_t kib = 1024;
  const TemporaryDirectory directory;
  const std::string& root = directory.path();
  check(memory_room(root).limited_by == "nothing", "nothing known");
  write(root + "/proc/meminfo", "MemTotal:  1000 kB\nMemFree: 1 kB\nMemAvailable:   800 kB\n");
  check(memory_bound(root) == 1000 * kib && memory_room(root).available == 800 * kib, "machine");

  // v2: the limit of a parent counts, "max" does not, clean cache counts as available.
  const std::string v2 = root + "/sys/fs/cgroup";
  write(root + "/proc/self/cgroup", "0::/job/step\n");
  write(v2 + "/job/step/memory.max", "max\n");
  write(v2 + "/job/step/memory.current", "5\n");
  write(v2 + "/job/memory.max", std::to_string(500 * kib));
  write(v2 + "/job/memory.current", std::to_string(400 * kib));
  write(v2 + "/job/memory.stat", "anon 7\nactive_file 1024\ninactive_file 51200\n");
  check(memory_bound(root) == 500 * kib, "bound of the parent");
  check(memory_room(root).available == (500 - 400 + 51) * kib, "available in the parent");
  check_contains(memory_room(root).limited_by, "/sys/fs/cgroup/job/");

  // v1 inside a container: the path named is the host's, the limit lies at the mount's root.
  write(root + "/proc/self/cgroup", "5:cpu,cpuacct:/x\n4:memory:/docker/abc\n0::/\n");
  write(v2 + "/memory/memory.limit_in_bytes", std::to_string(300 * kib));
  write(v2 + "/memory/memory.usage_in_bytes", std::to_string(100 * kib));
  check(memory_bound(root) == 300 * kib && memory_room(root).available == 200 * kib, "v1");
}

}  // namespace
}  // namespace tide::test

int main() {
  try {
    tide::test::allocator_fuzz();
    tide::test::arena_contents();
    tide::test::copies_of_any_shape();
    tide::test::memory_limits();
  } catch (const std::exception& error) {
    std::cerr << error.what() << std::endl;
    return 1;
  }
  return 0;
}
