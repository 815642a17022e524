#include "load_cuda.h"

namespace tide {

void load_kernels() {
  load_accumulate_kernels();
  load_cast_kernel();
  load_place_kernel();
  load_small_copies_kernel();
}

}  // namespace tide
