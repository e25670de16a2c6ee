/* A libnvidia-ml.so.1 for tests: NVML's C interface over a text file, read anew at each call.
 *
 * NVML_STUB names the file. A line is "KEY VALUE", or "GPU.KEY VALUE" for one GPU, which wins; a VALUE "!CODE" fails with
 * that nvmlReturn_t. A key that stands nowhere is not supported. BRANCH (525, 535, 550, 570, 580) is set when compiled: it
 * decides which symbols the library has, which versions of structures it takes and which field values it knows.
 * Source: nvidia-ml-py 11.525.150, 12.535.161, 12.550.89, 12.570.172 and 13.580.82, each made from its branch's nvml.h.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { SUCCESS, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, TOO_SMALL = 7, DRIVER_NOT_LOADED = 9, LOST = 15,
       VERSION_MISMATCH = 25 };
enum { MOST_GPUS = 16, UINT = 1, ULLONG = 3 };
typedef unsigned int uint;
typedef unsigned long long ull;
typedef struct { int number, slice; } Gpu;
static Gpu gpus[MOST_GPUS], slices[MOST_GPUS];

static int line_of(const char *wanted, char *value) {
  char key[128], line[256];
  int found = 0;
  FILE *file = fopen(getenv("NVML_STUB") ? getenv("NVML_STUB") : "", "r");
  if (!file) return 0;
  while (fgets(line, sizeof line, file))
    if (sscanf(line, "%127s %127[^\n]", key, value) == 2 && !strcmp(key, wanted)) { found = 1; break; }
  fclose(file);
  return found;
}

/* Look a key up for a GPU; the value is text of at most 128 bytes. */
static int look(const Gpu *gpu, const char *key, char *value) {
  char own[160];
  if (gpu) {
    snprintf(own, sizeof own, "%d.lost", gpu->number);
    if (line_of(own, value)) return LOST;
    snprintf(own, sizeof own, "%d.%s%s", gpu->number, gpu->slice ? "slice." : "", key);
  }
  if (!(gpu && line_of(own, value)) && !line_of(key, value)) return NOT_SUPPORTED;
  return value[0] == '!' ? atoi(value + 1) : SUCCESS;
}
static int number(const Gpu *gpu, const char *key, ull *out) {
  char value[128];
  int code = look(gpu, key, value);
  if (code == SUCCESS) *out = strtoull(value, 0, 0);
  return code;
}
static int number32(const Gpu *gpu, const char *key, uint *out) {
  ull value = 0;
  int code = number(gpu, key, &value);
  if (code == SUCCESS) *out = (uint)value;
  return code;
}
static int words(const Gpu *gpu, const char *key, char *out, uint length) {
  char value[128];
  int code = look(gpu, key, value);
  if (code != SUCCESS) return code;
  return snprintf(out, length, "%s", value) < (int)length ? SUCCESS : TOO_SMALL;
}

#define TEXT(name, key) int name(Gpu *gpu, char *out, uint length) { return words(gpu, key, out, length); }
#define NUMBER(name, key) int name(Gpu *gpu, uint *out) { return number32(gpu, key, out); }
#define BY_KIND(name, key) int name(Gpu *gpu, uint kind, uint *out) { \
  char text[64]; snprintf(text, sizeof text, key ".%u", kind); return number32(gpu, text, out); }
#define TWO(name, key) int name(Gpu *gpu, uint *now, uint *pending) { *pending = 0; return number32(gpu, key, now); }

int nvmlInitWithFlags(uint flags) {
  uint count = 0;
  (void)flags;
  for (int i = 0; i < MOST_GPUS; i++) { gpus[i].number = slices[i].number = i; slices[i].slice = 1; }
  return number32(0, "gpus", &count) == SUCCESS ? SUCCESS : DRIVER_NOT_LOADED;
}
int nvmlShutdown(void) { return SUCCESS; }
const char *nvmlErrorString(int code) { static char text[32]; snprintf(text, sizeof text, "error %d", code); return text; }
int nvmlSystemGetDriverVersion(char *out, uint length) { return words(0, "driver", out, length); }
int nvmlSystemGetCudaDriverVersion_v2(int *out) { return number32(0, "cuda", (uint *)out); }
int nvmlDeviceGetCount_v2(uint *out) { return number32(0, "gpus", out); }
int nvmlDeviceGetHandleByIndex_v2(uint index, Gpu **out) {
  uint count = 0, code = 0;
  char key[32];
  nvmlDeviceGetCount_v2(&count);
  if (index >= count) return INVALID_ARGUMENT;
  snprintf(key, sizeof key, "%u.handle", index);
  if (number32(0, key, &code) != NOT_SUPPORTED) return number32(0, key, &code);
  *out = &gpus[index];
  return look(*out, "uuid", key) == LOST ? LOST : SUCCESS;
}
int nvmlDeviceGetHandleByUUID(const char *uuid, Gpu **out) {
  uint count = 0, any_lost = 0;
  char value[128];
  nvmlDeviceGetCount_v2(&count);
  for (uint i = 0; i < count; i++) any_lost |= look(&gpus[i], "uuid", value) == LOST;
  if (any_lost) return LOST; /* the driver refuses the search while any GPU is lost */
  for (uint i = 0; i < 2 * count; i++) {
    *out = i < count ? &gpus[i] : &slices[i - count];
    if (look(*out, "uuid", value) == SUCCESS && !strcmp(value, uuid)) return SUCCESS;
  }
  return NOT_FOUND;
}
int nvmlDeviceGetDeviceHandleFromMigDeviceHandle(Gpu *slice, Gpu **out) { *out = &gpus[slice->number]; return SUCCESS; }
int nvmlDeviceGetIndex(Gpu *gpu, uint *out) { *out = (uint)gpu->number; return SUCCESS; }

TEXT(nvmlDeviceGetUUID, "uuid")
TEXT(nvmlDeviceGetName, "name")
TEXT(nvmlDeviceGetSerial, "serial")
TEXT(nvmlDeviceGetVbiosVersion, "vbios")
TEXT(nvmlDeviceGetBoardPartNumber, "part")
TEXT(nvmlDeviceGetInforomImageVersion, "inforom")
int nvmlDeviceGetGspFirmwareVersion(Gpu *gpu, char *out) { return words(gpu, "gsp", out, 64); }
TWO(nvmlDeviceGetEccMode, "ecc")
TWO(nvmlDeviceGetMigMode, "mig")
NUMBER(nvmlDeviceGetRetiredPagesPendingStatus, "pages")
NUMBER(nvmlDeviceGetPowerUsage, "power")
NUMBER(nvmlDeviceGetEnforcedPowerLimit, "power.limit")
NUMBER(nvmlDeviceGetPowerManagementDefaultLimit, "power.default")
NUMBER(nvmlDeviceGetCurrPcieLinkGeneration, "pcie.generation")
NUMBER(nvmlDeviceGetCurrPcieLinkWidth, "pcie.width")
NUMBER(nvmlDeviceGetMaxPcieLinkGeneration, "pcie.generation.max")
NUMBER(nvmlDeviceGetMaxPcieLinkWidth, "pcie.width.max")
NUMBER(nvmlDeviceGetPcieReplayCounter, "pcie.replays")
NUMBER(nvmlDeviceGetPersistenceMode, "persistence")
BY_KIND(nvmlDeviceGetClockInfo, "clock")
BY_KIND(nvmlDeviceGetMaxClockInfo, "clock.max")
BY_KIND(nvmlDeviceGetTemperature, "temperature")
BY_KIND(nvmlDeviceGetTemperatureThreshold, "threshold")
BY_KIND(nvmlDeviceGetNvLinkState, "link")
BY_KIND(nvmlDeviceGetNvLinkVersion, "link.version")
BY_KIND(nvmlDeviceGetNvLinkRemoteDeviceType, "link.end")
int nvmlDeviceGetCurrentClocksThrottleReasons(Gpu *gpu, ull *out) { return number(gpu, "throttle", out); }
#if BRANCH >= 535
int nvmlDeviceGetCurrentClocksEventReasons(Gpu *gpu, ull *out) { return number(gpu, "throttle", out); }
#endif
int nvmlDeviceGetTotalEccErrors(Gpu *gpu, int kind, int counter, ull *out) {
  char key[32];
  snprintf(key, sizeof key, "ecc.%s.%s", kind ? "uncorrected" : "corrected", counter ? "aggregate" : "volatile");
  return number(gpu, key, out);
}
int nvmlDeviceGetRemappedRows(Gpu *gpu, uint *corrected, uint *uncorrected, uint *pending, uint *failed) {
  int code = number32(gpu, "rows.corrected", corrected);
  if (code == SUCCESS) code = number32(gpu, "rows.uncorrected", uncorrected);
  if (code == SUCCESS) code = number32(gpu, "rows.pending", pending);
  return code == SUCCESS ? number32(gpu, "rows.failed", failed) : code;
}
int nvmlDeviceGetUtilizationRates(Gpu *gpu, uint rates[2]) { rates[1] = 0; return number32(gpu, "utilization", rates); }
int nvmlDeviceGetTopologyCommonAncestor(Gpu *one, Gpu *other, uint *out) { (void)other; return number32(one, "ancestor", out); }
int nvmlDeviceGetNvLinkErrorCounter(Gpu *gpu, uint link, int counter, ull *out) {
  char key[48];
  snprintf(key, sizeof key, "link.errors.%d.%u", counter, link);
  int code = number(gpu, key, out);
  snprintf(key, sizeof key, "link.errors");
  return code == NOT_SUPPORTED ? number(gpu, key, out) : code;
}

typedef struct { char legacy[16]; uint domain, bus, device, id, subsystem; char address[32]; } Pci;
int nvmlDeviceGetPciInfo_v3(Gpu *gpu, Pci *out) { memset(out, 0, sizeof *out); return words(gpu, "pci", out->address, 32); }
int nvmlDeviceGetNvLinkRemotePciInfo_v2(Gpu *gpu, uint link, Pci *out) {
  (void)link; memset(out, 0, sizeof *out); return words(gpu, "link.pci", out->address, 32);
}

typedef struct { uint version; ull total, reserved, free, used; } Memory;
int nvmlDeviceGetMemoryInfo_v2(Gpu *gpu, Memory *out) {
  if (out->version != (sizeof *out | 2u << 24)) return VERSION_MISMATCH;
  int code = number(gpu, "memory.total", &out->total);
  if (code == SUCCESS) code = number(gpu, "memory.reserved", &out->reserved);
  if (code == SUCCESS) code = number(gpu, "memory.used", &out->used);
  out->free = out->total - out->reserved - out->used;
  return code;
}

typedef struct { uint pid; ull bytes; uint instance, compute; } Owner;
static int owners(Gpu *gpu, const char *key, uint *count, Owner *out) {
  char value[128], *end = value;
  int code = look(gpu, key, value);
  uint found = 0, room = *count;
  if (code == NOT_SUPPORTED && !strcmp(key, "compute")) { *count = 0; return SUCCESS; }
  if (code != SUCCESS) return code;
  for (; *end; found++) { /* "PID:BYTES PID:BYTES" */
    ull pid = strtoull(end, &end, 0), bytes = *end ? strtoull(end + 1, &end, 0) : 0;
    if (out && found < room) out[found] = (Owner){(uint)pid, bytes, 0, 0};
  }
  *count = found;
  return found > room ? TOO_SMALL : SUCCESS;
}
int nvmlDeviceGetComputeRunningProcesses_v3(Gpu *gpu, uint *n, Owner *out) { return owners(gpu, "compute", n, out); }
int nvmlDeviceGetGraphicsRunningProcesses_v3(Gpu *gpu, uint *n, Owner *out) { return owners(gpu, "graphics", n, out); }

typedef struct { uint id, scope; long long time, latency; int kind, code; ull value; } Field;
int nvmlDeviceGetFieldValues(Gpu *gpu, int count, Field *values) {
  const uint last = BRANCH >= 580 ? 273 : BRANCH >= 570 ? 268 : BRANCH >= 550 ? 199 : 196;
  char key[48];
  for (int i = 0; i < count; i++) {
    snprintf(key, sizeof key, "field.%u.%u", values[i].id, values[i].scope);
    values[i].kind = ULLONG;
    values[i].code = number(gpu, key, &values[i].value);
    snprintf(key, sizeof key, "field.%u", values[i].id);
    if (values[i].code == NOT_SUPPORTED) values[i].code = number(gpu, key, &values[i].value);
    if (values[i].id > last) values[i].code = INVALID_ARGUMENT;
  }
  return SUCCESS;
}

typedef struct { unsigned char cluster[16]; int status; uint clique; unsigned char state; } Fabric;
int nvmlDeviceGetGpuFabricInfo(Gpu *gpu, Fabric *out) {
  uint state = 0, status = 0;
  int code = number32(gpu, "fabric.state", &state);
  if (code == SUCCESS) code = number32(gpu, "fabric.status", &status);
  memset(out, 0, sizeof *out);
  out->status = (int)status;
  out->state = (unsigned char)state;
  return code;
}
#if BRANCH >= 550
typedef struct { uint version; Fabric fabric; uint mask; unsigned char summary; } FabricV;
int nvmlDeviceGetGpuFabricInfoV(Gpu *gpu, FabricV *out) {
  const uint version = out->version >> 24;
  if (version < 2 || version > (BRANCH >= 580 ? 3 : 2)) return VERSION_MISMATCH;
  int code = nvmlDeviceGetGpuFabricInfo(gpu, &out->fabric);
  return code == SUCCESS ? number32(gpu, "fabric.mask", &out->mask) : code;
}
#endif
#if BRANCH >= 570
int nvmlDeviceGetMarginTemperature(Gpu *gpu, int out[2]) {
  return out[0] == (8 | 1 << 24) ? number32(gpu, "temperature.margin", (uint *)&out[1]) : VERSION_MISMATCH;
}
#endif
