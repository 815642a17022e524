// Errors of the inner backend in calls that tide handed down to it: the text and the type stay, and say whose call it
// was.
#pragma once

#include <c10/util/Exception.h>

#include <stdexcept>
#include <string>

#include "error.h"

namespace tide {

// Runs `body`, which calls the inner backend. `context` says whose call it is, and is asked after an error only.
template <typename Context, typename Body>
auto handed_down(Context context, Body body) -> decltype(body()) {
  try {
    return body();
  } catch (const Error&) {
    throw;
  } catch (c10::Error& error) {
    error.add_context(context());
    throw;
  } catch (const std::overflow_error&) {  // with range_error, the two of these that Python has types of its own for
    throw;
  } catch (const std::range_error&) {
    throw;
  } catch (const std::runtime_error& error) {  // gloo's own; RuntimeError in Python, as this is
    throw std::runtime_error(std::string(error.what()) + " (" + context() + ")");
  }
}

}  // namespace tide
