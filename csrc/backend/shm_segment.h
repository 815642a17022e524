// One memfd and its mapping in this process.
#pragma once

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>

#include "fd.h"

namespace tide {

// Why this group cannot share memory; caught in connect_shm, where it becomes the reason every rank reports.
class ShmUnavailable : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// A new memfd of `bytes` bytes without pages, sealed against resizing: a peer that maps it never meets
// SIGBUS.
Fd create_memfd(const std::string& name, int64_t bytes);

// A shared mapping of [0, bytes) of a memfd. It outlives the descriptor.
class Segment {
 public:
  Segment() = default;
  Segment(const Fd& memfd, int64_t bytes);
  Segment(Segment&& other) noexcept;
  Segment& operator=(Segment&& other) noexcept;
  ~Segment();

  std::byte* data() const { return data_; }
  int64_t bytes() const { return bytes_; }

 private:
  std::byte* data_ = nullptr;
  int64_t bytes_ = 0;
};

// Half of `bytes`, again and again, until `count` mappings of that size fit into this process's address space
// (RLIMIT_AS) and a file of that size is allowed (RLIMIT_FSIZE).
int64_t mappable_bytes(int64_t bytes, int count);

}  // namespace tide
