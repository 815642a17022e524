#include "fork_guard.h"

#include <pthread.h>

#include <atomic>

namespace tide {
namespace {

std::atomic<uint64_t> fork_generation{0};

void count_fork() { fork_generation.fetch_add(1, std::memory_order_relaxed); }

}  // namespace

ForkGuard::ForkGuard() {
  static const int registered = pthread_atfork(nullptr, nullptr, count_fork);
  (void)registered;  // fails only with ENOMEM; then a child is as it would be without the guard
  generation_ = fork_generation.load(std::memory_order_relaxed);
}

bool ForkGuard::in_child() const { return fork_generation.load(std::memory_order_relaxed) != generation_; }

}  // namespace tide
