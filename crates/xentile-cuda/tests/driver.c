/* A driver without a GPU: what tests have the library open in the place of NVIDIA's. The environment
 * configures it. It prints every launch, or has host.c compute it where that is linked. */

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct {
  unsigned grid[3], block[3], shared;
  void* stream;
  struct {
    unsigned id, pad, value[16];
  }* attributes;
  unsigned count;
} Config;

static int setting(const char* name, int otherwise) {
  const char* value = getenv(name);
  return value ? atoi(value) : otherwise;
}

int compute(const char* kernel, const void* arguments, unsigned grid_rows) __attribute__((weak));

static char kernels[64][64];
static int pushed, loaded;

int cuDriverGetVersion(int* version) { return *version = setting("FAKE_VERSION", 13000), 0; }
int cuInit(unsigned flags) { return flags == 0 && setting("FAKE_DEVICES", 2) > 0 ? 0 : 100; }
int cuDeviceGetCount(int* count) { return *count = setting("FAKE_DEVICES", 2), 0; }
int cuGetErrorName(int code, const char** text) { return (void)code, *text = "CUDA_ERROR_FAKE", 0; }
int cuGetErrorString(int code, const char** text) { return (void)code, *text = "as requested", 0; }
int cuDeviceGetName(char* name, int size, int device) {
  return snprintf(name, size, "fake %d", device), 0;
}
int cuDeviceGetAttribute(int* value, unsigned attribute, int device) {
  (void)device;
  const int capability = setting("FAKE_CAPABILITY", 90);
  *value = attribute == 16 ? setting("FAKE_MULTIPROCESSORS", 132) : attribute == 75 ? capability / 10 : attribute == 76 ? capability % 10
           : attribute == 97 ? setting("FAKE_SHARED", 232448) : attribute == 120 ? capability >= 90 : -1;
  return *value < 0;
}
int cuCtxPushCurrent_v2(void* context) { return ++pushed, context == NULL; }
int cuCtxPopCurrent_v2(void** context) { return *context = NULL, --pushed, 0; }
int cuStreamGetCtx(void* stream, void** context) { return *context = stream, 0; }
int cuCtxGetDevice(int* device) { return *device = setting("FAKE_CURRENT", 0), 0; }
int cuLibraryLoadData(void** library, const void* code, void* a, void* b, unsigned c, void* d, void* e,
                      unsigned f) {
  printf("library %d\n", !a && !b && !c && !d && !e && !f && (size_t)code % 8 == 0);
  unsigned magic;
  memcpy(&magic, code, sizeof magic);
  return *library = (void*)7, magic != 0xba55ed50u;
}
int cuLibraryGetKernel(void** kernel, void* library, const char* name) {
  int i = 1;
  while (kernels[i][0] && strcmp(kernels[i], name)) ++i;
  strcpy(kernels[i], name);
  return *kernel = kernels[i], library != (void*)7;
}
int cuKernelGetFunction(void** function, void* kernel) { return *function = kernel, pushed != 1; }
int cuFuncLoad(void* function) { return ++loaded, function == NULL; }
int cuKernelGetAttribute(int* value, unsigned attribute, void* kernel, int device) {
  return (void)kernel, (void)device, *value = 48, attribute != 1;
}
int cuKernelSetAttribute(unsigned attribute, int value, void* kernel, int device) {
  (void)kernel, (void)device;
  return attribute == 14 ? value != 1 : attribute != 8 || value != setting("FAKE_SHARED", 232448) - 48;
}
int cuOccupancyMaxActiveClusters(int* clusters, void* kernel, const Config* config) {
  (void)kernel;
  if (config->count != 1 || config->attributes->id != 4) return 1;
  return *clusters = setting("FAKE_CLUSTERS", 132 / (int)config->attributes->value[0]), 0;
}
int cuMemcpyDtoDAsync_v2(size_t to, size_t from, size_t bytes, void* stream) {
  if (compute) return memcpy((void*)to, (void*)from, bytes), 0;
  return printf("copy %zu bytes from %zx to %zx stream %zu\n", bytes, from, to, (size_t)stream), 0;
}
int cuMemsetD8Async(size_t to, unsigned char value, size_t bytes, void* stream) {
  if (compute) return memset((void*)to, value, bytes), 0;
  return printf("fill %zu bytes from %zx with %d stream %zu\n", bytes, to, value, (size_t)stream), 0;
}
int cuTensorMapEncodeTiled(void* map, unsigned dtype, unsigned rank, void* at, const size_t* extents,
                           const size_t* strides, const unsigned* box, const unsigned* steps,
                           unsigned interleave, unsigned swizzle, unsigned promotion, unsigned fill) {
  memset(map, 0, 128);
  memcpy(map, &at, sizeof at);
  memcpy((char*)map + 8, extents, 16);
  memcpy((char*)map + 24, strides, 8);
  printf("tensor %p dtype %u extents %zu %zu", at, dtype, extents[0], extents[1]);
  if (rank == 3) printf(" %zu", extents[2]);
  printf(" stride %zu box %u %u\n", strides[0], box[0], box[1]);
  return (size_t)map % 64 || rank < 2 || rank > 3 || steps[0] != 1 || steps[1] != 1 || interleave ||
         swizzle != 3 || promotion != 3 || fill;
}
int cuLaunchKernelEx(const Config* config, void* kernel, void** parameters, void** extra) {
  if (compute) return compute(kernel, parameters[0], config->grid[1]);
  if (config->grid[1] * config->grid[2] * config->block[1] * config->block[2] != 1 || extra) return 1;
  if (setting("FAKE_FAILURE", 0)) return setting("FAKE_FAILURE", 0);
  const unsigned cluster = config->count ? config->attributes->value[0] : 0;
  const int is_early = config->count == 2 && config->attributes[1].id == 6;
  const int is_cooperative = config->count == 1 && config->attributes->id == 2;
  printf("launch %s stream %zu grid %u block %u shared %u cluster %u first %p loads %d%s%s\n",
         (const char*)kernel, (size_t)config->stream, config->grid[0], config->block[0],
         config->shared, cluster, *(void**)parameters[0], loaded, is_cooperative ? " cooperative" : "",
         is_early ? " early" : "");
  fflush(stdout);
  return 0;
}
