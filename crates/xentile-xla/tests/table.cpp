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

struct Expected {
  const char* target;
  const char* platform;
  uint32_t stage;
  const char* symbol;
  xentile_handler handler;
};

// As XLA numbers them.
constexpr uint32_t kInitialize = 2;
constexpr uint32_t kExecute = 3;

#define HOST(name) {"xentile_" #name, "Host", kExecute, "xentile_" #name "_host", xentile_##name##_host}
#define CUDA(name)                                                                           \
  {"xentile_" #name, "CUDA", kInitialize, "xentile_" #name "_cuda_initialize",               \
   xentile_##name##_cuda_initialize},                                                        \
  EXECUTE(name)
#define EXECUTE(name) \
  {"xentile_" #name, "CUDA", kExecute, "xentile_" #name "_cuda", xentile_##name##_cuda}

const Expected kExpected[] = {
    HOST(cross_entropy_forward),
    HOST(cross_entropy_backward),
    HOST(cross_entropy_fused),
    HOST(scale),
    HOST(linear_cross_entropy_forward),
    HOST(linear_cross_entropy_backward),
    HOST(linear_cross_entropy_fused),
    HOST(linear_cross_entropy_keep),
    HOST(linear_cross_entropy_resume),
// Of a library that was built with them.
#ifdef XENTILE_CUDA
    CUDA(cross_entropy_forward),
    CUDA(cross_entropy_backward),
    CUDA(cross_entropy_fused),
    CUDA(scale),
    EXECUTE(linear_cross_entropy_forward),
    EXECUTE(linear_cross_entropy_backward),
    EXECUTE(linear_cross_entropy_fused),
    EXECUTE(linear_cross_entropy_add),
#endif
};

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
  Check(count == sizeof(kExpected) / sizeof(kExpected[0]), "the number of targets", "table");
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
    for (const Expected& right : kExpected) {
      expected |= std::strcmp(right.target, target.target) == 0 &&
                  std::strcmp(right.platform, target.platform) == 0 &&
                  right.stage == target.stage && std::strcmp(right.symbol, target.symbol) == 0 &&
                  right.handler == target.handler;
    }
    Check(expected, "not an expected target", where);
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
