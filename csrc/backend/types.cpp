#include "types.h"

#include <stdexcept>

namespace tide {

const char* to_string(Channel channel) {
  switch (channel) {
    case Channel::all_gather:
      return "all_gather";
    case Channel::reduce_scatter:
      return "reduce_scatter";
    case Channel::all_to_all:
      return "all_to_all";
    case Channel::memory:
      return "memory";
  }
  return "?";
}

const char* to_string(ElementType type) {
  switch (type) {
    case ElementType::bytes:
      return "bytes";
    case ElementType::f32:
      return "float32";
    case ElementType::f64:
      return "float64";
    case ElementType::bf16:
      return "bfloat16";
    case ElementType::i32:
      return "int32";
    case ElementType::i64:
      return "int64";
  }
  return "?";
}

const char* to_string(Reduction reduction) {
  switch (reduction) {
    case Reduction::none:
      return "none";
    case Reduction::sum:
      return "sum";
    case Reduction::min:
      return "min";
    case Reduction::max:
      return "max";
    case Reduction::product:
      return "product";
    case Reduction::other:
      return "other";
  }
  return "?";
}

const char* to_string(Flag flag) {
  switch (flag) {
    case Flag::ready:
      return "ready";
    case Flag::data:
      return "data";
    case Flag::credit:
      return "credit";
  }
  return "?";
}

int64_t element_size(ElementType type) {
  switch (type) {
    case ElementType::bytes:
      return 1;
    case ElementType::bf16:
      return 2;
    case ElementType::f32:
    case ElementType::i32:
      return 4;
    case ElementType::f64:
    case ElementType::i64:
      return 8;
  }
  return 1;
}

}  // namespace tide
