#include "numa.h"

#include <linux/mempolicy.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdint>
#include <fstream>
#include <limits>
#include <sstream>

namespace x86quant::runtime {
namespace {

// The numbers in a list like "0-3,8"; none where it is none.
std::vector<int> numbers_of(const std::string& path) {
  std::vector<int> found;
  std::ifstream file(path);
  for (std::string range; std::getline(file, range, ',');) {
    std::istringstream words(range);
    int first = 0, last = 0;
    char dash = 0;
    if (!(words >> first)) return {};
    if (!(words >> dash >> last)) last = first;
    if (first < 0 || last < first || last >= std::numeric_limits<int16_t>::max()) return {};
    for (int number = first; number <= last; ++number) found.push_back(number);
  }
  return found;
}

// A bit for each node; 0 unless there are several.
uint64_t usable_nodes() {
  cpu_set_t cpus;
  if (sched_getaffinity(0, sizeof(cpus), &cpus) != 0) return 0;  // more of them than the set has bits
  const std::vector<int> nodes = nodes_of(cpus, "/");
  uint64_t mask = 0;
  for (const int node : nodes)
    if (node < 64) mask |= uint64_t{1} << node;
  return nodes.size() > 1 ? mask : 0;
}

}  // namespace

std::vector<int> nodes_of(const cpu_set_t& cpus, const std::string& root) {
  const std::string folder = root + "/sys/devices/system/node/";
  std::vector<int> found;
  for (const int node : numbers_of(folder + "online"))
    for (const int cpu : numbers_of(folder + "node" + std::to_string(node) + "/cpulist"))
      if (cpu < CPU_SETSIZE && CPU_ISSET(cpu, &cpus)) {
        found.push_back(node);
        break;
      }
  return found;
}

void spread_over_nodes(void* memory, size_t size) {
  static const uint64_t nodes = usable_nodes();
  if (nodes == 0) return;
  const auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  const uintptr_t first = reinterpret_cast<uintptr_t>(memory) & ~(page - 1);
  const uintptr_t last = reinterpret_cast<uintptr_t>(memory) + size;
  constexpr unsigned long kBits = 64 + 1;  // Linux counts one more than it reads
  (void)syscall(SYS_mbind, first, last - first, MPOL_INTERLEAVE, &nodes, kBits, 0UL);
}

}  // namespace x86quant::runtime
