// Who may write through NVSwitch multicast: all ranks of a group or none, by what each says when it connects.
//
// Only a user turns it on (TIDE_MULTICAST=1): nothing here makes a multicast object to find out whether that works.
#pragma once

#include <string>
#include <vector>

#include "../transport.h"

namespace tide::cuda {

// What this rank tells the others: whether it asks for multicast and, where it does, why it cannot have it.
std::string multicast_wish(int world, bool asked);

// What that comes to, from the wishes of all ranks, by rank.
Multicast agreed_multicast(const std::vector<std::string>& wishes);

}  // namespace tide::cuda
