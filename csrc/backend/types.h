// Vocabulary shared by every stage: operations, channels, element types, flags.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace tide {

// The three collectives tide carries itself. Each is a channel of its own: flags and sequence numbers belong
// to (group, channel, peer), so collectives of different kinds never wait for each other.
// The fourth carries no data: ranks agree on it before they grow their memory together.
enum class Channel : uint8_t { all_gather = 0, reduce_scatter = 1, all_to_all = 2, memory = 3 };
constexpr int kChannels = 4;

// Element types that the reduction understands; everything else moves as bytes.
enum class ElementType : uint8_t { bytes, f32, f64, bf16, i32, i64 };

enum class Reduction : uint8_t { none, sum, min, max, product, other };

// ready:  peer published its window for this call and may be written.
// data:   peer finished chunk `value` of what it sends here.
// credit: peer has consumed chunk `value`, so its buffer may be written again.
enum class Flag : uint8_t { ready = 0, data = 1, credit = 2 };
constexpr int kFlags = 3;

const char* to_string(Channel channel);
const char* to_string(ElementType type);
const char* to_string(Reduction reduction);
const char* to_string(Flag flag);

int64_t element_size(ElementType type);

}  // namespace tide
