/* out = relu(gate) * up on the CPU, from C99, against values by hand. */
#include <fftune/fftune.h>
#include <stdio.h>
#include <string.h>

#if FFTUNE_VERSION_NUMBER < 100
#error "fftune.h has no version"
#endif

static int failed(const char* what) {
  fprintf(stderr, "%s: %s\n", what, fftune_last_error());
  return 1;
}

int main(void) {
  static const float gate[4] = {1, -2, 3, 0.5f}, up[4] = {2, 5, -1, 8}, expected[4] = {2, 0, -3, 4};
  float out[4] = {9, 9, 9, 9};
  void* buffers[3] = {(void*)gate, (void*)up, out};
  fftune_context* context = NULL;
  fftune_plan* plan = NULL;
  int i;
  if (strcmp(fftune_version(), FFTUNE_VERSION_STRING) != 0) return failed("version");
  if (fftune_context_create(-1, NULL, &context) != FFTUNE_OK) return failed("context");
  if (fftune_plan_create(context,
                         "{\"op\":\"act-mul\",\"dtype\":\"f32\",\"m\":1,\"h\":4,\"act\":\"relu\"}",
                         &plan) != FFTUNE_OK)
    return failed("plan");
  if (fftune_plan_workspace_bytes(plan) != 0) return failed("workspace");
  if (fftune_plan_run(plan, buffers, 3, NULL, NULL) != FFTUNE_OK) return failed("run");
  for (i = 0; i < 4; ++i)
    if (out[i] != expected[i]) return failed("value");
  fftune_plan_destroy(plan);
  fftune_context_destroy(context);
  printf("fftune %s: out is right\n", fftune_version());
  return 0;
}
