// How ranks of a group find each other before they share memory: a few small strings through the group's store.
#pragma once

#include <functional>
#include <string>

namespace tide {

class Bootstrap {
 public:
  virtual ~Bootstrap() = default;
  virtual void set(const std::string& key, const std::string& value) = 0;
  // Blocks until the key is there; throws after the store's own timeout.
  virtual std::string get(const std::string& key) = 0;
  // The same; where it can, it calls `tick` several times a second while it waits. What that throws passes through.
  virtual std::string await(const std::string& key, const std::function<void()>& tick) {
    (void)tick;
    return get(key);
  }
  // Whether the key is there already, without blocking. Only shortens waits for a rank that has failed: false is
  // right too where it cannot be told.
  virtual bool has(const std::string& key) {
    (void)key;
    return false;
  }
};

}  // namespace tide
