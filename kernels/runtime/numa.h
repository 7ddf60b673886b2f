// Machines whose memory belongs to nodes: each core reads its own node's fastest, and no node's is fast enough for all cores.
#pragma once

#include <sched.h>

#include <cstddef>
#include <string>
#include <vector>

namespace x86quant::runtime {

// The nodes that `cpus` belong to, of the system whose files are below `root`; none where it tells of none.
std::vector<int> nodes_of(const cpu_set_t& cpus, const std::string& root);

// Asks for the pages of `memory`, which nobody has touched, in turn from each node whose cores this process may use. Does
// nothing on machines of one node, and where the system does not let it.
void spread_over_nodes(void* memory, size_t size);

}  // namespace x86quant::runtime
