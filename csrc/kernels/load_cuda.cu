#include "load_cuda.h"

namespace tide {

void load_kernels() {
  load_accumulate_kernels();
  load_cast_kernel();
  load_place_kernel();
}

}  // namespace tide
