#include "shm_segment.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>

#include "error.h"

namespace tide {
namespace {

constexpr unsigned int kNoExecSeal = 0x8;  // MFD_NOEXEC_SEAL: Linux 6.3; some systems refuse memfds without it
constexpr int64_t kSmallestArena = int64_t{16} << 20;
constexpr int64_t kLargestArena = int64_t{1} << 44;
constexpr int64_t kPage = 4096;

}  // namespace

Fd create_memfd(const std::string& name, int64_t bytes) {
  Fd memfd(memfd_create(name.c_str(), MFD_CLOEXEC | MFD_ALLOW_SEALING | kNoExecSeal));
  if (!memfd && errno == EINVAL) memfd = Fd(memfd_create(name.c_str(), MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!memfd) throw ShmUnavailable(errno_text("memfd_create", errno));
  if (ftruncate(memfd.get(), bytes) != 0)
    throw ShmUnavailable(errno_text("ftruncate to " + std::to_string(bytes) + " bytes", errno));
  if (fcntl(memfd.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0)
    throw ShmUnavailable(errno_text("fcntl(F_ADD_SEALS)", errno));
  return memfd;
}

Segment::Segment(const Fd& memfd, int64_t bytes) : bytes_(bytes) {
  struct stat status{};
  if (fstat(memfd.get(), &status) != 0) throw ShmUnavailable(errno_text("fstat of a memfd", errno));
  const int seals = fcntl(memfd.get(), F_GET_SEALS);
  if (status.st_size < bytes || seals < 0 || (seals & F_SEAL_SHRINK) == 0)
    throw ShmUnavailable("a segment is not a sealed memfd of " + std::to_string(bytes) + " bytes; got " +
                         std::to_string(status.st_size) + " bytes, seals " + std::to_string(seals));
  void* address =
      mmap(nullptr, static_cast<size_t>(bytes), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, memfd.get(), 0);
  if (address == MAP_FAILED) throw ShmUnavailable(errno_text("mmap of " + std::to_string(bytes) + " bytes", errno));
  data_ = static_cast<std::byte*>(address);
}

Segment::Segment(Segment&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}

Segment& Segment::operator=(Segment&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(bytes_, other.bytes_);
  return *this;
}

Segment::~Segment() {
  if (data_ != nullptr) munmap(data_, static_cast<size_t>(bytes_));
}

int64_t mappable_bytes(int64_t bytes, int count) {
  bytes = std::clamp(bytes, kPage, kLargestArena);
  rlimit limit{};
  // A file beyond RLIMIT_FSIZE is not only refused: the process gets SIGXFSZ.
  if (getrlimit(RLIMIT_FSIZE, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY)
    bytes = std::min(bytes, static_cast<int64_t>(limit.rlim_cur));
  while (bytes > kSmallestArena) {
    const size_t all = static_cast<size_t>(bytes) * static_cast<size_t>(count);
    void* address = mmap(nullptr, all, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (address != MAP_FAILED) {
      munmap(address, all);
      break;
    }
    bytes /= 2;
  }
  return std::max(kPage, bytes / kPage * kPage);
}

}  // namespace tide
