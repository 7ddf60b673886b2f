#include "quota.h"

#include <cstdlib>
#include <fstream>
#include <sstream>

namespace x86quant::serving {
namespace {

std::string first_line(const std::string& path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  return line;
}

// Microseconds of CPU time over microseconds; "max", -1 and senseless values are no limit.
double cpus(const std::string& quota, const std::string& period) {
  const double time = std::atof(quota.c_str()), of = std::atof(period.c_str());
  return time > 0 && of > 0 ? time / of : 0;
}

// Of the group's folder, in either version of control groups.
double limit(const std::string& folder, bool second) {
  if (!second) return cpus(first_line(folder + "/cpu.cfs_quota_us"), first_line(folder + "/cpu.cfs_period_us"));
  std::istringstream both(first_line(folder + "/cpu.max"));
  std::string quota, period;
  both >> quota >> period;
  return cpus(quota, period);
}

// The least of the limits that are some; 0 without any.
class Least {
 public:
  void add(double limit) {
    if (limit > 0 && (found_ == 0 || limit < found_)) found_ = limit;
  }
  double found() const { return found_; }

 private:
  double found_ = 0;
};

// Adds the limits of a group and of those around it. Inside a container a group's name may be that of the host, which
// is not mounted there: its files are then those of `base`.
void add_upwards(Least& least, const std::string& base, std::string group, bool second) {
  if (group.find("..") == std::string::npos)
    for (; group.size() > 1; group.resize(group.rfind('/'))) least.add(limit(base + group, second));
  least.add(limit(base, second));
}

}  // namespace

double cpu_quota(const std::string& root) {
  std::ifstream groups(root + "/proc/self/cgroup");
  const std::string mounted = root + "/sys/fs/cgroup";
  Least least;
  for (std::string line; std::getline(groups, line);) {  // number:controllers:group
    const size_t first = line.find(':'), second = line.find(':', first + 1);
    if (first == std::string::npos || second == std::string::npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1), group = line.substr(second + 1);
    if (group.empty() || group[0] != '/') continue;
    if (controllers.empty()) {
      add_upwards(least, mounted, group, true);
    } else if (("," + controllers + ",").find(",cpu,") != std::string::npos) {
      for (const std::string& name : {controllers, std::string("cpu")})
        add_upwards(least, mounted + "/" + name, group, false);
    }
  }
  return least.found();
}

}  // namespace x86quant::serving
