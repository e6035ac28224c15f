// Built against an installed prefix: the header and the library are of one version, and have targets.

#include <xentile_xla.h>

#include <cstdio>
#include <cstring>

int main() {
  std::size_t count = 0;
  const xentile_target* targets = xentile_targets(&count);
  std::printf("xentile_xla %s, %zu targets, the first %s\n", xentile_version(), count,
              count == 0 ? "none" : targets[0].target);
  return count > 0 && std::strcmp(xentile_version(), XENTILE_VERSION) == 0 ? 0 : 1;
}
