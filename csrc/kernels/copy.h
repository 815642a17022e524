// Bytes from one CPU buffer to another.
#pragma once

#include <cstddef>
#include <cstdint>

namespace tide {

// For a target that another core reads next. The ranges must not overlap. Large copies go past the caches where that is
// known to be faster; they are complete when this returns: a flag stored afterwards is seen after them.
void push_bytes(std::byte* to, const std::byte* from, int64_t bytes);

// `rows` times `bytes` bytes, at a pitch of either end.
void push_rows(std::byte* to, const std::byte* from, int64_t rows, int64_t bytes, int64_t to_pitch, int64_t from_pitch);
// For a target that this core reads next.
void copy_rows(std::byte* to, const std::byte* from, int64_t rows, int64_t bytes, int64_t to_pitch, int64_t from_pitch);

}  // namespace tide
