// A runtime compiler that compiles nothing, for the driver that does nothing.
#include <stddef.h>
#include <string.h>

typedef int Result;

static const char nothing[] = ".version 8.0\n";

Result nvrtcVersion(int *major, int *minor) { return *major = 13, *minor = 0, 0; }
Result nvrtcGetNumSupportedArchs(int *count) { return *count = 1, 0; }
Result nvrtcGetSupportedArchs(int *archs) { return *archs = 90, 0; }
const char *nvrtcGetErrorString(Result result) { return "none"; }
Result nvrtcCreateProgram(void **program, const char *source, const char *name, int count, const char *const *headers,
                          const char *const *names) {
    return *program = (void *)1, 0;
}
Result nvrtcDestroyProgram(void **program) { return 0; }
Result nvrtcCompileProgram(void *program, int count, const char *const *options) { return 0; }
Result nvrtcGetPTXSize(void *program, size_t *bytes) { return *bytes = sizeof nothing, 0; }
Result nvrtcGetPTX(void *program, char *ptx) { return memcpy(ptx, nothing, sizeof nothing), 0; }
Result nvrtcGetProgramLogSize(void *program, size_t *bytes) { return *bytes = 1, 0; }
Result nvrtcGetProgramLog(void *program, char *log) { return *log = 0, 0; }
