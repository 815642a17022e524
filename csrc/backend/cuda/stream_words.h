// Flag words that streams write and wait for, given to the driver together where it takes several: with eight ranks a
// call has dozens of them.
#pragma once

#include <vector>

#include "driver.h"

namespace tide::cuda {

struct StreamWord {
  Stream stream;
  DevicePtr word;
  uint64_t value;
  bool wait;  // else a write
};

// The index behind the first words, from `first` on, that one call of the driver can take: those of one stream.
size_t end_of_run(const std::vector<StreamWord>& words, size_t first);

// Gives [first, end), a run, to its stream. Throws Error(driver). May block while the driver's queue is full.
void give(const std::vector<StreamWord>& words, size_t first, size_t end);

}  // namespace tide::cuda
