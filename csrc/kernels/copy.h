// Bytes from one CPU buffer to another.
#pragma once

#include <cstddef>
#include <cstdint>

namespace tide {

// The ranges must not overlap.
void copy_bytes(std::byte* to, const std::byte* from, int64_t bytes);

}  // namespace tide
