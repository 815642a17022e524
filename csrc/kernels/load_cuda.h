// CUDA loads a kernel at its first launch, and for that it may wait until the device is idle. Behind a wait for a peer
// that is for ever, with the driver's lock held: tide's kernels are loaded before any wait is on a stream.
#pragma once

namespace tide {

// On the current device. Nothing in a build without CUDA. Throws Error(driver).
void load_kernels();

void load_accumulate_kernels();
void load_cast_kernel();
void load_place_kernel();
void load_small_copies_kernel();

}  // namespace tide
