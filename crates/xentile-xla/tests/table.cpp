// The header and the library from C++, without XLA: the table is walked and checked.

#include "xentile_xla.h"

#include <dlfcn.h>

#include <cstddef>
#include <cstdio>
#include <cstring>
#include <set>
#include <string>

namespace {

int failures = 0;

void Check(bool right, const char* what, const char* where) {
  if (!right) {
    std::printf("%s: %s\n", where, what);
    ++failures;
  }
}

struct Handler {
  const char* symbol;
  xentile_handler handler;
};

// Those that the header declares, each as `HANDLER(symbol)`: the test writes this file from it.
#define HANDLER(symbol) {#symbol, symbol},
const Handler kHandlers[] = {
#include "handlers.inc"
};

// What a symbol's end says of a handler, the longer of two first; stages as XLA numbers them.
struct Kind {
  const char* suffix;
  const char* platform;
  uint32_t stage;
};

constexpr Kind kKinds[] = {
    {"_cuda_initialize", "CUDA", 2},
    {"_cuda", "CUDA", 3},
    {"_host", "Host", 3},
};

// Whether `target` is the row of the table that `handler` should have.
bool IsRowOf(const xentile_target& target, const Handler& handler) {
  const std::string symbol = handler.symbol;
  for (const Kind& kind : kKinds) {
    const std::string suffix = kind.suffix;
    if (symbol.size() > suffix.size() &&
        symbol.compare(symbol.size() - suffix.size(), suffix.size(), suffix) == 0) {
      return target.target == symbol.substr(0, symbol.size() - suffix.size()) &&
             std::strcmp(target.platform, kind.platform) == 0 && target.stage == kind.stage &&
             target.symbol == symbol && target.handler == handler.handler;
    }
  }
  return false;
}

void CheckVersions() {
  const char* where = "versions";
  Check(std::strcmp(xentile_version(), XENTILE_VERSION) == 0, "xentile_version", where);
  Check(xentile_table_version() == XENTILE_TABLE_VERSION, "xentile_table_version", where);
  int32_t major = -1, minor = -1;
  xentile_ffi_version(&major, &minor);
  Check(major == XENTILE_FFI_VERSION_MAJOR && minor == XENTILE_FFI_VERSION_MINOR,
        "xentile_ffi_version", where);
  major = minor = -1;
  xentile_ffi_version(&major, nullptr);
  xentile_ffi_version(nullptr, &minor);
  xentile_ffi_version(nullptr, nullptr);
  Check(major == XENTILE_FFI_VERSION_MAJOR && minor == XENTILE_FFI_VERSION_MINOR,
        "xentile_ffi_version with null", where);
}

void CheckTable() {
  std::size_t count = 0;
  const xentile_target* targets = xentile_targets(&count);
  Check(xentile_targets(nullptr) == targets, "the table moved", "table");
  Check(count == sizeof(kHandlers) / sizeof(kHandlers[0]), "the number of targets", "table");
  std::set<std::string> seen;
  for (std::size_t i = 0; i < count; ++i) {
    const xentile_target& target = targets[i];
    if (!target.target || !target.platform || !target.symbol || !target.handler) {
      Check(false, "a null pointer", "table");
      continue;
    }
    const char* where = target.symbol;
    Check(target.struct_size == sizeof(xentile_target), "struct_size", where);
    void* found = dlsym(RTLD_DEFAULT, target.symbol);
    Check(found == reinterpret_cast<void*>(target.handler), "not what dlsym finds", where);
    std::string key =
        std::string(target.target) + " " + target.platform + " " + std::to_string(target.stage);
    Check(seen.insert(key).second, "registered twice", where);
    bool expected = false;
    for (const Handler& handler : kHandlers) {
      expected |= IsRowOf(target, handler);
    }
    Check(expected, "not a handler of the header", where);
  }
}

void CheckIsa() {
  const std::set<std::string> names = {"amx_bf16", "avx512_bf16", "avx512",
                                       "avx2",     "neon",        "portable"};
  Check(names.count(xentile_cpu_isa()) == 1, xentile_cpu_isa(), "xentile_cpu_isa");
}

void CheckTunedTile() {
  const char* where = "xentile_tuned_tile";
  const char* table = "linear_cross_entropy.cpu";
  std::size_t rows = 0, columns = 0;
  Check(xentile_tuned_tile(table, "bf16", 50257, &rows, &columns) == 1, "none", where);
  Check(rows > 0 && columns > 0, "an extent of 0", where);
  Check(xentile_tuned_tile(table, "bf16", 50257, nullptr, nullptr) == 1, "none with null", where);
  rows = columns = 7;
  Check(xentile_tuned_tile(table, "f64", 50257, &rows, &columns) == 0, "one for f64", where);
  Check(xentile_tuned_tile("no_such.cpu", "f32", 1, &rows, &columns) == 0, "one of none", where);
  where = "xentile_prefers_xla";
  Check(xentile_prefers_xla("cuda", "activation", "relu single") == 1, "not there", where);
  Check(xentile_prefers_xla("cuda", "rms_norm", "") == 0, "of a kernel", where);
  Check(xentile_prefers_xla("no_such", "activation", "relu single") == 0, "of none", where);
  Check(rows == 7 && columns == 7, "it wrote what is not there", where);
}

}  // namespace

int main() {
  CheckVersions();
  CheckTable();
  CheckIsa();
  CheckTunedTile();
  std::printf("%d failures\n", failures);
  return failures == 0 ? 0 : 1;
}
