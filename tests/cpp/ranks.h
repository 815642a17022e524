// Ranks as forked processes, and what the tests of both transports share.
#pragma once

#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iostream>
#include <map>
#include <sstream>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "../../csrc/backend/bootstrap.h"
#include "../../csrc/backend/error.h"
#include "../../csrc/backend/transport.h"

namespace tide::test {

using namespace std::chrono_literals;

inline void check(bool holds, const std::string& what) {
  if (!holds) throw std::runtime_error("check failed: " + what);
}

inline double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

inline Wait within(std::chrono::milliseconds time, const std::string& call = "all_gather #1") {
  return Wait{Clock::now() + time, nullptr, call};
}

// A store made of files; a key appears by rename, so it is never seen half-written.
class FileBootstrap : public Bootstrap {
 public:
  FileBootstrap(std::string directory, std::chrono::milliseconds timeout)
      : directory_(std::move(directory)), timeout_(timeout) {}

  void set(const std::string& key, const std::string& value) override {
    const std::string temporary = path(key) + ".tmp" + std::to_string(gettid());
    std::ofstream(temporary) << value;
    std::filesystem::rename(temporary, path(key));
  }

  std::string get(const std::string& key) override {
    const auto start = Clock::now();
    while (!has(key)) {
      if (Clock::now() - start > timeout_) throw std::runtime_error("no key " + key);
      std::this_thread::sleep_for(200us);
    }
    std::ostringstream text;
    text << std::ifstream(path(key)).rdbuf();
    return text.str();
  }

  bool has(const std::string& key) override { return std::filesystem::exists(path(key)); }

  std::string await(const std::string& key, const std::function<void()>& tick) override {
    const auto start = Clock::now();
    while (!has(key)) {
      if (Clock::now() - start > timeout_) throw std::runtime_error("no key " + key);
      tick();
      std::this_thread::sleep_for(1ms);
    }
    return get(key);
  }

 private:
  std::string path(std::string key) const {
    for (char& c : key)
      if (c == '/') c = '_';
    return directory_ + "/" + key;
  }

  const std::string directory_;
  const std::chrono::milliseconds timeout_;
};

class TemporaryDirectory {
 public:
  TemporaryDirectory() {
    char name[] = "/tmp/tide-test-XXXXXX";
    if (mkdtemp(name) == nullptr) throw std::runtime_error("mkdtemp");
    path_ = name;
  }
  ~TemporaryDirectory() { std::filesystem::remove_all(path_); }
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

// One forked rank. `body` returns normally or throws; anything thrown is printed and fails the rank.
inline pid_t start_rank(int rank, const std::function<void()>& body) {
  std::cout.flush();
  const pid_t pid = fork();
  if (pid != 0) return pid;
  int code = 0;
  try {
    body();
  } catch (const std::exception& error) {
    std::cerr << "rank " << rank << ": " << error.what() << std::endl;
    code = 1;
  }
  std::cout.flush();
  _exit(code);
}

// Exit code, or minus the signal; kills the process and throws after `time`.
inline int wait_rank(pid_t pid, std::chrono::milliseconds time) {
  const auto start = Clock::now();
  int status = 0;
  while (waitpid(pid, &status, WNOHANG) == 0) {
    if (Clock::now() - start > time) {
      kill(pid, SIGKILL);
      waitpid(pid, &status, 0);
      throw std::runtime_error("a rank hangs");
    }
    std::this_thread::sleep_for(1ms);
  }
  return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
}

// Runs body(rank, directory) in `world` processes; all must end well within a minute.
inline void run_ranks(int world, const std::function<void(int, const std::string&)>& body) {
  const TemporaryDirectory directory;
  std::vector<pid_t> pids;
  for (int rank = 0; rank < world; ++rank)
    pids.push_back(start_rank(rank, [&, rank] { body(rank, directory.path()); }));
  bool good = true;
  for (const pid_t pid : pids) good &= wait_rank(pid, 60s) == 0;
  check(good, "every rank ends well");
}

// The error that `body` must throw.
inline Error caught(const std::function<void()>& body) {
  try {
    body();
  } catch (const Error& error) {
    return error;
  }
  throw std::runtime_error("expected an error, got none");
}

inline void check_contains(const std::string& text, const std::string& part) {
  check(text.find(part) != std::string::npos, "\"" + part + "\" in \"" + text + "\"");
}

// A test program: runs the case that its one argument names, or lists all of them. Returns the exit code.
inline int run_case(const std::map<std::string, void (*)()>& cases, int argc, char** argv) {
  const std::string name = argc == 2 ? argv[1] : "";
  const auto found = cases.find(name);
  if (found == cases.end()) {
    for (const auto& [known, body] : cases) std::cout << known << "\n";
    return name == "--list" ? 0 : 2;
  }
  try {
    found->second();
  } catch (const std::exception& error) {
    std::cerr << name << ": " << error.what() << std::endl;
    return 1;
  }
  return 0;
}

}  // namespace tide::test
