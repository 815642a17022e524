// Bytes from one CPU buffer to another.
#pragma once

#include <cstddef>
#include <cstdint>

namespace tide {

// The ranges must not overlap. Complete when it returns: what is stored to another word afterwards (a flag)
// is seen by other cores after the copy, also where the copy went past the caches.
void copy_bytes(std::byte* to, const std::byte* from, int64_t bytes);

}  // namespace tide
